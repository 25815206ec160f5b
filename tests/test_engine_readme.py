"""The reading path in the engine's README has the files of the core, their lines, and what a step enters."""

from __future__ import annotations

import re
from pathlib import Path

import reference_impl
from reference_impl import LLM, SamplingParams, course_model
from tests.core import reading_path as core
from tests.core.step_path import entered

PACKAGE = Path(reference_impl.__file__).parent
TEXT = (PACKAGE / "README.md").read_text("utf-8")


def test_the_readme_lists_the_reading_path_with_its_lines() -> None:
    found = re.findall(r"^\| (\d+) \| `(core/\w+)\.py` \| (\d+) \|", TEXT, re.MULTILINE)
    expected = [(str(at), module, str(core.lines(PACKAGE, module))) for at, module in enumerate(core.PATH, 1)]
    assert found == expected
    total = sum(core.lines(PACKAGE, module) for module in core.PATH)
    assert f"The core has {len(core.PATH)} files and {total:,} lines with comments" in TEXT


def test_the_readme_says_what_a_decoding_step_enters() -> None:
    llm = LLM(course_model("target"), dtype="float32", device="cpu", num_blocks=32)
    prompt, sampling = llm.encode("def fibonacci(n):"), SamplingParams(max_tokens=16, temperature=0.7, seed=1)
    llm.engine.add(prompt, sampling)
    for _ in range(3):
        llm.engine.step()
    found = entered(llm.engine.step, PACKAGE)
    said = f"enters {len(found)} functions in {len({file for file, _ in found})} files of the package"
    assert said in TEXT.replace("\n", " ")


def test_the_readme_names_every_room_and_every_feature() -> None:
    folders = [path for place in (PACKAGE, PACKAGE / "features") for path in place.iterdir() if path.is_dir()]
    names = {path.name for path in folders} - {"__pycache__"}
    assert {name for name in names if f"`{name}/`" not in TEXT} == set()
    assert len([path for path in PACKAGE.iterdir() if path.name != "__pycache__"]) <= 14
