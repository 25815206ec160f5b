"""What a student wrote, made harmless for nbgrader's formgrader, whose pages show it to a logged-in instructor.

The formgrader puts Markdown, HTML outputs and widgets of a notebook into its page as they are, and what runs there may
do all that the instructor may. So of an autograded notebook only the release's own text stays text; a student's code
stays code, which is shown and not run; all else of theirs is shown as it was typed, and everything beside the sources
comes from the release. The notebook as it was handed in is in `received/`.
"""

from __future__ import annotations

import copy
import json
from typing import Any

from grader.results.shown_text import fenced


def disarm(nb: Any, release: dict[str, Any]) -> None:
    """Change `nb`, a submission on its way through nbgrader, in place. release: the lab as students got it."""
    import nbformat

    own = nbformat.reads(json.dumps(release), as_version=4)  # with sources as one text
    by_id = {_grade_id(cell): cell for cell in own.cells if _grade_id(cell)}
    texts = {cell.source: cell for cell in own.cells if cell.cell_type == "markdown"}
    nb.metadata = copy.deepcopy(own.metadata)
    for number, cell in enumerate(nb.cells):
        ours = by_id.get(_grade_id(cell))
        cell.metadata = copy.deepcopy(ours.metadata) if ours else nbformat.from_dict({})
        cell.id = ours.id if ours else f"added-{number}"
        cell.pop("attachments", None)
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
        elif cell.cell_type == "markdown" and cell.source in texts:
            if "attachments" in texts[cell.source]:
                cell.attachments = copy.deepcopy(texts[cell.source].attachments)
        else:
            cell.cell_type, cell.source = "markdown", fenced(cell.source)


def harmless_name(name: str) -> str:
    """A name for the gradebook. In many an LMS students choose theirs, and the formgrader takes it for HTML."""
    return name.replace("<", "‹").replace(">", "›")


def _grade_id(cell: Any) -> Any:
    return (cell.metadata.get("nbgrader") or {}).get("grade_id")
