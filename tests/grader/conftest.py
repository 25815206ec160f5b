"""A toy lab of three checks, and one warm process for learners' code per test worker."""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

TOY = Path(__file__).parent / "toy_lab"


@pytest.fixture(scope="session", autouse=True)
def _examiners_start_warm(examiners_start_warm: Callable[[], str]) -> None:
    pass


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
def warm_launcher(launcher: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`lab check`, in this process, takes the worker's launcher in place of one of its own."""
    monkeypatch.setattr("grader.isolation.launcher.Launcher", lambda insecure: contextlib.nullcontext(launcher))


@pytest.fixture
def examine(lab: Any, launcher: Any) -> Callable[..., Any]:
    """Examines the reference with some solution cells replaced: examine(Window="class Window: ...")."""
    from grader.examination.examiner import Limits
    from grader.examination.examiner import examine as run
    from grader.examination.submission import Added, Submission

    def examine_answers(added: tuple[str, ...] = (), **answers: str) -> Any:
        solved = {cell.grade_id: cell.source for cell in lab.of_kind("solution")}
        cells = [Added("imports", "code", source) for source in added]
        submission = Submission({**solved, **answers}, cells)
        return run(lab, submission, launcher, secret=b"test", limits=Limits(call=60.0))

    return examine_answers


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[dict[str, Any], Any], Any]], list[float]]:
    """hasty(hangs): a request to learners' code has 0.2 s where hangs(header, payload); all others have what they get.

    So what never ends costs little, and what is honest has all the time it needs on a busy machine. Returns the list of
    the seconds that those requests would have had.
    """
    from grader.learner_side.peer import Peer

    request = Peer.request

    def hurry(hangs: Callable[[dict[str, Any], Any], Any]) -> list[float]:
        given: list[float] = []

        def hurried(peer: Any, header: dict[str, Any], payload: Any) -> Any:
            seconds = peer.call_seconds
            if hangs(header, payload):
                given.append(seconds)
                peer.call_seconds = 0.2
            try:
                return request(peer, header, payload)
            finally:
                peer.call_seconds = seconds

        monkeypatch.setattr(Peer, "request", hurried)
        return given

    return hurry


@pytest.fixture
def when_exists() -> Callable[[Path, Callable[[], Any]], threading.Thread]:
    """when_exists(path, act): in a thread, wait until a process has made this file, then act."""

    def watch(path: Path, act: Callable[[], Any]) -> threading.Thread:
        def wait() -> None:
            end = time.monotonic() + 600  # for what hangs
            while not path.exists() and time.monotonic() < end:
                time.sleep(0.01)
            act()

        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        return thread

    return watch


@pytest.fixture(scope="session")
def released_course(made_once: Callable[[str, Callable[[Path], None]], Path]) -> Callable[[Path], Path]:
    """released_course(root): a course folder at `root` with the toy lab released. All of them have the same secret."""

    def release(folder: Path) -> None:
        from typer.testing import CliRunner

        from grader.commands.grade_cli import app

        root = str(folder / "course")
        for words in (["new-course", root], ["release", "01", "--course", root, "--sources", str(TOY / "solutions")]):
            done = CliRunner().invoke(app, words)
            assert done.exit_code == 0, done.output + str(done.exception)

    made = made_once("released", release)
    return lambda root: Path(shutil.copytree(made / "course", root))


@pytest.fixture(scope="module")
def warm_examiners() -> Iterator[None]:
    """In this module a run leaves its examiners to the next one with the same checks and secret.

    To start one takes longer than to examine a class with it. That a run ends its own is tested where processes are.
    """
    from grader.courses import batch
    from grader.examination import worker

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch, "close_servers", lambda key: None)
        yield
    worker.close_servers()


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
