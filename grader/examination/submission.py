"""What was taken from a submitted file, and the notebook and the cells that are made of it."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from grader.examination.cell_source import bound_names, plain_python, stub_source
from grader.labs.lab import Lab

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


def defined_elsewhere(submission: Submission, but: Collection[str] = ()) -> set[str]:
    """The names that the submission binds at top level, in its added cells and its answers except those to `but`."""
    code = [added.source for added in submission.added if added.cell_type == "code"]
    code += [source for grade_id, source in submission.answers.items() if grade_id not in but]
    return {name for source in code for name in bound_names(plain_python(source))}


def rebuild(release: dict[str, Any], lab: Lab, submission: Submission) -> dict[str, Any]:
    """The released notebook with the submission's answers and added cells in it; a fresh, valid notebook."""
    notebook = json.loads(json.dumps(release))
    elsewhere = defined_elsewhere(submission)
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
    elsewhere = defined_elsewhere(submission)

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


def _added_cell(added: Added, number: int) -> dict[str, Any]:
    kind = added.cell_type if added.cell_type in ("code", "markdown", "raw") else "raw"
    cell = {"cell_type": kind, "id": f"added-{number}", "metadata": {}, "source": added.source}
    return cell | ({"execution_count": None, "outputs": []} if kind == "code" else {})
