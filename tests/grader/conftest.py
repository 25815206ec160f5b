"""A toy lab of three checks, and one warm process for learners' code per test worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

TOY = Path(__file__).parent / "toy_lab"


@pytest.fixture(scope="session")
def toy_source() -> Path:
    return TOY / "solutions" / "01_toy" / "toy.py"


@pytest.fixture(scope="session")
def solution_text(toy_source: Path) -> str:
    """The toy lab's solution notebook, as the text of a file."""
    from grader.lab_source import solution_notebook, write_notebook

    return write_notebook(solution_notebook(toy_source))


@pytest.fixture(scope="session")
def release_text(solution_text: str) -> str:
    """The toy lab's released notebook, as the text of a file."""
    from grader.lab_source import released_notebook

    return released_notebook(solution_text, "01_toy", "toy")


@pytest.fixture(scope="session")
def lab(solution_text: str) -> Any:
    """The toy lab with its hidden tests."""
    import json

    from grader.lab import lab_from_notebook

    return lab_from_notebook(json.loads(solution_text), "01_toy", "toy")


@pytest.fixture(scope="session")
def launcher() -> Iterator[Any]:
    from grader.launcher import Launcher

    with Launcher() as running:
        yield running


@pytest.fixture
def examine(lab: Any, launcher: Any) -> Callable[..., Any]:
    """Examines the reference with some solution cells replaced: examine(Window="class Window: ...")."""
    from grader.examiner import Limits
    from grader.examiner import examine as run
    from grader.intake import Added, Submission

    def examine_answers(added: tuple[str, ...] = (), call: float = 60.0, **answers: str) -> Any:
        solved = {cell.grade_id: cell.source for cell in lab.of_kind("solution")}
        cells = [Added("imports", "code", source) for source in added]
        limits = Limits(call=call)
        return run(lab, Submission({**solved, **answers}, cells), launcher, secret=b"test", limits=limits)

    return examine_answers


@pytest.fixture
def statuses() -> Callable[[Any], dict[str, str]]:
    return lambda result: {check.grade_id: check.status for check in result.checks}
