"""A lab's one hand-written file, `solutions/NN_slug/SLUG.py` (percent format), as cells and as the lab that they make.

What is built from it for learners and instructors, with links and the cell that fetches the course, is
`grader.labs.lab_source`. The format is described in `grader/README.md`.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

from grader.labs.lab import (
    BEGIN_HIDDEN,
    END_HIDDEN,
    HELPS,
    Cell,
    Lab,
    LabError,
    comment_text,
    lab_from_notebook,
    split_hidden,
    without_helps,
)

_ID = re.compile(r"^[A-Za-z0-9_-]{1,64}$")


def percent_lab(path: Path, changed: list[dict[str, Any]] | None = None) -> Lab:
    """The lab of a percent file, or of its cells `changed`, with hidden tests. Raises LabError."""
    cells = [notebook_cell(raw, path) for raw in (percent_cells(path) if changed is None else changed)]
    lab = lab_from_notebook({"cells": cells}, path.parent.name, path.stem)
    validate_lab(lab)
    return lab


def percent_cells(path: Path) -> list[dict[str, Any]]:
    """The cells of a percent file as plain dicts. Raises LabError for a cell without grade_id."""
    return percent_cells_of(path.read_text("utf-8"), path.name)


def percent_cells_of(text: str, name: str) -> list[dict[str, Any]]:
    """The cells of a text in percent format; `name` is for messages. Raises LabError for a cell without grade_id."""
    import jupytext

    cells = [dict(cell) for cell in jupytext.reads(text, fmt="py:percent").cells]
    for cell in cells:
        if not (cell["metadata"].get("nbgrader") or {}).get("grade_id"):
            raise LabError(f"{name}: a cell has no grade_id: {cell['source'][:60]!r}")
    return cells


def notebook_cell(raw: dict[str, Any], path: Path) -> dict[str, Any]:
    """A cell of the percent file `path` as one of a notebook, with nbgrader's metadata. Raises LabError."""
    given = dict(raw["metadata"]["nbgrader"])
    grade_id, grade, solution = given.pop("grade_id"), given.pop("grade", False), given.pop("solution", False)
    meta = {
        "grade": grade,
        "grade_id": grade_id,
        "locked": not solution,
        "schema_version": 3,
        "solution": solution,
        "task": False,
    }
    if grade:
        if "points" not in given:
            raise LabError(f"{path.name}, cell {grade_id}: a graded cell needs points")
        meta["points"] = given.pop("points")
    if given:
        raise LabError(f"{path.name}, cell {grade_id}: unknown nbgrader keys {', '.join(given)}")
    metadata: dict[str, Any] = {"nbgrader": meta}
    if "inferlab" in raw["metadata"]:
        if set(raw["metadata"]["inferlab"]) - {"where"}:
            raise LabError(f"{path.name}, cell {grade_id}: inferlab knows only the key where")
        metadata["inferlab"] = dict(raw["metadata"]["inferlab"])
    source = raw["source"]
    if grade and not solution:
        helps = {key: text for key in HELPS if (text := comment_text(source, key))}
        if helps:
            metadata["inferlab"] = metadata.get("inferlab", {}) | helps
        source = without_helps(source)
    cell: dict[str, Any] = {"cell_type": raw["cell_type"], "id": grade_id, "metadata": metadata, "source": source}
    return cell | ({"execution_count": None, "outputs": []} if raw["cell_type"] == "code" else {})


def validate_lab(lab: Lab) -> None:
    """Report an author's mistakes in a lab before they cost a learner points."""
    ids = [cell.grade_id for cell in lab.cells]
    for cell in lab.cells:
        where = f"{lab.slug}, cell {cell.grade_id}"
        if not _ID.match(cell.grade_id) or ids.count(cell.grade_id) > 1:
            raise LabError(f"{where}: a grade_id is unique, of letters, digits, - and _")
        if cell.kind in ("solution", "check", "code"):
            try:
                tree = ast.parse(cell.source)
            except SyntaxError as error:
                raise LabError(f"{where}: {error}") from None
            if cell.kind == "check":
                _validate_check(cell, tree, where)
        if cell.kind == "solution":
            if "BEGIN SOLUTION" not in cell.source:
                raise LabError(f"{where}: no ### BEGIN SOLUTION; the whole cell would be blanked")
            if not cell.names:
                raise LabError(f"{where}: defines no function or class at its top level")
    names = lab.graded_names
    if len(set(names)) != len(names):
        raise LabError(f"{lab.slug}: a graded name is defined in two solution cells")


def _validate_check(cell: Cell, tree: ast.Module, where: str) -> None:
    if not cell.property_text or not cell.hint:
        raise LabError(f"{where}: a check starts with the comments '# property: ...' and '# hint: ...'")
    if cell.source.count(BEGIN_HIDDEN) != cell.source.count(END_HIDDEN):
        raise LabError(f"{where}: hidden tests begin or end without the other")
    asserts = [node for node in ast.walk(tree) if isinstance(node, ast.Assert)]
    if any(node.msg is None for node in asserts):
        raise LabError(f"{where}: every assert needs a message that says what was seen")
    if re.search(r"\breference\.", split_hidden(cell.source)[0]):
        raise LabError(f"{where}: the reference exists only in hidden tests; a learner's notebook has none")
