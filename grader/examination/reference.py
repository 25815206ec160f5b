"""The reference solution inside the examiner, for hidden tests: `reference.NAME`. Never in the learner's process."""

from __future__ import annotations

import linecache
from typing import Any

from grader.labs.lab import Lab
from grader.learner_side.peer import LAB_MODULE


class Reference:
    """The reference's graded names as attributes, made on first use. Only a solution notebook has them."""

    def __init__(self, lab: Lab):
        self._lab = lab
        self._namespace: dict[str, Any] | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if self._namespace is None:
            self._namespace = {"__name__": LAB_MODULE}
            for cell in self._lab.cells:
                if cell.kind == "solution" or (cell.kind == "code" and cell.where in ("both", "learner")):
                    run_cell(cell.source, f"reference {cell.grade_id}", self._namespace)
        if name not in self._namespace:
            raise AttributeError(f"the reference has no {name}")
        return self._namespace[name]


def run_cell(source: str, name: str, namespace: dict[str, Any]) -> None:
    """Run a cell of a lab in `namespace`; its lines show in tracebacks under <name>."""
    filename = f"<{name}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    # optimize=0: under `python -O` every assert would vanish and every check would pass.
    exec(compile(source, filename, "exec", dont_inherit=True, optimize=0), namespace)
