"""Intake: what is taken from a submitted file, and what is not.

Taken: the solution cells, the cells a person grades, and the cells the learner added, in their place. Everything else
comes from the release. What was repaired is noted; what cannot be read is refused with a reason. `lab check`,
`grader.check()` and the grading of a course use the same intake, so they see the same submission.
"""

from __future__ import annotations

from typing import Any

from grader.examination.cell_source import is_as_released, is_stub, visible
from grader.examination.merged_cells import beside, drop_stubs, join_halves, last_of, take_from_text, unmerged
from grader.examination.notebook_file import FileCell, Refused, read_cells
from grader.examination.submission import Added, Submission, defined_elsewhere
from grader.labs.lab import Lab, without_helps
from grader.results.result import NO_CELLS, NO_MARKS

__all__ = ["Refused", "read_submission"]

MAX_NOTES = 40
MAX_ADDED = 2000  # cells
MAX_CODE = 1 << 18  # characters of all code: Python's parser takes up to a kilobyte of memory for one


def read_submission(raw: bytes, lab: Lab) -> Submission:
    """Read the bytes of a submitted notebook against the released lab. Raises Refused, and nothing else."""
    submission = Submission()
    place: str | None = None
    order = [cell.grade_id for cell in lab.cells]
    cells = read_cells(raw, submission.notes)
    owners = _owners(cells, lab, submission.notes)
    cells = unmerged(cells, owners, lab)
    _limit_code(
        sum(len(c.source) for c in cells if c.cell_type not in ("markdown", "raw")) - _given(cells, owners, lab)
    )
    last = last_of(cells, owners, lab)
    about_file = list(submission.notes)
    for number, (cell, owner) in enumerate(zip(cells, owners, strict=True)):
        if owner is None:
            if cell.source.strip():
                submission.added.append(Added(place, cell.cell_type, cell.source))
            continue
        if last[owner] == number or place is None or order.index(owner) > order.index(place):
            place = owner
        _take(cell, order.index(owner), last[owner] == number, lab, submission)
    join_halves(submission, lab)
    take_from_text(submission, lab)
    drop_stubs(submission, lab)
    if _is_of(lab, cells, owners):
        found = [owner for number, owner in enumerate(owners) if owner and last[owner] == number]
        _note_order(found, order, submission)
        _note_missing(submission, lab, last)
    else:  # what would be repaired is all of it, and says less than this
        written = defined_elsewhere(submission).intersection(lab.graded_names)
        submission.notes = [*about_file, NO_MARKS if written else NO_CELLS]
    _limit(submission, lab)
    # In the release's order, so that taking in what `rebuild` made gives the same again.
    submission.added.sort(key=lambda added: -1 if added.after is None else order.index(added.after))
    submission.notes = _tidy(submission.notes)
    return submission


def _owners(cells: list[FileCell], lab: Lab, notes: list[str]) -> list[str | None]:
    """The grade_id of the lab's cell that each cell of a file is, or None.

    It goes by metadata first. Where a tool has lost that, or moved it, the cell's id says it as well: releases give a
    cell its grade_id for an id, and no editor gives such an id to a new cell. Where both are lost, an unchanged cell is
    known by its text alone.
    """
    known = {cell.grade_id for cell in lab.cells}
    owners = [cell.grade_id if cell.grade_id in known else None for cell in cells]
    found = set(owners)
    for number, cell in enumerate(cells):
        if owners[number] is None and cell.cell_id in known and cell.cell_id not in found:
            owners[number] = cell.cell_id
            notes.append(f"cell {cell.cell_id} has lost its metadata: it was recognised by its id")
    by_text: dict[str, list[str]] = {}
    for own in lab.cells:
        if own.grade_id not in owners and own.kind != "answer":  # the answers of two questions may be alike
            by_text.setdefault(visible(own).strip(), []).append(own.grade_id)
    recognised = 0
    for number, cell in enumerate(cells):
        if owners[number] is None and (alike := by_text.get(without_helps(cell.source).strip())):
            owners[number] = alike.pop(0)
            recognised += 1
    if recognised:
        notes.append(f"cells that have lost their ids: {recognised} were recognised by their text")
    return owners


def _is_of(lab: Lab, cells: list[FileCell], owners: list[str | None]) -> bool:
    """Whether a file is a notebook of this lab, by what is this lab's alone: all labs have cells of the same names.

    It has at least half of the cells to write in, or a check as it was released.
    """
    own = {cell.grade_id: cell for cell in lab.cells}
    to_write = [cell.grade_id for cell in lab.cells if cell.kind in ("solution", "answer")]
    if not set(owners) - {None} or 2 * len(set(owners).intersection(to_write)) >= len(to_write):
        return bool(set(owners) - {None})
    return any(
        owner is not None and own[owner].kind == "check" and is_as_released(cell.source, own[owner])
        for cell, owner in zip(cells, owners, strict=True)
    )


def _take(cell: FileCell, position: int, is_last: bool, lab: Lab, submission: Submission) -> None:
    """One cell of the lab, as it stands in the file. Of several the last one counts, as when a notebook is run."""
    own, notes = lab.cells[position], submission.notes
    if _marks_changed(cell, lab.notebook["cells"][position]):
        notes.append(f"cell {own.grade_id} had its points or its grading marks changed: the original ones were used")
    if own.kind not in ("solution", "answer"):
        if not is_as_released(cell.source, own):
            if found := beside(cell.source, own):
                submission.added.append(Added(own.grade_id, "code", found))
                notes.append(f"cell {own.grade_id} is not yours to change: the original was used, and what you added "
                             "to it counts as a cell of your own")  # fmt: skip
            else:
                notes.append(f"cell {own.grade_id} is not yours to change: the original was used")
        elif not is_last:
            notes.append(f"cell {own.grade_id} occurs more than once: one was used")
        return
    if cell.cell_type != ("markdown" if own.kind == "answer" else "code"):
        notes.append(f"cell {own.grade_id} had its type changed to {cell.cell_type!r}: read as before")
    if is_last:
        submission.answers[own.grade_id] = cell.source
        return
    if own.kind != "solution" or not cell.source.strip() or is_stub(cell.source, own):
        which = "the last one" if own.kind != "solution" else "the one that is written"
        notes.append(f"cell {own.grade_id} occurs more than once: {which} was used")
    else:
        # A cell that was split in two has its metadata in both halves; the first half is run before, where it stood.
        notes.append(f"cell {own.grade_id} occurs more than once: all were used, in their order; of what is defined "
                     "twice the last counts")  # fmt: skip
        before = lab.cells[position - 1].grade_id if position else None
        submission.added.append(Added(before, "code", cell.source, half_of=own.grade_id))


def _marks_changed(cell: FileCell, release: dict[str, Any]) -> bool:
    given, own = cell.nbgrader, release["metadata"]["nbgrader"]
    return any(key in given and given[key] != own.get(key) for key in ("grade", "solution", "points", "task"))


def _limit(submission: Submission, lab: Lab) -> None:
    """Limits what was taken, not the file: what `rebuild` makes of a submission within the limits is within them."""
    if len(submission.added) > MAX_ADDED:
        raise Refused(f"the notebook has {len(submission.added)} cells of your own; at most {MAX_ADDED} are read")
    code = sum(len(added.source) for added in submission.added if added.cell_type not in ("markdown", "raw"))
    code += sum(len(submission.answers.get(cell.grade_id, cell.source)) for cell in lab.of_kind("solution"))
    _limit_code(code)


def _given(cells: list[FileCell], owners: list[str | None], lab: Lab) -> int:
    """Characters of the lab's own cells that a file holds unchanged."""
    own = {cell.grade_id: cell for cell in lab.cells if cell.kind in ("check", "code")}
    return sum(len(cell.source) for cell, owner in zip(cells, owners, strict=True)
               if owner in own and is_as_released(cell.source, own[owner]))  # fmt: skip


def _limit_code(code: int) -> None:
    if code > MAX_CODE:
        raise Refused(f"the notebook has {code} characters of your own code; at most {MAX_CODE} are read")


def _note_order(found: list[str], order: list[str], submission: Submission) -> None:
    if found != sorted(found, key=order.index):
        submission.notes.append("the lab's cells were moved: the original order was used")


def _note_missing(submission: Submission, lab: Lab, seen: dict[str, int]) -> None:
    elsewhere = defined_elsewhere(submission)
    for cell in lab.cells:
        if cell.grade_id not in seen and cell.kind != "text":
            there = cell.kind == "solution" and elsewhere.intersection(cell.names)
            how = "its names are defined in another cell" if there else "it was put back"
            submission.notes.append(f"cell {cell.grade_id} is missing: {how}")


def _tidy(notes: list[str]) -> list[str]:
    """Each note once, and not more than a person would read."""
    once = list(dict.fromkeys(notes))
    more = len(once) - MAX_NOTES
    return once if more <= 0 else [*once[:MAX_NOTES], f"and {more} notes more"]
