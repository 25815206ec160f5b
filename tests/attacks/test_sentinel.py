"""A `raise` in a solution cell costs what rests on it; in an added cell it costs nothing. For every lab there is.

Silence is not success: were a check not run, or its failure lost on the way, these would earn points.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = [*sorted(ROOT.glob("solutions/[0-9]*_*/*.py")), ROOT / "tests/grader/toy_lab/solutions/01_toy/toy.py"]
# The toy lab, and one whose checks have roles and cells of given code; all others in `make test-all`.
WHOLE = [
    path if path.parent.name in ("01_toy", "02_kv_cache") else pytest.param(path, marks=pytest.mark.slow)
    for path in SOURCES
]
RAISE = 'raise RuntimeError("sentinel")\n'


@pytest.fixture(scope="module")
def launcher() -> Iterator[Any]:
    from grader.isolation.launcher import Launcher

    with Launcher(insecure=True) as running:
        yield running


@pytest.fixture(scope="module", params=SOURCES, ids=lambda path: path.parent.name)
def lab(request: pytest.FixtureRequest) -> Any:
    from grader.labs.lab import lab_from_notebook
    from grader.labs.lab_source import solution_notebook

    path = request.param
    return lab_from_notebook(solution_notebook(path), path.parent.name, path.stem)


def examined(lab: Any, launcher: Any, answers: dict[str, str], *added: str) -> Any:
    from grader.examination.examiner import examine
    from grader.examination.submission import Added, Submission

    cells = [Added(cell.grade_id, "code", source) for cell in lab.cells for source in added]
    return examine(lab, Submission(answers, cells), launcher, secret=b"sentinel")


def test_a_raise_in_the_first_line_of_every_cell_or_of_every_function_costs_everything(lab: Any, launcher: Any) -> None:
    cells = lab.of_kind("solution")
    result = examined(lab, launcher, {cell.grade_id: RAISE + cell.source for cell in cells})
    assert {check.grade_id: check.earned for check in result.checks if check.earned} == {}
    assert {check.status for check in result.checks} == {"failed"}
    result = examined(lab, launcher, {cell.grade_id: sentinel_in_functions(cell.source) for cell in cells})
    assert {check.grade_id: check.earned for check in result.checks if check.earned} == {}


def sentinel_in_functions(source: str) -> str:
    import ast

    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.body.insert(0, ast.parse(RAISE).body[0])
    return ast.unparse(tree)


# What added cells cost is the examiner's matter and no lab's; that a lab's reference passes is tested with the lab.
@pytest.mark.parametrize("lab", WHOLE, ids=lambda path: path.parent.name, indirect=True)
def test_a_raise_in_added_cells_everywhere_costs_nothing(lab: Any, launcher: Any) -> None:
    solved = {cell.grade_id: cell.source for cell in lab.of_kind("solution")}
    result = examined(lab, launcher, solved, RAISE, "1 / 0", "not python", "import nothing_of_this_name")
    assert {check.grade_id: check.message for check in result.checks if check.status != "passed"} == {}
    assert result.earned == lab.points > 0
