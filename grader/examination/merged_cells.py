"""Cells that an editor merged, split or copied.

Editors keep the metadata of one of them; the cell that a learner wrote may then have another cell's name, or none. What
defines a graded name counts wherever it stands, and no stub replaces it.
"""

from __future__ import annotations

import re
from dataclasses import replace

from grader.examination.cell_source import (
    DEFINITIONS,
    IMPORTS,
    bound_by,
    bound_names,
    first_line,
    has_magic,
    is_stub,
    plain_python,
    statements,
    visible,
)
from grader.examination.notebook_file import FileCell
from grader.examination.submission import Submission, defined_elsewhere
from grader.labs.lab import Cell, Lab, split_hidden, without_helps

MAX_NOTE, MAX_TRIES = 1 << 16, 20  # characters of a text cell that may hold code; places where it may begin
_CODE = re.compile(r"^(?=@|(?:def|class|import|from) )", re.MULTILINE)


def unmerged(cells: list[FileCell], owners: list[str | None], lab: Lab) -> list[FileCell]:
    """The cells without the text of the lab's own cells that an editor has merged into them.

    A merged cell has the metadata of one of them: a check with the learner's cell in it is the learner's cell then, and
    a function with a text below it is Python again.
    """
    gone = [own for own in lab.cells if own.grade_id not in owners and own.kind not in ("solution", "answer")]
    texts = [text for own in gone if (text := visible(own).strip())]
    return [replace(cell, source=_without(cell.source, texts)) for cell in cells] if texts else cells


def _without(source: str, texts: list[str]) -> str:
    """The source without these texts, each of which is whole lines and taken out once."""
    padded = f"\n{source}\n"
    for text in texts:
        padded = padded.replace(f"\n{text}\n", "\n", 1)
    return source if padded == f"\n{source}\n" else padded.strip("\n")


def last_of(cells: list[FileCell], owners: list[str | None], lab: Lab) -> dict[str, int]:
    """Which of several cells counts: the last one, as when a notebook is run. An untouched stub beside a written cell
    does not count: it is a copy of the stub, or the empty end of a cell that was split.
    """
    to_write = {cell.grade_id: cell for cell in lab.of_kind("solution")}
    last: dict[str, int] = {}
    for number, (cell, owner) in enumerate(zip(cells, owners, strict=True)):
        untouched = owner in to_write and (not cell.source.strip() or is_stub(cell.source, to_write[owner]))
        if owner is not None and not (owner in last and untouched):
            last[owner] = number
    return last


def beside(source: str, own: Cell) -> str:
    """The learner's part of a changed cell of the lab: a cell merged with it, or functions and imports added.

    What became of the cell's own lines is left out, as they are not the learner's to change.
    """
    # An instructor's notebook has the hidden parts of its checks.
    source, original = without_helps(split_hidden(source)[0]), visible(own).strip()
    added = _without(source, [original])
    if added != source:
        return added if bound_names(plain_python(added)) else ""
    source, original = plain_python(source), plain_python(original) if own.kind != "text" else ""
    known = bound_names(original)
    lines = source.split("\n")
    return "\n\n".join(
        "\n".join(lines[first_line(node) - 1 : node.end_lineno])
        for node in statements(source)
        if isinstance(node, (*DEFINITIONS, *IMPORTS)) and not bound_by(node) <= known
    )


def join_halves(submission: Submission, lab: Lab) -> None:
    """Joins the parts of a cell that was split where only the whole is Python: inside of a class or a function."""
    for cell in lab.of_kind("solution"):
        halves = [added for added in submission.added if added.half_of == cell.grade_id]
        parts = [half.source for half in halves] + [submission.answers.get(cell.grade_id, "")]
        whole = "\n".join(parts)
        if halves and not has_magic(whole) and any(has_magic(part) for part in parts):
            submission.added = [added for added in submission.added if added not in halves]
            submission.answers[cell.grade_id] = whole


def take_from_text(submission: Submission, lab: Lab) -> None:
    """Takes the code from a learner's note that an editor has merged with a cell to write in: the note is text."""
    found = [(added, start.start()) for added in submission.added
             if added.cell_type == "markdown" and len(added.source) <= MAX_NOTE
             for start in _CODE.finditer(added.source)][:MAX_TRIES]  # fmt: skip
    missing = set(lab.graded_names) - defined_elsewhere(submission) if found else set()
    for added, start in found:
        names = bound_names(added.source[start:]) & missing if added.cell_type == "markdown" else set()
        if names:
            added.cell_type, added.source = "code", added.source[start:]
            submission.notes.append(f"a text cell of yours holds the code of {', '.join(sorted(names))}: "
                                    "it was run as code")  # fmt: skip


def drop_stubs(submission: Submission, lab: Lab) -> None:
    """Drops unchanged stubs where another cell defines their names: they are no answers."""
    stubs = [cell for cell in lab.of_kind("solution") if is_stub(submission.answers.get(cell.grade_id), cell)]
    elsewhere = defined_elsewhere(submission, {cell.grade_id for cell in stubs}) if stubs else set()
    for cell in stubs:
        if elsewhere.intersection(cell.names):
            del submission.answers[cell.grade_id]
