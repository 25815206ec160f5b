"""A chat template that never ends, or whose text has no bound, is stopped in the process that renders it, and the next
is rendered; errors name the template and the line."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from reference_impl import LLM, course_model
from reference_impl.features.chat.renderer import ChatTemplateError, Renderer
from reference_impl.features.chat.sandbox import render
from reference_impl.interfaces import SamplingParams
from tests.features.chat.conversations import CONVERSATIONS, WEATHER

FOLDER = Path(__file__).parent / "templates"
SHORT = 0.2  # seconds of the processor
LASTING = Renderer()  # with the time that an engine gives
ENDLESS = "\n{% for i in range(10**5) %}{% for j in range(10**5) %}{% endfor %}{% endfor %}"
STOPPED = "does not end within 0.2 s of processor time, which is the limit|makes too much: MemoryError"


def grown(step: str, begin: str = "'x'") -> str:
    """What `step` makes of n.a, a hundred times."""
    return f"\n{{% set n = namespace(a={begin}) %}}{{% for i in range(100) %}}{{% set n.a = {step} %}}{{% endfor %}}"


@pytest.fixture(scope="module")
def renderer() -> Iterator[Renderer]:
    made = Renderer(SHORT)
    yield made
    del made
    gc.collect()


@pytest.mark.parametrize(
    "template",
    [
        ENDLESS,
        "\n{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        grown("n.a ~ n.a"),
        grown("[n.a, n.a]") + "{{ n.a }}",
        grown("n.a * n.a", "3"),
        grown("namespace(a=n.a, b=n.a)", "namespace()") + "{{ n.a }}",
        "\n{{ 'x' * 10**12 }}",
        "\n{{ '%1000000000000d' % 5 }}",
        "\n{{ range(10**5)|join('y' * 10**5) }}",
        "\n{{ lipsum(n=10**9) }}",
    ],
)
def test_what_has_no_end_is_stopped_and_the_next_template_is_rendered(renderer: Renderer, template: str) -> None:
    with pytest.raises(ChatTemplateError, match=f"^T(, line 2)?: .*({STOPPED})"):
        renderer.render(template, {}, "T")
    assert renderer.render("{{ a }}", {"a": "é\ud800"}, "T") == "é\ud800"


def test_a_process_that_is_gone_is_named_and_replaced(renderer: Renderer) -> None:
    assert renderer.render("1", {}, "T") == "1"
    assert renderer._process is not None
    renderer._process.kill()
    with pytest.raises(ChatTemplateError, match="T: the chat template ends its process: status -9"):
        renderer.render("2", {}, "T")
    assert renderer.render("3", {}, "T") == "3"


def test_the_process_ends_with_its_renderer() -> None:
    made = Renderer()
    made.check("{{ a }}", "T")
    process = made._process
    assert process is not None
    del made
    gc.collect()
    assert process.poll() is not None


def test_an_llm_names_a_template_that_never_ends_and_goes_on() -> None:
    llm = LLM(course_model("draft"))
    llm.templates.renderer.seconds = SHORT
    asked, few = [{"role": "user", "content": "x"}], SamplingParams(max_tokens=2, temperature=0)
    with pytest.raises(ChatTemplateError, match="the given chat_template, line 2: .*does not end within"):
        llm.chat(asked, few, chat_template=ENDLESS + "{{ messages }}")
    [output] = llm.chat(asked, few, chat_template="{{ messages[0].content }}")
    assert output.token_ids == llm.generate("x", few)[0].token_ids


@pytest.mark.parametrize("name", sorted(file.stem for file in FOLDER.glob("*.jinja")))
def test_a_long_conversation_is_rendered(name: str) -> None:
    """1,000 turns and half a million characters, more than most models read."""
    messages = [{"role": "user" if i % 2 == 0 else "assistant", "content": f"{i} " * 200} for i in range(1000)]
    variables = {"messages": messages, "tools": [WEATHER] * 20, "bos_token": "", "eos_token": "", "documents": None,
                 "add_generation_prompt": True}  # fmt: skip
    template = (FOLDER / f"{name}.jinja").read_text("utf-8")
    assert LASTING.render(template, variables, name) == render(template, variables, name)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("a\n\n{{ 1 / 0 }}", "T, line 3: the chat template fails: ZeroDivisionError"),
        ("a\n{{ raise_exception('no tools') }}", "T, line 2: the chat template refuses these messages: no tools"),
        ("\n\n{% macro f() %}\n{{ x.y }}\n{% endmacro %}{{ f() }}", "T, line 4: .*UndefinedError: 'x' is undefined"),
        ("\n{{ messages[0].content + 1 }}", "T, line 2: .*TypeError"),
        ("a\n{% if %}", "T, line 2: no Jinja template: Expected an expression"),
        ("{{ a|nofilter }}", "T, line 1: no Jinja template: No filter named 'nofilter'"),
        ("\n{% include 'x' %}", "T, line 2: .*no loader"),
        ("\n{% for i in range(10**9) %}{% endfor %}", "T, line 2: .*Range too big"),
        ("{% macro f() %}{{ f() }}{% endmacro %}\n{{ f() }}", "T, line 1: .*nests too deeply"),
        ("{{ " + "(" * 5000 + ")" * 5000 + " }}", "T: no Jinja template"),
        ("{{ ''.__class__.__mro__ }}", "T, line 1: .*SecurityError"),
        ("{{ messages.append(1) }}", "T, line 1: .*SecurityError"),
        ("\n{{ 'x' | strftime_now }}", "T, line 2: no Jinja template"),
    ],
)
def test_an_error_names_the_template_and_the_line(template: str, said: str) -> None:
    with pytest.raises(ChatTemplateError, match=said):
        render(template, {"messages": CONVERSATIONS["user"]}, "T")


def test_a_template_changes_nothing_that_it_is_given() -> None:
    given: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
    assert render("{% set messages = messages + [1] %}{{ messages | length }}", given, "T") == "2"
    assert given == {"messages": [{"role": "user", "content": "x"}]}
