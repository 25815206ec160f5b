"""Intake takes the learner's part of a file, repairs the rest, and refuses with a reason what cannot be read."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grader.examination.cell_source import plain_python
from grader.examination.intake import MAX_CODE, read_submission
from grader.examination.notebook_file import Refused
from grader.examination.submission import learner_cells, rebuild
from grader.labs.lab import Lab, lab_from_notebook
from grader.results.result import NO_CELLS, NO_MARKS
from tests.examples import examples

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
    "Latin-1": '{"cells": [{"cell_type": "code", "source": "# \xe9"}]}'.encode("latin-1"),
    "a Python script": b"import torch\n",
    "a zip": b"PK\x03\x04" + bytes(100),
    "a PDF": b"%PDF-1.7",
    "a web page": b"<!DOCTYPE html><html>",
    "null bytes": bytes(1000),
    "NaN": b"NaN",
    "not JSON": b"print('hi')",
    "not a notebook": b"[1, 2]",
    "an old notebook": b'{"worksheets": []}',
    "cells that are no list": b'{"cells": {"a": 1}}',
    "a cell that is no cell": b'{"cells": [5]}',
    "a source that is no text": b'{"cells": [{"cell_type": "code", "source": {"a": 1}}]}',
    "nested 200,000 deep": b'{"cells": ' + b"[" * 200_000,
    "too large": b"[" + b" " * (64 << 20),
    "a million tables": b'{"cells": [' + b"{}," * (1 << 20) + b"{}]}",
    "millions of numbers": b'{"cells": [' + b"1," * (7 << 20) + b"1]}",
    "a source of numbers": b'{"cells": [{"cell_type": "code", "source": 7}]}',
    "a source of mixed lines": b'{"cells": [{"cell_type": "code", "source": ["x = 1", 2]}]}',
    "worksheets that are none": b'{"worksheets": [{"cells": 1}], "nbformat": 3}',
    "code without end": json.dumps({"cells": [{"cell_type": "code", "source": "x=1\n" * 2500}] * 30}).encode(),
    "a cell of megabytes": json.dumps({"cells": [{"cell_type": "code", "source": "x" * (2 << 20)}]}).encode(),
    "too many cells": json.dumps({"cells": [{"cell_type": "code", "source": ""}] * 3000}).encode(),
}


@pytest.mark.parametrize("raw", BAD.values(), ids=BAD.keys())
def test_what_cannot_be_read_is_refused_with_a_reason(released: Lab, raw: bytes) -> None:
    with pytest.raises(Refused) as caught:
        read_submission(raw, released)
    assert len(str(caught.value)) > 10


REASONS = {
    "merge conflict (line 3)": b'{\n "cells": [\n<<<<<<< HEAD\n {},\n=======\n]\n>>>>>>> theirs\n}',
    "ends in the middle": b'{"cells": [{"cell_type": "code", "source": "x = 1',
    "ends in the middle, as": b'{"cells": [{"cell_type": "code"}',
    "line 1: ": b'{"cells": [],}',
    "web page": b"<html>",
    "a zip archive": b"PK\x03\x04",
    "not text in UTF-8 (its byte 3 is not)": b'{"\xe9"}',
    "clear its outputs": b"[" * (2 << 20),
}


@pytest.mark.parametrize("reason", REASONS)
def test_a_refusal_says_what_to_do_about_it(released: Lab, reason: str) -> None:
    with pytest.raises(Refused) as caught:
        read_submission(REASONS[reason], released)
    assert reason in str(caught.value)


def answered(release_text: str, change: Callable[[dict[str, Any]], Any] = lambda notebook: None) -> dict[str, Any]:
    """The released notebook with an answer in it, and another change made."""
    notebook: dict[str, Any] = json.loads(release_text)
    next(cell for cell in notebook["cells"] if cell["id"] == "Window")["source"] = ANSWER
    change(notebook)
    return notebook


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
def test_a_file_with_a_byte_order_mark_is_read(released: Lab, release_text: str, encoding: str) -> None:
    submission = read_submission(json.dumps(answered(release_text)).encode(encoding), released)
    assert submission.answers["Window"] == ANSWER
    assert [note for note in submission.notes if "UTF-8" not in note] == []


def test_the_old_format_with_worksheets_is_read(released: Lab, release_text: str) -> None:
    notebook = answered(release_text)
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell["input"] = cell.pop("source")
        cell.pop("id")
    old = {"nbformat": 3, "worksheets": [{"cells": notebook["cells"]}, {"cells": []}]}
    submission = read_submission(json.dumps(old).encode(), released)
    assert submission.answers["Window"] == ANSWER
    assert submission.notes == [
        "the notebook is in the old format nbformat 3: its cells were read as those of nbformat 4"
    ]


def test_cells_that_lost_their_metadata_are_recognised_by_their_id(released: Lab, release_text: str) -> None:
    def lose(notebook: dict[str, Any]) -> None:
        for number, cell in enumerate(notebook["cells"]):
            cell["metadata"] = {"id": cell.pop("id")} if number % 2 else {}

    submission = read_submission(json.dumps(answered(release_text, lose)).encode(), released)
    assert submission.answers["Window"] == ANSWER
    assert all("lost its metadata" in note for note in submission.notes)
    assert len(submission.notes) == len(released.cells)


def test_a_renamed_cell_is_recognised_by_its_id(released: Lab, edited: Any) -> None:
    def rename(cells: list[dict[str, Any]], by_id: dict[str, Any]) -> None:
        by_id["Window"].update(source=ANSWER)
        by_id["Window"]["metadata"]["nbgrader"]["grade_id"] = "mine"
        by_id["check_len"]["metadata"]["nbgrader"]["grade_id"] = "check_nothing"

    submission = read_submission(edited(rename), released)
    assert submission.answers["Window"] == ANSWER
    assert submission.added == []
    assert len(submission.notes) == 2


def test_a_cell_split_in_two_runs_both_halves_in_order(released: Lab, edited: Any) -> None:
    def split(cells: list[dict[str, Any]], by_id: dict[str, Any]) -> None:
        first = {**by_id["Window"], "source": "helper = 1"}
        by_id["Window"]["source"] = ANSWER
        cells.insert(cells.index(by_id["Window"]), first)

    submission = read_submission(edited(split), released)
    sources = [source for source, _ in learner_cells(released, submission)]
    assert sources.index("helper = 1") == sources.index(ANSWER) - 1


def test_a_duplicate_moved_behind_later_cells_still_runs_before_the_answer(released: Lab, edited: Any) -> None:
    def scatter(cells: list[dict[str, Any]], by_id: dict[str, Any]) -> None:
        cells.append({**by_id["Window"], "source": "class Window:\n    first = 1"})
        cells.append({**by_id["Window"], "source": ANSWER})
        cells.remove(by_id["Window"])

    submission = read_submission(edited(scatter), released)
    sources = [source for source, _ in learner_cells(released, submission) if "class Window" in source]
    assert sources == ["class Window:\n    first = 1", ANSWER]
    assert "the lab's cells were moved: the original order was used" in submission.notes


def test_changed_points_are_reported(released: Lab, edited: Any) -> None:
    def change(cells: list[dict[str, Any]], by_id: dict[str, Any]) -> None:
        by_id["check_len"]["metadata"]["nbgrader"]["points"] = 100

    notes = read_submission(edited(change), released).notes
    assert notes == ["cell check_len had its points or its grading marks changed: the original ones were used"]


def test_another_labs_notebook_is_one_note_though_labs_name_some_cells_alike(released: Lab, edited: Any) -> None:
    kinds = {cell.grade_id: cell.kind for cell in released.cells}

    def other_lab(cells: list[dict[str, Any]], _: Any) -> None:
        for cell in cells:
            cell["source"] = f"# of another lab: {cell['id']}"
            if kinds[cell["id"]] in ("solution", "answer"):
                cell["id"] = cell["metadata"]["nbgrader"]["grade_id"] = f"other_{cell['id']}"

    assert read_submission(edited(other_lab), released).notes == [NO_CELLS]

    def unmarked(cells: list[dict[str, Any]], _: Any) -> None:
        for number, cell in enumerate(cells):
            cell["id"], cell["metadata"] = f"{number}", {}
            if kinds[list(kinds)[number]] == "solution":
                cell["source"] = ANSWER

    submission = read_submission(edited(unmarked), released)
    assert submission.notes == [
        "cells that have lost their ids: 7 were recognised by their text",
        "cell Window is missing: its names are defined in another cell",
        "cell apply_all is missing: it was put back",
    ]
    assert {added.after for added in submission.added} == {"imports", "counter"}

    def only_the_answer(cells: list[dict[str, Any]], _: Any) -> None:
        cells[:] = [code(ANSWER)]

    assert read_submission(edited(only_the_answer), released).notes == [NO_MARKS]

    def own_cells_only(cells: list[dict[str, Any]], _: Any) -> None:
        cells[:] = [cell for cell in cells if kinds[cell["id"]] not in ("solution", "answer")] + [code(ANSWER)]

    assert NO_CELLS not in read_submission(edited(own_cells_only), released).notes


def test_line_ends_of_windows_are_no_change(released: Lab, release_text: str) -> None:
    def windows(notebook: dict[str, Any]) -> None:
        for cell in notebook["cells"]:
            cell["source"] = "".join(cell["source"]).replace("\n", "\r\n")

    submission = read_submission(json.dumps(answered(release_text, windows)).encode(), released)
    assert submission.notes == []
    assert submission.answers["Window"] == ANSWER


@pytest.mark.parametrize("html", ["<p>é</p>" * (4 << 20), '<p>,\\"[{' * (5 << 20)])
def test_outputs_of_fifty_megabytes_cost_nothing(released: Lab, edited: Any, html: str) -> None:
    def show(cells: list[dict[str, Any]], by_id: dict[str, Any]) -> None:
        by_id["Window"].update(source=ANSWER, outputs=[{"data": {"text/html": html}}])

    raw = edited(show)
    assert len(raw) > 50e6
    assert read_submission(raw, released).answers["Window"] == ANSWER


def test_odd_json_that_jupyter_reads_is_read(released: Lab, release_text: str) -> None:
    text = json.dumps(answered(release_text))
    odd = '{"cells": [], "x": NaN, "y": ' + "9" * 6000 + ", " + text[1:]
    submission = read_submission(odd.encode(), released)
    assert submission.answers["Window"] == ANSWER
    assert "twice" in submission.notes[0]


@pytest.mark.parametrize("metadata", [None, 1, "x", [], {"nbgrader": 5}, {"nbgrader": {"grade_id": ["Window"]}}])
def test_metadata_of_any_type_is_survived(released: Lab, edited: Any, metadata: Any) -> None:
    def replace(cells: list[dict[str, Any]], by_id: dict[str, Any]) -> None:
        by_id["Window"].update(source=ANSWER, metadata=metadata)

    assert read_submission(edited(replace), released).answers["Window"] == ANSWER


def test_a_notebook_full_of_faults_has_a_readable_number_of_notes(released: Lab, edited: Any) -> None:
    def many(cells: list[dict[str, Any]], by_id: dict[str, Any]) -> None:
        cells.extend({**by_id["Window"], "source": "x", "cell_type": f"type {n}"} for n in range(500))

    notes = read_submission(edited(many), released).notes
    assert len(notes) == 41
    assert "more" in notes[-1]


def test_what_is_just_within_the_limits_still_is_when_it_is_read_again(released: Lab, release_text: str) -> None:
    stubs = sum(len(cell.source) for cell in released.of_kind("solution"))
    room = MAX_CODE - stubs - 1998 * 2
    cells = [code("x" * (room - 1)), *(code("y\n") for _ in range(1998)), code("z")]
    submission = read_submission(json.dumps({"cells": cells}).encode(), released)
    rebuilt = rebuild(json.loads(release_text), released, submission)
    assert read_submission(json.dumps(rebuilt).encode(), released).added == submission.added
    for more in (code("xx"), code("#")):
        with pytest.raises(Refused, match="of your own"):
            read_submission(json.dumps({"cells": [*cells, more]}).encode(), released)


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


@settings(deadline=None, max_examples=examples(60))
@given(st.lists(json_values))
def test_no_cells_whatever_make_intake_fail_in_another_way_than_refusing(released: Lab, cells: list[Any]) -> None:
    with contextlib.suppress(Refused):
        read_submission(json.dumps({"cells": cells}).encode(), released)


def test_magics_and_shell_lines_become_python() -> None:
    source = "%matplotlib inline\nif True:\n    !pip list\nx = 7 % 2"
    names: dict[str, Any] = {}
    exec(plain_python(source), names)
    assert names["x"] == 1
    exec(plain_python("%%bash\nthis is not python"), names)
    exec(plain_python("%%time\n%precision 3\nprint?\n?print\ny = 2"), names)
    assert names["y"] == 2
    assert plain_python("x = '''\n%d\n'''") == "x = '''\n%d\n'''"
