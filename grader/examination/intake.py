"""Intake: what is taken from a submitted file, and what is not.

Taken: the solution cells, the cells a person grades, and the cells the learner added, in their place. Everything else
comes from the release. What was repaired is noted; what cannot be read is refused with a reason. `lab check`,
`grader.check()` and the grading of a course use the same intake, so they see the same submission.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from grader.examination.notebook_file import FileCell, Refused, plain_text, read_cells
from grader.labs.lab import STUB, Cell, Lab, defined_names, split_hidden, without_helps
from grader.results.result import NO_CELLS, NO_MARKS

__all__ = ["DELETED", "Added", "Refused", "Submission", "learner_cells", "plain_python", "read_submission", "rebuild"]

MAX_NOTES = 40
MAX_ADDED = 2000  # cells
MAX_CODE = 1 << 18  # characters of all code: Python's parser takes up to a kilobyte of memory for one
DELETED = "# This cell was deleted; its names are defined in an added cell."


@dataclass
class Added:
    """A cell the learner added, after the release's cell `after` (None: at the top)."""

    after: str | None
    cell_type: str
    source: str


@dataclass
class Submission:
    """What a learner wrote. answers: source by grade_id; notes: what intake repaired or ignored."""

    answers: dict[str, str] = field(default_factory=dict)
    added: list[Added] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def read_submission(raw: bytes, lab: Lab) -> Submission:
    """Read the bytes of a submitted notebook against the released lab. Raises Refused, and nothing else."""
    submission = Submission()
    place: str | None = None
    order = [cell.grade_id for cell in lab.cells]
    cells = read_cells(raw, submission.notes)
    owners = _owners(cells, lab, submission.notes)
    about_file = list(submission.notes)
    last = {owner: number for number, owner in enumerate(owners) if owner is not None}
    for number, (cell, owner) in enumerate(zip(cells, owners, strict=True)):
        if owner is None:
            if cell.source.strip():
                submission.added.append(Added(place, cell.cell_type, cell.source))
            continue
        if last[owner] == number or place is None or order.index(owner) > order.index(place):
            place = owner
        _take(cell, order.index(owner), last[owner] == number, lab, submission)
    if _is_of(lab, cells, owners):
        found = [owner for number, owner in enumerate(owners) if owner and last[owner] == number]
        _note_order(found, order, submission)
        _note_missing(submission, lab, last)
    else:  # what would be repaired is all of it, and says less than this
        written = _defined_elsewhere(submission).intersection(lab.graded_names)
        submission.notes = [*about_file, NO_MARKS if written else NO_CELLS]
    _limit(submission, lab)
    # In the release's order, so that taking in what `rebuild` made gives the same again.
    submission.added.sort(key=lambda added: -1 if added.after is None else order.index(added.after))
    submission.notes = _tidy(submission.notes)
    return submission


def _owners(cells: list[FileCell], lab: Lab, notes: list[str]) -> list[str | None]:
    """For each cell of a file the grade_id of the lab's cell that it is, or None.

    By metadata first. Where a tool has lost that, or moved it, the cell's id says it as well: releases give a cell its
    grade_id for an id, and no editor gives such an id to a new cell.
    """
    known = {cell.grade_id for cell in lab.cells}
    owners = [cell.grade_id if cell.grade_id in known else None for cell in cells]
    found = set(owners)
    for number, cell in enumerate(cells):
        if owners[number] is None and cell.cell_id in known and cell.cell_id not in found:
            owners[number] = cell.cell_id
            notes.append(f"cell {cell.cell_id} has lost its metadata: it was recognised by its id")
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
        owner is not None
        and own[owner].kind == "check"
        and without_helps(cell.source).strip() == _visible(own[owner]).strip()
        for cell, owner in zip(cells, owners, strict=True)
    )


def _take(cell: FileCell, position: int, is_last: bool, lab: Lab, submission: Submission) -> None:
    """One cell of the lab, as it stands in the file. Of several the last one counts, as when a notebook is run."""
    own, notes = lab.cells[position], submission.notes
    if _marks_changed(cell, lab.notebook["cells"][position]):
        notes.append(f"cell {own.grade_id} had its points or its grading marks changed: the original ones were used")
    if own.kind not in ("solution", "answer"):
        if without_helps(cell.source).strip() != _visible(own).strip():
            notes.append(f"cell {own.grade_id} is not yours to change: the original was used")
        elif not is_last:
            notes.append(f"cell {own.grade_id} occurs more than once: one was used")
        return
    if cell.cell_type != ("markdown" if own.kind == "answer" else "code"):
        notes.append(f"cell {own.grade_id} had its type changed to {cell.cell_type!r}: read as before")
    if is_last:
        submission.answers[own.grade_id] = cell.source
        return
    notes.append(f"cell {own.grade_id} occurs more than once: the last one was used")
    if own.kind == "solution" and cell.source.strip() and cell.source.strip() != stub_source(own.source).strip():
        # A cell that was split in two has its metadata in both halves; the first half is run before, where it stood.
        before = lab.cells[position - 1].grade_id if position else None
        submission.added.append(Added(before, "code", cell.source))


def rebuild(release: dict[str, Any], lab: Lab, submission: Submission) -> dict[str, Any]:
    """The released notebook with the submission's answers and added cells in it; a fresh, valid notebook."""
    notebook = json.loads(json.dumps(release))
    elsewhere = _defined_elsewhere(submission)
    cells: list[dict[str, Any]] = [_added_cell(a, i) for i, a in enumerate(submission.added) if a.after is None]
    for raw in notebook["cells"]:
        grade_id = raw["metadata"]["nbgrader"]["grade_id"]
        cell = lab.cell(grade_id)
        if grade_id in submission.answers:
            raw["source"] = submission.answers[grade_id]
        elif cell is not None and cell.kind == "solution" and elsewhere.intersection(cell.names):
            # The learner deleted the cell and wrote the names in one of their own: the stub must not undo that.
            raw["source"] = DELETED
        cells.append(raw)
        cells += [_added_cell(a, i) for i, a in enumerate(submission.added) if a.after == grade_id]
    notebook["cells"] = cells
    return notebook


def learner_cells(lab: Lab, submission: Submission) -> list[tuple[str, str]]:
    """(source, name) of all cells to run in the learner's process, in the notebook's order.

    They are the lab's cells for `both` and `learner`, the solution cells as submitted (the release's stub where one is
    missing), and the added code cells.
    """
    cells: list[tuple[str, str]] = []
    elsewhere = _defined_elsewhere(submission)

    def add_after(place: str | None) -> None:
        for number, added in enumerate(submission.added):
            if added.after == place and added.cell_type == "code":
                cells.append((plain_python(added.source), f"added-{number}"))

    add_after(None)
    for cell in lab.cells:
        if cell.kind == "solution":
            answer = submission.answers.get(cell.grade_id)
            if answer is not None:
                cells.append((plain_python(answer), cell.grade_id))
            elif not elsewhere.intersection(cell.names):
                cells.append((stub_source(cell.source), cell.grade_id))
        elif cell.kind == "code" and cell.where in ("both", "learner"):
            cells.append((cell.source, cell.grade_id))
        add_after(cell.grade_id)
    return cells


def _defined_elsewhere(submission: Submission) -> set[str]:
    code = [added.source for added in submission.added if added.cell_type == "code"]
    return {name for source in code for name in defined_names(plain_python(source))}


def stub_source(source: str) -> str:
    """A solution cell with every region between BEGIN SOLUTION and END SOLUTION replaced by the stub."""
    lines, inside = [], False
    for line in source.split("\n"):
        if "### BEGIN SOLUTION" in line:
            inside = True
            indent = line[: len(line) - len(line.lstrip())]
            lines += [indent + stub for stub in STUB.split("\n")]
        elif "### END SOLUTION" in line:
            inside = False
        elif not inside:
            lines.append(line)
    return "\n".join(lines)


def plain_python(source: str) -> str:
    """A notebook cell as Python: magics, shell lines and questions become `pass`, a cell magic makes it a comment.

    Not the cell magics under which the cell runs as it is, such as `%%time`: what it defines counts.
    """
    source = re.sub(r"^\s*%%(time|capture|prun)\b.*", "", source)
    if re.match(r"\s*%%", source):
        return "\n".join("# " + line for line in source.split("\n"))
    if not _has_magic(source):
        return source
    return re.sub(r"^([ \t]*)([%!?].*|[\w.]+\?{1,2}[ \t]*)$", r"\1pass  # \2", source, flags=re.MULTILINE)


def _has_magic(source: str) -> bool:
    try:
        compile(source, "<cell>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return True
    return False


def _marks_changed(cell: FileCell, release: dict[str, Any]) -> bool:
    given, own = cell.nbgrader, release["metadata"]["nbgrader"]
    return any(key in given and given[key] != own.get(key) for key in ("grade", "solution", "points", "task"))


def _visible(cell: Cell) -> str:
    # In the solution notebook a check still has its hidden part, which the release has not.
    return plain_text(without_helps(split_hidden(cell.source)[0]) if cell.kind == "check" else cell.source)


def _limit(submission: Submission, lab: Lab) -> None:
    """Limits on what was taken, not on the file: what `rebuild` makes of a submission within them is within them."""
    if len(submission.added) > MAX_ADDED:
        raise Refused(f"the notebook has {len(submission.added)} cells of your own; at most {MAX_ADDED} are read")
    code = sum(len(added.source) for added in submission.added if added.cell_type not in ("markdown", "raw"))
    code += sum(len(submission.answers.get(cell.grade_id, cell.source)) for cell in lab.of_kind("solution"))
    if code > MAX_CODE:
        raise Refused(f"the notebook has {code} characters of your own code; at most {MAX_CODE} are read")


def _note_order(found: list[str], order: list[str], submission: Submission) -> None:
    if found != sorted(found, key=order.index):
        submission.notes.append("the lab's cells were moved: the original order was used")


def _note_missing(submission: Submission, lab: Lab, seen: dict[str, int]) -> None:
    missing = [cell for cell in lab.cells if cell.grade_id not in seen]
    submission.notes += [f"cell {c.grade_id} is missing: it was put back" for c in missing if c.kind != "text"]


def _tidy(notes: list[str]) -> list[str]:
    """Each note once, and not more than a person would read."""
    once = list(dict.fromkeys(notes))
    more = len(once) - MAX_NOTES
    return once if more <= 0 else [*once[:MAX_NOTES], f"and {more} notes more"]


def _added_cell(added: Added, number: int) -> dict[str, Any]:
    kind = added.cell_type if added.cell_type in ("code", "markdown", "raw") else "raw"
    cell = {"cell_type": kind, "id": f"added-{number}", "metadata": {}, "source": added.source}
    return cell | ({"execution_count": None, "outputs": []} if kind == "code" else {})
