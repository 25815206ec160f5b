"""A lab as data: its cells in order, which of them are written by the learner, which are checks, and who runs what.

A lab is always read from a notebook: the solution notebook (with hidden tests; an instructor has it) or the released
one (a learner has it). `grader.labs.lab_source` makes both.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Kind = Literal["text", "solution", "check", "answer", "code"]
Where = Literal["both", "examiner", "learner", "notebook", "milestone"]
WHERES = ("both", "examiner", "learner", "notebook", "milestone")
HELPS = ("question", "hint", "explanation")  # of a check, from general to concrete

# Stands in a released lab in place of each solution.
STUB = '# Your code here.\nraise NotImplementedError("not written yet")'
BEGIN_HIDDEN, END_HIDDEN = "### BEGIN HIDDEN TESTS", "### END HIDDEN TESTS"


class LabError(ValueError):
    """A lab is malformed: names the cell and what was expected."""


@dataclass(frozen=True)
class Cell:
    """One cell of a lab. `kind` says what it is for, `where` which process runs it when graded.

    text: prose. solution: the learner's code, runs in the learner's process only. check: one check, runs in the
    examiner only. answer: text of the learner that a person grades. code: anything else; `where` applies to it.
    helps: what a check has for a learner who fails it, by `HELPS`; it is not in the cell's text, where it would be read
    before it is asked for.
    """

    grade_id: str
    kind: Kind
    source: str
    where: Where = "examiner"
    points: float = 0.0
    helps: Mapping[str, str] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """Names that the cell defines at top level: functions and classes."""
        return defined_names(self.source)

    @property
    def property_text(self) -> str:
        """What a check says it checks."""
        return comment_text(self.source, "property")

    @property
    def question(self) -> str:
        """The first hint: a question."""
        return self._help("question")

    @property
    def hint(self) -> str:
        """The second hint, which is concrete."""
        return self._help("hint")

    @property
    def explanation(self) -> str:
        """The property worked out on an example, shown after several tries; no solution."""
        return self._help("explanation")

    def _help(self, key: str) -> str:
        # In the text: releases of before, and in a percent file, where an author writes it.
        return self.helps.get(key) or comment_text(self.source, key)


@dataclass(frozen=True)
class Lab:
    """One lab: `slug` is its folder (`02_kv_cache`), `name` its notebook without the ending (`kv_cache`)."""

    slug: str
    name: str
    cells: tuple[Cell, ...]
    notebook: dict[str, Any]  # the notebook it was read from

    def of_kind(self, kind: Kind) -> list[Cell]:
        return [cell for cell in self.cells if cell.kind == kind]

    def cell(self, grade_id: str) -> Cell | None:
        return next((cell for cell in self.cells if cell.grade_id == grade_id), None)

    @property
    def graded_names(self) -> list[str]:
        """The names the learner writes: functions and classes at the top level of solution cells, in order."""
        return [name for cell in self.of_kind("solution") for name in cell.names]

    @property
    def points(self) -> float:
        return sum(cell.points for cell in self.of_kind("check"))


def load_lab(path: Path) -> Lab:
    """Read a lab from its solution or released notebook. Raises LabError, OSError."""
    return lab_from_notebook(json.loads(path.read_text("utf-8")), path.parent.name, path.stem)


def lab_from_notebook(notebook: dict[str, Any], slug: str, name: str) -> Lab:
    """Read a lab from a notebook in nbformat 4. Raises LabError."""
    cells = []
    for number, raw in enumerate(notebook["cells"]):
        meta = raw["metadata"].get("nbgrader") or {}
        grade_id = meta.get("grade_id")
        if not grade_id:
            raise LabError(f"{slug}: cell {number} has no grade_id")
        ours = raw["metadata"].get("inferlab") or {}
        where = ours.get("where", "examiner")
        if where not in WHERES:
            raise LabError(f"{slug}, cell {grade_id}: where is {where!r}, expected one of {', '.join(WHERES)}")
        source = "".join(raw["source"])
        points = float(meta.get("points") or 0) if meta.get("grade") else 0.0
        helps = {key: str(ours[key]) for key in HELPS if key in ours}
        cells.append(Cell(grade_id, _kind(raw["cell_type"], meta), source, where, points, helps))
    return Lab(slug, name, tuple(cells), notebook)


def find_lab(folder: Path, wanted: str) -> Path:
    """The one notebook of lab `wanted` ("02", "2" or "02_kv_cache") under `folder`. Raises LabError."""
    labs = sorted(p for p in folder.glob("[0-9]*_*") if p.is_dir() and list(p.glob("*.ipynb")))
    found = [p for p in labs if p.name == wanted or (wanted.isdigit() and int(p.name.split("_")[0]) == int(wanted))]
    if len(found) != 1:
        known = ", ".join(p.name for p in labs) or "none"
        raise LabError(f"no lab {wanted!r} in {folder}; labs there: {known}")
    notebooks = [p for p in sorted(found[0].glob("*.ipynb")) if not re.search(r"\.new\d*$", p.stem)]
    if len(notebooks) != 1:
        raise LabError(f"expected one notebook in {found[0]}, found {', '.join(p.name for p in notebooks)}")
    return notebooks[0]


def defined_names(source: str) -> list[str]:
    """Functions and classes defined at the top level of `source`; none where it is not Python."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    return [n.name for n in tree.body if isinstance(n, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef))]


def split_hidden(source: str) -> tuple[str, str]:
    """The visible and the hidden part of a check."""
    visible: list[str] = []
    hidden: list[str] = []
    inside = False
    for line in source.split("\n"):
        if BEGIN_HIDDEN in line or END_HIDDEN in line:
            inside = BEGIN_HIDDEN in line
        else:
            (hidden if inside else visible).append(line)
    return "\n".join(visible), "\n".join(hidden)


def _kind(cell_type: str, meta: dict[str, Any]) -> Kind:
    if meta.get("grade"):
        return "answer" if meta.get("solution") else "check"
    if meta.get("solution"):
        return "solution"
    return "code" if cell_type == "code" else "text"


def comment_text(source: str, key: str) -> str:
    """The text of `# key: ...` among the comment lines a cell starts with; continued in lines indented further."""
    lines = source.split("\n")
    return " ".join(lines[number][1:].removeprefix(" ").removeprefix(f"{key}:").strip()
                    for number in _comment_lines(lines, key))  # fmt: skip


def without_helps(source: str) -> str:
    """A check's text without the comments that hold its helps: what a learner sees of it."""
    lines = source.split("\n")
    gone = {number for key in HELPS for number in _comment_lines(lines, key)}
    return "\n".join(line for number, line in enumerate(lines) if number not in gone)


def _comment_lines(lines: list[str], key: str) -> list[int]:
    """The numbers of the lines of `# key: ...`."""
    found: list[int] = []
    for number, line in enumerate(lines):
        body = line[1:].removeprefix(" ")
        if not line.startswith("#") or (found and not body.startswith("  ")):
            break
        if found or re.match(rf"{key}:", body):
            found.append(number)
    return found
