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

from grader.lab import Cell, Lab, defined_names

MAX_BYTES = 20 << 20
MAX_CELLS = 2000
MAX_SOURCE = 1 << 20  # characters of one cell


class Refused(ValueError):
    """A submission that cannot be read at all; the text is the reason, for the learner to read."""


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
    known = {cell.grade_id: cell for cell in lab.cells}
    seen: dict[str, int] = {}
    for cell_type, grade_id, source in _cells(raw):
        if grade_id is None or grade_id not in known:
            if source.strip():
                submission.added.append(Added(place, cell_type, source))
            continue
        place, cell = grade_id, known[grade_id]
        seen[grade_id] = seen.get(grade_id, 0) + 1
        if cell.kind not in ("solution", "answer"):
            if source.strip() != _visible(cell, lab).strip():
                submission.notes.append(f"cell {grade_id} is not yours to change: the original was used")
            continue
        if cell_type != ("markdown" if cell.kind == "answer" else "code"):
            submission.notes.append(f"cell {grade_id} had its type changed to {cell_type[:20]!r}: read as before")
        if seen[grade_id] == 2:
            submission.notes.append(f"cell {grade_id} occurs more than once: the last one was used")
        submission.answers[grade_id] = source
    _note_missing(submission, lab, seen)
    return submission


def rebuild(release: dict[str, Any], lab: Lab, submission: Submission) -> dict[str, Any]:
    """The released notebook with the submission's answers and added cells in it; a fresh, valid notebook."""
    notebook = json.loads(json.dumps(release))
    elsewhere = {name for added in submission.added for name in defined_names(plain_python(added.source))}
    cells: list[dict[str, Any]] = [_added_cell(a, i) for i, a in enumerate(submission.added) if a.after is None]
    for raw in notebook["cells"]:
        grade_id = raw["metadata"]["nbgrader"]["grade_id"]
        cell = lab.cell(grade_id)
        if grade_id in submission.answers:
            raw["source"] = submission.answers[grade_id]
        elif cell is not None and cell.kind == "solution" and elsewhere.intersection(cell.names):
            # The learner deleted the cell and wrote the names in one of their own: the stub must not undo that.
            raw["source"] = "# This cell was deleted; its names are defined in an added cell."
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
    elsewhere = {name for added in submission.added for name in defined_names(plain_python(added.source))}

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


def stub_source(source: str) -> str:
    """A solution cell with every region between BEGIN SOLUTION and END SOLUTION replaced by the stub."""
    from grader.course import STUB

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
    """A notebook cell as Python: line magics and shell lines become `pass`, a cell magic makes the cell a comment."""
    if re.match(r"\s*%%", source):
        return "\n".join("# " + line for line in source.split("\n"))
    return re.sub(r"^([ \t]*)([%!].*)$", r"\1pass  # \2", source, flags=re.MULTILINE) if _has_magic(source) else source


def _has_magic(source: str) -> bool:
    try:
        compile(source, "<cell>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return True
    return False


def _cells(raw: bytes) -> list[tuple[str, str | None, str]]:
    """(cell type, grade_id or None, source) of a file's cells. Raises Refused."""
    if len(raw) > MAX_BYTES:
        raise Refused(f"the file has {len(raw) >> 20} MiB; at most {MAX_BYTES >> 20} MiB are read")
    if not raw.strip():
        raise Refused("the file is empty")
    try:
        notebook = json.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise Refused("the file is not text in UTF-8") from None
    except RecursionError:
        raise Refused("the file is nested too deep to be a notebook") from None
    except ValueError:
        raise Refused("the file is not a notebook: it is not JSON") from None
    cells = notebook.get("cells") if isinstance(notebook, dict) else None
    if not isinstance(cells, list):
        raise Refused("the file is not a notebook in nbformat 4: it has no list of cells")
    if len(cells) > MAX_CELLS:
        raise Refused(f"the notebook has {len(cells)} cells; at most {MAX_CELLS} are read")
    return [_cell(cell, number) for number, cell in enumerate(cells)]


def _cell(cell: Any, number: int) -> tuple[str, str | None, str]:
    source = cell.get("source", "") if isinstance(cell, dict) else None
    if isinstance(source, list) and all(isinstance(line, str) for line in source):
        source = "".join(source)
    if not isinstance(source, str):
        raise Refused(f"cell {number + 1} of the notebook has no readable source")
    if len(source) > MAX_SOURCE:
        raise Refused(f"cell {number + 1} has {len(source)} characters; at most {MAX_SOURCE} are read")
    # A lone surrogate or a null byte is valid JSON, but no file and no Python source can hold it.
    source = source.encode("utf-8", "replace").decode("utf-8").replace("\0", "�")
    metadata = cell.get("metadata")
    nbgrader = metadata.get("nbgrader") if isinstance(metadata, dict) else None
    grade_id = nbgrader.get("grade_id") if isinstance(nbgrader, dict) else None
    return str(cell.get("cell_type")), grade_id if isinstance(grade_id, str) else None, source


def _visible(cell: Cell, lab: Lab) -> str:
    # In the solution notebook a check still has its hidden part, which the release has not.
    from grader.lab import split_hidden

    return split_hidden(cell.source)[0] if cell.kind == "check" else cell.source


def _note_missing(submission: Submission, lab: Lab, seen: dict[str, int]) -> None:
    missing = [c.grade_id for c in lab.cells if c.grade_id not in seen]
    if len(missing) == len(lab.cells):
        submission.notes.append("no cell of this lab was found: is it the right notebook?")
        return
    for grade_id in missing:
        cell = lab.cell(grade_id)
        if cell is not None and cell.kind != "text":
            submission.notes.append(f"cell {grade_id} is missing: it was put back")


def _added_cell(added: Added, number: int) -> dict[str, Any]:
    kind = added.cell_type if added.cell_type in ("code", "markdown", "raw") else "raw"
    cell = {"cell_type": kind, "id": f"added-{number}", "metadata": {}, "source": added.source}
    return cell | ({"execution_count": None, "outputs": []} if kind == "code" else {})
