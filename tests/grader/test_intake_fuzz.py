"""Random edits of a submitted notebook: intake cleans or refuses, never fails, and no edit scores above honest work."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from grader.examination.intake import read_submission
from grader.examination.notebook_file import Refused
from grader.examination.submission import DELETED, Submission, learner_cells, rebuild
from grader.labs.lab import Lab, lab_from_notebook
from grader.labs.lab_source import write_notebook
from tests.examples import examples

IDS = ["intro", "imports", "Window", "check_window", "check_len", "counter", "apply_all", "check_calls", "added-0", "x"]
HOSTILE = [
    "",
    "pass",
    "assert True",
    "raise SystemExit",
    "del Window",
    "Window = None",
    "import torch\ntorch.equal = torch.allclose = lambda *_: True",
    "import builtins\nbuiltins.len = lambda _: 2",
    "class Same:\n    __eq__ = __lt__ = __gt__ = lambda *_: True\nWindow = Same",
    "# property: x\n# hint: y\npass",
    "### BEGIN HIDDEN TESTS\npass\n### END HIDDEN TESTS",
    "%%javascript\nalert(1)",
    "!true\n%time 1",
    "\ud800\0\r\n\u2028",
    "def f(:",
    "((((((((((" * 30,
]
KEYS = ["cell_type", "id", "metadata", "source", "outputs", "nbgrader", "grade_id", "points", "cells", "worksheets"]

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(HOSTILE + IDS),
    lambda x: st.lists(x, max_size=4) | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=3), x, max_size=4),
    max_leaves=8,
)
places = st.integers(0, 30)
Edit = Callable[[dict[str, Any]], Any]


def _at(notebook: dict[str, Any], place: int) -> dict[str, Any]:
    cells = notebook["cells"]
    found = cells[place % len(cells)] if cells else {}
    return found if isinstance(found, dict) else {}


def _nbgrader(notebook: dict[str, Any], place: int) -> dict[str, Any]:
    metadata = _at(notebook, place).get("metadata")
    found = metadata.get("nbgrader") if isinstance(metadata, dict) else None
    return found if isinstance(found, dict) else {}


def _drop(place: int) -> Edit:
    return lambda notebook: notebook["cells"] and notebook["cells"].pop(place % len(notebook["cells"]))


def _copy(place: int, to: int) -> Edit:
    return lambda notebook: notebook["cells"].insert(to, json.loads(json.dumps(_at(notebook, place))))


def _swap(place: int, other: int) -> Edit:
    def swap(notebook: dict[str, Any]) -> None:
        cells = notebook["cells"]
        if cells:
            a, b = place % len(cells), other % len(cells)
            cells[a], cells[b] = cells[b], cells[a]

    return swap


edits: st.SearchStrategy[Edit] = st.one_of(
    st.builds(_drop, places),
    st.builds(_copy, places, places),
    st.builds(_swap, places, places),
    st.builds(
        lambda p, t: lambda n: _at(n, p).update(cell_type=t),
        places,
        st.sampled_from(["code", "markdown", "raw", "x"]) | values,
    ),
    st.builds(lambda p, i: lambda n: _nbgrader(n, p).update(grade_id=i), places, st.sampled_from(IDS) | values),
    st.builds(lambda p, i: lambda n: _at(n, p).update(id=i), places, st.sampled_from(IDS) | values),
    st.builds(
        lambda p, k, v: lambda n: _nbgrader(n, p).update({k: v}),
        places,
        st.sampled_from(["points", "grade", "solution", "locked", "task", "schema_version"]),
        values,
    ),
    st.builds(lambda p, m: lambda n: _at(n, p).update(metadata=m), places, values),
    st.builds(lambda p, s: lambda n: _at(n, p).update(source=s), places, st.sampled_from(HOSTILE) | values),
    st.builds(lambda p, k: lambda n: _at(n, p).pop(k, None), places, st.sampled_from(KEYS)),
    st.builds(lambda p, v: lambda n: n["cells"].insert(p, v), places, values),
    st.builds(
        lambda p, s: lambda n: n["cells"].insert(p, {"cell_type": "code", "metadata": {}, "source": s}),
        places,
        st.sampled_from(HOSTILE),
    ),
    st.builds(
        lambda k, v: lambda n: n.update({k: v}), st.sampled_from(["nbformat", "metadata", "nbformat_minor"]), values
    ),
)
flips = st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), max_size=3)


def edited(notebook_text: str, changes: list[Edit]) -> bytes:
    notebook = json.loads(notebook_text)
    for change in changes:
        change(notebook)
    return json.dumps(notebook).encode()


def damaged(raw: bytes, bytes_changed: list[tuple[float, int]], kept: float) -> bytes:
    made = bytearray(raw)
    for place, value in bytes_changed:
        made[int(place * len(made))] = value
    return bytes(made[: int(kept * len(made))])


@pytest.fixture(scope="module")
def released(release_text: str) -> Lab:
    return lab_from_notebook(json.loads(release_text), "01_toy", "toy")


def answered(release_text: str, answers: dict[str, str]) -> str:
    notebook = json.loads(release_text)
    for cell in notebook["cells"]:
        cell["source"] = answers.get(cell["id"], cell["source"])
    return json.dumps(notebook)


def check_rebuilt(raw: bytes, released: Lab, release_text: str) -> Submission | None:
    """All that must hold of any bytes handed in; returns what was taken from them, None when they are refused."""
    release = json.loads(release_text)
    try:
        submission = read_submission(raw, released)
    except Refused:
        return None
    made = rebuild(release, released, submission)
    text = write_notebook(made)
    nbformat.validate(nbformat.from_dict(made), version=4, version_minor=5)
    assert (made["nbformat"], made["nbformat_minor"]) == (4, 5)
    own = [cell for cell in made["cells"] if "nbgrader" in cell["metadata"]]
    for cell, original in zip(own, release["cells"], strict=True):
        assert cell["metadata"] == original["metadata"]
        if not original["metadata"]["nbgrader"]["solution"]:
            assert cell == original
    assert all(isinstance(note, str) and len(note) < 300 for note in submission.notes)
    again = read_submission(text.encode(), released)
    assert write_notebook(rebuild(release, released, again)) == text
    runs = [[source for source, _ in learner_cells(released, taken)] for taken in (submission, again)]
    assert runs[0] == [source for source in runs[1] if source != DELETED]
    return submission


@settings(deadline=None, max_examples=examples(400), suppress_health_check=[HealthCheck.too_slow])
@given(changes=st.lists(edits, max_size=6))
def test_any_edit_of_the_notebook_is_cleaned_or_refused(released: Lab, release_text: str, changes: list[Edit]) -> None:
    check_rebuilt(edited(release_text, changes), released, release_text)


@settings(deadline=None, max_examples=examples(150))
@given(bytes_changed=flips, kept=st.just(1.0) | st.floats(0, 1), encoding=st.sampled_from(["utf-8", "utf-16"]))
def test_any_damage_to_the_bytes_is_cleaned_or_refused(
    released: Lab, release_text: str, bytes_changed: list[tuple[float, int]], kept: float, encoding: str
) -> None:
    check_rebuilt(damaged(release_text.encode(encoding), bytes_changed, kept), released, release_text)


@settings(deadline=None, max_examples=examples(150))
@given(raw=st.binary(max_size=200) | values.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_and_any_json_are_cleaned_or_refused(released: Lab, release_text: str, raw: bytes) -> None:
    check_rebuilt(raw, released, release_text)


@pytest.fixture(scope="module")
def faulty(release_text: str, lab: Lab) -> str:
    """The submission of somebody whose window keeps everything: one check fails."""
    answers = {cell.grade_id: cell.source for cell in lab.of_kind("solution")}
    mutant = (Path(__file__).parent / "toy_lab" / "proof" / "01_toy" / "mutants" / "keeps_all.py").read_text()
    answers["Window"] = mutant[mutant.index("class Window") :]
    return answered(release_text, answers)


@pytest.fixture(scope="module")
def passed(lab: Lab, launcher: Any) -> Callable[[Submission], set[str]]:
    """The checks that a submission passes, by the examiner."""
    from grader.examination.examiner import Limits, examine

    def examined(submission: Submission) -> set[str]:
        result = examine(lab, submission, launcher, secret=b"fuzz", limits=Limits(call=30.0))
        assert [check.grade_id for check in result.checks] == [cell.grade_id for cell in lab.of_kind("check")]
        assert result.points == lab.points
        return {check.grade_id for check in result.checks if check.earned}

    return examined


@settings(deadline=None, max_examples=examples(25), suppress_health_check=[HealthCheck.too_slow])
@given(changes=st.lists(edits, min_size=1, max_size=5))
def test_no_edit_passes_a_check_that_the_honest_notebook_fails(
    released: Lab, release_text: str, faulty: str, passed: Callable[[Submission], set[str]], changes: list[Edit]
) -> None:
    honest = {"check_calls"}
    submission = check_rebuilt(edited(faulty, changes), released, release_text)
    assert submission is None or passed(submission) <= honest


def test_the_honest_notebook_passes_what_the_fuzzed_one_may(
    released: Lab, release_text: str, faulty: str, passed: Callable[[Submission], set[str]]
) -> None:
    submission = check_rebuilt(faulty.encode(), released, release_text)
    assert submission is not None
    assert submission.notes == []
    assert passed(submission) == {"check_calls"}
