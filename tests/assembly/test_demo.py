"""What a newcomer sees first of the course's model: a text that makes sense, and what the model is."""

import ast
import re
from pathlib import Path

from reference_impl import LLM, course_model
from reference_impl.assembly import demo


def test_the_demos_text_is_a_whole_function_that_says_nothing_twice_and_the_label_has_the_models_size() -> None:
    llm = LLM(course_model("target"))
    output = llm.generate([demo.PROMPT], demo.demo_sampling())[0]
    assert output.finish_reason == "stop", output.text
    (function,) = ast.parse(demo.PROMPT + output.text).body
    assert isinstance(function, ast.FunctionDef)
    assert ast.get_docstring(function)
    lines = output.text.splitlines()
    assert len(lines) == len(set(lines)) >= 2
    million = re.match(r"(\d+) M parameters", demo.ABOUT)
    assert million
    assert int(million[1]) == round(llm.engine.model.num_parameters() / 1e6)


def test_the_readme_shows_the_same_prompt_and_stop() -> None:
    text = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
    [stop] = demo.STOP
    assert f"prompt = {demo.PROMPT!r}".replace("'", '"') in text
    assert f"stop={stop!r}".replace("'", '"') in text
