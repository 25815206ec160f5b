"""Intake: what is taken from a submitted file, and what is not.

Taken: the solution cells, the cells a person grades, and the cells the learner added, in their place. Everything else
comes from the release. What was repaired is noted; what cannot be read is refused with a reason. `lab check`,
`grader.check()` and the grading of a course use the same intake, so they see the same submission.

Editors merge, split, copy and paste cells, and keep the metadata of one of them; the cell that a learner wrote may then
have another cell's name, or none. What defines a graded name counts wherever it stands, and no stub replaces it.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

from grader.examination.notebook_file import FileCell, Refused, plain_text, read_cells
from grader.labs.lab import STUB, Cell, Lab, split_hidden, without_helps
from grader.results.result import NO_CELLS, NO_MARKS

__all__ = ["DELETED", "Added", "Refused", "Submission", "learner_cells", "plain_python", "read_submission", "rebuild"]

MAX_NOTES = 40
MAX_ADDED = 2000  # cells
MAX_CODE = 1 << 18  # characters of all code: Python's parser takes up to a kilobyte of memory for one
MAX_NOTE, MAX_TRIES = 1 << 16, 20  # characters of a text cell that may hold code; places where it may begin
DEFINITIONS, IMPORTS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef), (ast.Import, ast.ImportFrom)
_CODE = re.compile(r"^(?=@|(?:def|class|import|from) )", re.MULTILINE)
DELETED = "# This cell was deleted; its names are defined in another cell."


@dataclass
class Added:
    """A cell the learner added, after the release's cell `after` (None: at the top)."""

    after: str | None
    cell_type: str
    source: str
    half_of: str = field(default="", compare=False)  # the cell to write in that it was, before it was split


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
    cells = _unmerged(cells, owners, lab)
    _limit_code(
        sum(len(c.source) for c in cells if c.cell_type not in ("markdown", "raw")) - _given(cells, owners, lab)
    )
    last = _last(cells, owners, lab)
    about_file = list(submission.notes)
    for number, (cell, owner) in enumerate(zip(cells, owners, strict=True)):
        if owner is None:
            if cell.source.strip():
                submission.added.append(Added(place, cell.cell_type, cell.source))
            continue
        if last[owner] == number or place is None or order.index(owner) > order.index(place):
            place = owner
        _take(cell, order.index(owner), last[owner] == number, lab, submission)
    _join_halves(submission, lab)
    _take_from_text(submission, lab)
    _drop_stubs(submission, lab)
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
    grade_id for an id, and no editor gives such an id to a new cell. Where both are lost, a cell that nobody changed is
    known by its text.
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
            by_text.setdefault(_visible(own).strip(), []).append(own.grade_id)
    recognised = 0
    for number, cell in enumerate(cells):
        if owners[number] is None and (alike := by_text.get(without_helps(cell.source).strip())):
            owners[number] = alike.pop(0)
            recognised += 1
    if recognised:
        notes.append(f"cells that have lost their ids: {recognised} were recognised by their text")
    return owners


def _unmerged(cells: list[FileCell], owners: list[str | None], lab: Lab) -> list[FileCell]:
    """The cells without the text of the lab's own cells that an editor has merged into them.

    A merged cell has the metadata of one of them: a check with the learner's cell in it is the learner's cell then, and
    a function with a text below it is Python again.
    """
    gone = [own for own in lab.cells if own.grade_id not in owners and own.kind not in ("solution", "answer")]
    texts = [text for own in gone if (text := _visible(own).strip())]
    return [replace(cell, source=_without(cell.source, texts)) for cell in cells] if texts else cells


def _without(source: str, texts: list[str]) -> str:
    """`source` without these texts, each of which is whole lines and taken out once."""
    padded = f"\n{source}\n"
    for text in texts:
        padded = padded.replace(f"\n{text}\n", "\n", 1)
    return source if padded == f"\n{source}\n" else padded.strip("\n")


def _last(cells: list[FileCell], owners: list[str | None], lab: Lab) -> dict[str, int]:
    """Which of several cells counts: the last one, as when a notebook is run, but no untouched stub beside a written
    one, as a copy of the stub or the empty end of a cell that was split.
    """
    to_write = {cell.grade_id: cell for cell in lab.of_kind("solution")}
    last: dict[str, int] = {}
    for number, (cell, owner) in enumerate(zip(cells, owners, strict=True)):
        untouched = owner in to_write and (not cell.source.strip() or _is_stub(cell.source, to_write[owner]))
        if owner is not None and not (owner in last and untouched):
            last[owner] = number
    return last


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
            if beside := _beside(cell.source, own):
                submission.added.append(Added(own.grade_id, "code", beside))
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
    if own.kind != "solution" or not cell.source.strip() or _is_stub(cell.source, own):
        which = "the last one" if own.kind != "solution" else "the one that is written"
        notes.append(f"cell {own.grade_id} occurs more than once: {which} was used")
    else:
        # A cell that was split in two has its metadata in both halves; the first half is run before, where it stood.
        notes.append(f"cell {own.grade_id} occurs more than once: all were used, in their order; of what is defined "
                     "twice the last counts")  # fmt: skip
        before = lab.cells[position - 1].grade_id if position else None
        submission.added.append(Added(before, "code", cell.source, half_of=own.grade_id))


def _beside(source: str, own: Cell) -> str:
    """What a changed cell of the lab holds of the learner's: a cell merged with it, or functions and imports added.

    Not what became of its own lines, which are not the learner's to change.
    """
    # An instructor's notebook has the hidden parts of its checks.
    source, original = without_helps(split_hidden(source)[0]), _visible(own).strip()
    added = _without(source, [original])
    if added != source:
        return added if bound_names(plain_python(added)) else ""
    source, original = plain_python(source), plain_python(original) if own.kind != "text" else ""
    known = bound_names(original)
    lines = source.split("\n")
    return "\n\n".join(
        "\n".join(lines[_first_line(node) - 1 : node.end_lineno])
        for node in _statements(source)
        if isinstance(node, (*DEFINITIONS, *IMPORTS)) and not _bound(node) <= known
    )


def _first_line(node: ast.stmt) -> int:
    """Of a statement, with its decorators."""
    return min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])


def _join_halves(submission: Submission, lab: Lab) -> None:
    """Put a cell together again that was split where only the whole is Python: inside of a class or a function."""
    for cell in lab.of_kind("solution"):
        halves = [added for added in submission.added if added.half_of == cell.grade_id]
        parts = [half.source for half in halves] + [submission.answers.get(cell.grade_id, "")]
        whole = "\n".join(parts)
        if halves and not _has_magic(whole) and any(_has_magic(part) for part in parts):
            submission.added = [added for added in submission.added if added not in halves]
            submission.answers[cell.grade_id] = whole


def _take_from_text(submission: Submission, lab: Lab) -> None:
    """A learner's note that an editor has merged with a cell to write in is text: its code is taken from it."""
    found = [(added, start.start()) for added in submission.added
             if added.cell_type == "markdown" and len(added.source) <= MAX_NOTE
             for start in _CODE.finditer(added.source)][:MAX_TRIES]  # fmt: skip
    missing = set(lab.graded_names) - _defined_elsewhere(submission) if found else set()
    for added, start in found:
        names = bound_names(added.source[start:]) & missing if added.cell_type == "markdown" else set()
        if names:
            added.cell_type, added.source = "code", added.source[start:]
            submission.notes.append(f"a text cell of yours holds the code of {', '.join(sorted(names))}: "
                                    "it was run as code")  # fmt: skip


def _drop_stubs(submission: Submission, lab: Lab) -> None:
    """A stub that nobody touched is no answer where another cell defines its names."""
    stubs = [cell for cell in lab.of_kind("solution") if _is_stub(submission.answers.get(cell.grade_id), cell)]
    elsewhere = _defined_elsewhere(submission, {cell.grade_id for cell in stubs}) if stubs else set()
    for cell in stubs:
        if elsewhere.intersection(cell.names):
            del submission.answers[cell.grade_id]


def _is_stub(source: str | None, cell: Cell) -> bool:
    return source is not None and source.strip() == stub_source(cell.source).strip()


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


def _defined_elsewhere(submission: Submission, but: Collection[str] = ()) -> set[str]:
    """The names that the submission binds at top level, in its added cells and its answers except those to `but`."""
    code = [added.source for added in submission.added if added.cell_type == "code"]
    code += [source for grade_id, source in submission.answers.items() if grade_id not in but]
    return {name for source in code for name in bound_names(plain_python(source))}


def bound_names(source: str) -> set[str]:
    """Names that Python code binds at top level: functions, classes, imports, `attend = torch.compile(mine)`."""
    return {name for node in _statements(source) for name in _bound(node)}


def _bound(node: ast.stmt) -> set[str]:
    if isinstance(node, DEFINITIONS):
        return {node.name}
    if isinstance(node, IMPORTS):
        return {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    if isinstance(node, (ast.Assign, ast.AnnAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
    return set()


def _statements(source: str) -> list[ast.stmt]:
    """At top level; none where it is not Python."""
    try:
        return ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []


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
    _limit_code(code)


def _given(cells: list[FileCell], owners: list[str | None], lab: Lab) -> int:
    """Characters of the lab's own cells that a file holds unchanged."""
    own = {cell.grade_id: cell for cell in lab.cells if cell.kind in ("check", "code")}
    return sum(len(cell.source) for cell, owner in zip(cells, owners, strict=True)
               if owner in own and without_helps(cell.source).strip() == _visible(own[owner]).strip())  # fmt: skip


def _limit_code(code: int) -> None:
    if code > MAX_CODE:
        raise Refused(f"the notebook has {code} characters of your own code; at most {MAX_CODE} are read")


def _note_order(found: list[str], order: list[str], submission: Submission) -> None:
    if found != sorted(found, key=order.index):
        submission.notes.append("the lab's cells were moved: the original order was used")


def _note_missing(submission: Submission, lab: Lab, seen: dict[str, int]) -> None:
    elsewhere = _defined_elsewhere(submission)
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


def _added_cell(added: Added, number: int) -> dict[str, Any]:
    kind = added.cell_type if added.cell_type in ("code", "markdown", "raw") else "raw"
    cell = {"cell_type": kind, "id": f"added-{number}", "metadata": {}, "source": added.source}
    return cell | ({"execution_count": None, "outputs": []} if kind == "code" else {})
