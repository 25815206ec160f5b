"""Cells that an editor merged, split, copied, cut or changed in type: an honest learner loses no point by it.

The operations are JupyterLab's: a merged cell has the type and the metadata of the active one and a new id, both halves
of a split cell have its metadata, a copy has it too, and cells that are cut and pasted keep it. Editors other than
JupyterLab also merge and edit cells that the release marks as not editable.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from grader.examination.examiner import Limits, examine
from grader.examination.intake import read_submission
from grader.examination.submission import Submission
from grader.labs.lab import Lab, lab_from_notebook

Cells = list[dict[str, Any]]


@pytest.fixture(scope="module")
def released(release_text: str) -> Lab:
    return lab_from_notebook(json.loads(release_text), "01_toy", "toy")


@pytest.fixture(scope="module")
def solved(lab: Lab, release_text: str) -> Callable[[], dict[str, Any]]:
    """The released notebook with the solution's code in it."""
    code = {cell.grade_id: cell.source for cell in lab.of_kind("solution")}

    def notebook() -> dict[str, Any]:
        made: dict[str, Any] = json.loads(release_text)
        for cell in made["cells"]:
            cell["stub"] = "".join(cell["source"])
            cell["source"] = code.get(cell["id"], cell["stub"])
            cell["name"] = cell["id"]  # so that operations find it
        return made

    return notebook


def at(cells: Cells, name: str) -> int:
    return next(number for number, cell in enumerate(cells) if cell.get("name") == name)


def own(cells: Cells, above: str, source: str, kind: str = "code") -> Any:
    """A cell of the learner's above another one; it is called "own"."""
    cells.insert(at(cells, above), {"cell_type": kind, "id": "own", "name": "own", "metadata": {}, "source": source})


def merge(cells: Cells, active: str, other: str) -> Any:
    """`active` with the cell below or above it."""
    a, b = at(cells, active), at(cells, other)
    upper, lower = cells[min(a, b)], cells[max(a, b)]
    cells[a] = {**cells[a], "id": "new", "source": f"{upper['source']}\n\n{lower['source']}"}
    del cells[b]


def split(cells: Cells, name: str, before: str) -> Any:
    """At the line that begins with `before`."""
    number = at(cells, name)
    first, rest = cells[number]["source"].split(f"\n{before}", 1)
    cells.insert(number, {**cells[number], "id": "new", "name": "first", "source": first.strip("\n")})
    cells[number + 1]["source"] = before + rest


def paste(cells: Cells, name: str, above: str, source: str | None = None) -> Any:
    copy = {**cells[at(cells, name)], "id": "pasted", "name": "pasted"}
    cells.insert(at(cells, above), copy if source is None else {**copy, "source": source})


def move(cells: Cells, name: str, above: str) -> Any:
    cell = cells.pop(at(cells, name))
    cells.insert(at(cells, above), cell)


def retype(cells: Cells, name: str, kind: str) -> Any:
    cells[at(cells, name)]["cell_type"] = kind


def forget(cells: Cells) -> Any:
    """As some tools save a notebook: without ids and metadata."""
    for number, cell in enumerate(cells):
        cell["id"], cell["metadata"] = str(number), {}


HELPER = "def kept_rows(window):\n    return len(window.rows)"


def with_helper(cells: Cells) -> Any:
    """The answer to Window calls a function and a module of the learner's own cell."""
    window = cells[at(cells, "Window")]
    window["source"] = window["source"].replace("return len(self.rows)", "return math.floor(kept_rows(self))")


OPERATIONS: dict[str, Callable[[Cells], Any]] = {
    "own code merged with the cell below": lambda c: (own(c, "Window", HELPER), merge(c, "own", "Window")),
    "own code merged with the cell above": lambda c: (own(c, "Window", HELPER), merge(c, "Window", "own")),
    "a note merged with the cell below": lambda c: (
        own(c, "Window", "## My window\n\nfrom the lecture.", "markdown"),
        merge(c, "own", "Window"),
    ),
    "two cells to write in, into the upper": lambda c: (
        move(c, "Window", "apply_all"),
        merge(c, "Window", "apply_all"),
    ),
    "two cells to write in, into the lower": lambda c: (
        move(c, "Window", "apply_all"),
        merge(c, "apply_all", "Window"),
    ),
    "into the check above": lambda c: merge(c, "counter", "apply_all"),
    "into the check below": lambda c: merge(c, "check_window", "Window"),
    "with the check below": lambda c: merge(c, "Window", "check_window"),
    "with the imports above": lambda c: merge(c, "imports", "Window"),
    "with the text above, as text": lambda c: (move(c, "Window", "imports"), merge(c, "intro", "Window")),
    "with the text above, as code": lambda c: (move(c, "Window", "imports"), merge(c, "Window", "intro")),
    "a check merged with the check below": lambda c: merge(c, "check_window", "check_len"),
    "split inside of the class": lambda c: split(c, "Window", "    def mean"),
    "split at the end": lambda c: paste(c, "Window", "check_window", source=""),
    "a copy of the stub below": lambda c: paste(c, "Window", "check_window", source=c[at(c, "Window")]["stub"]),
    "a copy": lambda c: paste(c, "Window", "check_calls"),
    "cut, and pasted further down": lambda c: move(c, "Window", "check_calls"),
    "changed to markdown": lambda c: retype(c, "Window", "markdown"),
    "its stub left below": lambda c: (
        own(c, "Window", c[at(c, "Window")]["source"]),
        c[at(c, "Window")].update(source=c[at(c, "Window")]["stub"]),
    ),
    "ids lost": forget,
    "ids lost after a merge": lambda c: (merge(c, "counter", "apply_all"), forget(c)),
    "a helper and an import in the imports' cell": lambda c: (
        with_helper(c),
        c[at(c, "imports")].update(source=f"import math\n\n{c[at(c, 'imports')]['source']}\n\n{HELPER}"),
    ),
    "a helper merged into an edited check": lambda c: (
        with_helper(c),
        own(c, "Window", f"import math\n\n{HELPER}"),
        move(c, "check_len", "Window"),
        merge(c, "check_len", "own"),
        c[at(c, "check_len")].update(source=c[at(c, "check_len")]["source"].replace("range(5)", "range(50)")),
    ),
}  # fmt: skip


def taken(notebook: dict[str, Any], released: Lab) -> Submission:
    for cell in notebook["cells"]:
        for key in ("name", "stub"):
            cell.pop(key, None)
    return read_submission(json.dumps(notebook).encode(), released)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_honest_learner_loses_no_point(
    lab: Lab, released: Lab, solved: Callable[[], dict[str, Any]], launcher: Any, operation: str
) -> None:
    notebook = solved()
    OPERATIONS[operation](notebook["cells"])
    result = examine(lab, taken(notebook, released), launcher, secret=b"test", limits=Limits(call=60.0))
    assert [(c.grade_id, c.message) for c in result.checks if c.status != "passed"] == []
