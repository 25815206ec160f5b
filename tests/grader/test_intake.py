"""Intake takes the learner's part of a file, repairs the rest, and refuses with a reason what cannot be read."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grader.intake import Refused, learner_cells, plain_python, read_submission, rebuild
from grader.lab import Lab, lab_from_notebook

ANSWER = "class Window:\n    pass"


@pytest.fixture(scope="module")
def released(release_text: str) -> Lab:
    return lab_from_notebook(json.loads(release_text), "01_toy", "toy")


@pytest.fixture
def edited(release_text: str) -> Callable[..., bytes]:
    """The released notebook with a change made to its cells by id, as bytes."""

    def edit(change: Callable[[list[dict[str, Any]], dict[str, dict[str, Any]]], None]) -> bytes:
        notebook = json.loads(release_text)
        by_id = {cell["id"]: cell for cell in notebook["cells"]}
        change(notebook["cells"], by_id)
        return json.dumps(notebook).encode()

    return edit


def code(source: str, **metadata: Any) -> dict[str, Any]:
    return {"cell_type": "code", "id": "x", "metadata": metadata, "source": source, "outputs": []}


def test_answers_are_taken_and_a_clean_file_has_no_notes(released: Lab, edited: Any) -> None:
    submission = read_submission(edited(lambda cells, by_id: by_id["Window"].update(source=ANSWER)), released)
    assert submission.answers["Window"] == ANSWER
    assert submission.notes == []


def test_cells_are_matched_by_grade_id_because_colab_moves_the_cell_ids(released: Lab, edited: Any) -> None:
    def colab(cells: list[dict[str, Any]], by_id: dict[str, Any]) -> None:
        by_id["Window"]["source"] = ANSWER.splitlines(keepends=True)
        for cell in cells:
            cell["metadata"]["id"] = cell.pop("id")

    submission = read_submission(edited(colab), released)
    assert submission.answers["Window"] == ANSWER
    assert submission.notes == []


def test_an_edited_check_is_discarded_and_reported(released: Lab, edited: Any) -> None:
    submission = read_submission(edited(lambda cells, by_id: by_id["check_len"].update(source="pass")), released)
    assert "check_len" not in submission.answers
    assert submission.notes == ["cell check_len is not yours to change: the original was used"]


def test_changed_points_and_types_do_not_matter(released: Lab, edited: Any, release_text: str) -> None:
    def change(cells: list[dict[str, Any]], by_id: dict[str, Any]) -> None:
        by_id["check_len"]["metadata"]["nbgrader"]["points"] = 100
        by_id["check_len"]["metadata"]["nbgrader"]["grade"] = False
        by_id["Window"].update(cell_type="markdown", source=ANSWER)

    submission = read_submission(edited(change), released)
    notebook = rebuild(json.loads(release_text), released, submission)
    again = lab_from_notebook(notebook, "01_toy", "toy")
    assert again.points == released.points
    assert (again.cell("Window") or released.cells[0]).source == ANSWER
    assert "type changed" in submission.notes[0]


def test_a_deleted_check_is_put_back(released: Lab, edited: Any, release_text: str) -> None:
    submission = read_submission(edited(lambda cells, by_id: cells.remove(by_id["check_len"])), released)
    assert submission.notes == ["cell check_len is missing: it was put back"]
    assert [c["id"] for c in rebuild(json.loads(release_text), released, submission)["cells"]] == [
        cell.grade_id for cell in released.cells
    ]


def test_of_a_duplicated_cell_the_last_one_counts_as_when_the_notebook_is_run(released: Lab, edited: Any) -> None:
    def copy(cells: list[dict[str, Any]], by_id: dict[str, Any]) -> None:
        cells.append({**by_id["Window"], "source": ANSWER})

    submission = read_submission(edited(copy), released)
    assert submission.answers["Window"] == ANSWER
    assert "more than once" in submission.notes[0]


def test_added_cells_keep_their_place_and_run_only_with_the_learner(released: Lab, edited: Any) -> None:
    def add(cells: list[dict[str, Any]], by_id: dict[str, Any]) -> None:
        cells.insert(0, code("first = 1"))
        cells.insert(cells.index(by_id["Window"]) + 1, code("helper = 2", nbgrader={"grade_id": "unknown"}))

    submission = read_submission(edited(add), released)
    names = [name for _, name in learner_cells(released, submission)]
    assert names == ["added-0", "imports", "Window", "added-1", "apply_all"]


def test_a_deleted_solution_cell_rewritten_elsewhere_is_not_undone_by_the_stub(
    released: Lab, edited: Any, release_text: str
) -> None:
    def move(cells: list[dict[str, Any]], by_id: dict[str, Any]) -> None:
        cells.insert(0, code(ANSWER))
        cells.remove(by_id["Window"])

    submission = read_submission(edited(move), released)
    sources = [source for source, _ in learner_cells(released, submission)]
    assert sum("class Window" in source for source in sources) == 1
    rebuilt = rebuild(json.loads(release_text), released, submission)
    assert sum("class Window" in "".join(cell["source"]) for cell in rebuilt["cells"]) == 1


def test_what_intake_built_is_taken_in_unchanged(released: Lab, edited: Any, release_text: str) -> None:
    def mess(cells: list[dict[str, Any]], by_id: dict[str, Any]) -> None:
        by_id["Window"]["source"] = ANSWER
        cells.insert(3, code("%matplotlib inline\nx = 1"))
        cells.remove(by_id["check_len"])

    submission = read_submission(edited(mess), released)
    again = read_submission(json.dumps(rebuild(json.loads(release_text), released, submission)).encode(), released)
    assert (again.answers["Window"], again.added) == (ANSWER, submission.added)
    assert again.notes == []


BAD = {
    "empty": b"  ",
    "not UTF-8": b"\xff\xfe\x00{",
    "not JSON": b"print('hi')",
    "not a notebook": b"[1, 2]",
    "an old notebook": b'{"worksheets": []}',
    "cells that are no list": b'{"cells": {"a": 1}}',
    "a cell that is no cell": b'{"cells": [5]}',
    "a source that is no text": b'{"cells": [{"cell_type": "code", "source": {"a": 1}}]}',
    "nested 200,000 deep": b'{"cells": ' + b"[" * 200_000,
    "too large": b" " * (21 << 20),
    "a cell of megabytes": json.dumps({"cells": [{"cell_type": "code", "source": "x" * (2 << 20)}]}).encode(),
    "too many cells": json.dumps({"cells": [{"cell_type": "code", "source": ""}] * 3000}).encode(),
}


@pytest.mark.parametrize("raw", BAD.values(), ids=BAD.keys())
def test_what_cannot_be_read_is_refused_with_a_reason(released: Lab, raw: bytes) -> None:
    with pytest.raises(Refused) as caught:
        read_submission(raw, released)
    assert len(str(caught.value)) > 10


def test_text_that_no_file_can_hold_is_made_harmless(released: Lab, edited: Any, release_text: str) -> None:
    submission = read_submission(
        edited(lambda cells, by_id: by_id["Window"].update(source="x = '\ud800 \0'")), released
    )
    json.dumps(rebuild(json.loads(release_text), released, submission), ensure_ascii=False).encode("utf-8")
    assert "\0" not in submission.answers["Window"]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda x: (
        st.lists(x) | st.dictionaries(st.sampled_from(["cells", "source", "metadata", "nbgrader", "grade_id"]), x)
    ),
)


@settings(deadline=None, max_examples=60)
@given(st.lists(json_values))
def test_no_cells_whatever_make_intake_fail_in_another_way_than_refusing(released: Lab, cells: list[Any]) -> None:
    with contextlib.suppress(Refused):
        read_submission(json.dumps({"cells": cells}).encode(), released)


def test_magics_and_shell_lines_become_python() -> None:
    source = "%matplotlib inline\nif True:\n    !pip list\nx = 7 % 2"
    names: dict[str, Any] = {}
    exec(plain_python(source), names)
    assert names["x"] == 1
    exec(plain_python("%%time\nthis is not python"), names)
    assert plain_python("x = '''\n%d\n'''") == "x = '''\n%d\n'''"
