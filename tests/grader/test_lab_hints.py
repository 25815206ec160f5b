"""Hints one at a time, tries that count, and an explanation after three of them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from grader.examination.needed import needed_cells
from grader.examination.submission import Submission
from grader.labs.lab import HELPS, Cell, Lab, LabError, lab_from_notebook, load_lab
from grader.study.lab_hints import next_hint, steps
from grader.study.lab_tries import TRIES, Tries, log_path, read_tries, record_asked, record_try

LABS = sorted(Path("labs").glob("[0-9]*/*.ipynb"))
HELP = '# question: what if?\n# hint: do this.\n# explanation: 2 is 1 + 1,\n#   and "no" more.\n'


@pytest.fixture
def toy(release_text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    """The released toy lab, whose check_len has all three helps."""
    monkeypatch.setenv("INFERLAB_DATA", str(tmp_path / "data"))
    raw = json.loads(release_text)
    for cell in raw["cells"]:
        if cell["id"] == "check_len":
            cell["metadata"]["inferlab"] = {"question": "what if?", "hint": "do this.", "explanation": "2 is 1 + 1."}
    return lab_from_notebook(raw, "01_toy", "toy")


def window(body: str) -> Submission:
    return Submission({"Window": f"class Window:\n    def __len__(self):\n        {body}\n"})


def check_len(toy: Lab) -> Cell:
    cell = toy.cell("check_len")
    assert cell is not None
    return cell


def test_an_authors_helps_are_in_the_metadata_and_not_in_what_a_learner_reads(toy_source: Path, tmp_path: Path) -> None:
    from grader.labs.lab_source import released_notebook, solution_notebook, write_notebook

    source = tmp_path / "01_toy" / "toy.py"
    source.parent.mkdir()
    source.write_text(toy_source.read_text().replace("# hint: it never exceeds the size of the window.\n", HELP))
    text = released_notebook(write_notebook(solution_notebook(source)), "01_toy", "toy")
    cell = lab_from_notebook(json.loads(text), "01_toy", "toy").cell("check_len")
    assert cell is not None
    assert [getattr(cell, key) for key in HELPS] == ["what if?", "do this.", '2 is 1 + 1, and "no" more.']
    assert cell.source.startswith("# property: len() is the number of vectors kept.\nw = Window(2)\n")


@pytest.mark.parametrize("path", LABS, ids=lambda path: path.parent.name)
def test_every_check_of_every_lab_has_its_helps_and_none_is_a_solution(path: Path) -> None:
    lab, solution = load_lab(path), load_lab(Path("solutions", *path.parts[1:]))
    lines = {
        re.sub(r"\s", "", line)
        for cell in solution.of_kind("solution")
        for block in re.findall(r"### BEGIN SOLUTION\n(.*?)### END SOLUTION", cell.source, re.DOTALL)
        for line in block.split("\n")
        if len(re.sub(r"\s", "", line)) >= 16
    }
    for cell in lab.of_kind("check"):
        for key in HELPS:
            text = getattr(cell, key)
            assert text, f"{cell.grade_id}: no {key}"
            assert f"# {key}:" not in cell.source
            assert len(text) <= 650, f"{cell.grade_id}: {key} has {len(text)} characters"
        assert cell.question.endswith("?"), cell.grade_id
        found = [line for line in lines if line in re.sub(r"\s", "", cell.question + cell.explanation)]
        assert not found, f"{cell.grade_id}: a line of the solution is in its explanation: {found}"


def test_each_asking_gives_one_step_more(toy: Lab) -> None:
    first = next_hint(toy, "len")
    assert "what if?" in first
    assert "do this" not in first
    second = next_hint(toy, "check_len")
    assert "what if?" in second
    assert "do this." in second
    assert "so far: 0" in second
    third = next_hint(toy, "check_len")
    assert "2 is 1 + 1" not in third
    for number in range(TRIES):
        assert record_try(toy, window(f"return {number}"), check_len(toy)) == ""
    assert "Explanation: 2 is 1 + 1." in next_hint(toy, "check_len")
    assert "no further hint" in next_hint(toy, "check_len")
    with pytest.raises(LabError, match="check_window, check_len, check_calls"):
        next_hint(toy, "check_lenn")


def test_only_a_different_try_at_this_check_counts(toy: Lab) -> None:
    check = check_len(toy)
    stub = next(cell.source for cell in toy.of_kind("solution"))
    for same in (window("return 1"), window("return 1"), window("return  1  # again")):
        record_try(toy, same, check)
    record_try(toy, Submission({"Window": stub}), check)
    record_try(toy, Submission({"Window": stub, "apply_all": "def apply_all(*a): return 3"}), check)  # not needed by it
    assert len(read_tries("01_toy")["check_len"].tried) == 1
    assert read_tries("02_other") == {}
    assert [step.opens for step in steps(check, Tries({"a", "b"}))] == [
        "", "", "opens after 3 different tries at this check; so far: 2",
    ]  # fmt: skip
    assert steps(check, Tries({"a", "b"}))[-1].text == ""


def test_a_damaged_log_costs_its_line_and_a_full_folder_is_said(toy: Lab) -> None:
    record_try(toy, window("return 1"), check_len(toy))
    with log_path().open("a") as log:
        log.write('\n{"v": 9, "lab": "01_toy"}\n[1]\n{"v": 1, "lab": "01_toy", "check": "check_len", "asked": "x"}\n{')
    assert record_asked("01_toy", "check_len", 2) == ""
    assert read_tries("01_toy") == {"check_len": Tries(read_tries("01_toy")["check_len"].tried, 2)}
    assert len(read_tries("01_toy")["check_len"].tried) == 1
    log_path().unlink()
    log_path().mkdir()
    assert "what you tried is not kept" in record_asked("01_toy", "check_len", 1)
    assert "what you tried is not kept" in record_try(toy, window("return 1"), check_len(toy))


def test_a_check_needs_what_it_calls_also_through_helpers(lab: Any) -> None:
    submission = Submission({"Window": "class Window: pass", "apply_all": "def apply_all(m, t, w): return helper()"})
    needs = {cell.grade_id: needed_cells(lab, submission, cell) for cell in lab.of_kind("check")}
    assert needs == {"check_window": {"Window"}, "check_len": {"Window"}, "check_calls": {"Window", "apply_all"}}
