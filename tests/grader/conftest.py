"""A toy lab of three checks, and one warm process for learners' code per test worker."""

from __future__ import annotations

import json
import zipfile
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
    from grader.labs.lab_source import solution_notebook, write_notebook

    return write_notebook(solution_notebook(toy_source))


@pytest.fixture(scope="session")
def release_text(solution_text: str) -> str:
    """The toy lab's released notebook, as the text of a file."""
    from grader.labs.lab_source import released_notebook

    return released_notebook(solution_text, "01_toy", "toy")


@pytest.fixture(scope="session")
def lab(solution_text: str) -> Any:
    """The toy lab with its hidden tests."""
    from grader.labs.lab import lab_from_notebook

    return lab_from_notebook(json.loads(solution_text), "01_toy", "toy")


@pytest.fixture(scope="session")
def launcher() -> Iterator[Any]:
    from grader.isolation.launcher import Launcher

    with Launcher(insecure=True) as running:
        yield running


@pytest.fixture
def examine(lab: Any, launcher: Any) -> Callable[..., Any]:
    """Examines the reference with some solution cells replaced: examine(Window="class Window: ...")."""
    from grader.examination.examiner import Limits
    from grader.examination.examiner import examine as run
    from grader.examination.intake import Added, Submission

    def examine_answers(added: tuple[str, ...] = (), call: float = 60.0, **answers: str) -> Any:
        solved = {cell.grade_id: cell.source for cell in lab.of_kind("solution")}
        cells = [Added("imports", "code", source) for source in added]
        limits = Limits(call=call)
        return run(lab, Submission({**solved, **answers}, cells), launcher, secret=b"test", limits=limits)

    return examine_answers


@pytest.fixture
def statuses() -> Callable[[Any], dict[str, str]]:
    return lambda result: {check.grade_id: check.status for check in result.checks}


@pytest.fixture
def root(tmp_path: Path, release_text: str) -> Path:
    """A course folder with the toy lab released, as far as collecting needs one."""
    folder = tmp_path / "course" / "labs" / "01_toy"
    folder.mkdir(parents=True)
    (folder / "toy.ipynb").write_text(release_text)
    return tmp_path / "course"


@pytest.fixture
def notebook(release_text: str) -> Callable[..., bytes]:
    """A submission of the toy lab with an answer of its own, as bytes."""

    def make(answer: str = "class Window:\n    pass") -> bytes:
        made = json.loads(release_text)
        next(cell for cell in made["cells"] if cell["id"] == "Window")["source"] = answer
        return json.dumps(made).encode()

    return make


class Disk:
    """Writes what is handed in, and reads what a collect made of it. For tests of the toy lab."""

    def write(self, folder: Path, files: dict[str, bytes]) -> Path:
        for name, raw in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(raw)
        return folder

    def zipped(self, path: Path, files: list[tuple[str | zipfile.ZipInfo, bytes]]) -> Path:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, raw in files:
                archive.writestr(name, raw)
        return path

    def answer(self, root: Path, student: str) -> str:
        made = json.loads((root / "submitted" / student / "01_toy" / "toy.ipynb").read_text())
        return "".join(next(cell for cell in made["cells"] if cell["id"] == "Window")["source"])

    def record(self, root: Path, student: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((root / "submitted" / student / "01_toy" / "intake.json").read_text())
        return found

    def tree(self, folder: Path) -> dict[str, bytes]:
        return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture(scope="session")
def disk() -> Disk:
    return Disk()
