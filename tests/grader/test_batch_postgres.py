"""The gradebook in a real PostgreSQL server, which is started here on a socket in a folder of its own."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

SOURCES = Path(__file__).parent / "toy_lab" / "solutions"
SLUG = "01_toy"
STUDENTS = [f"s{number}" for number in range(4)]


@dataclass
class Server:
    """A cluster in `folder`, run by an ordinary user: PostgreSQL refuses to be root."""

    folder: Path
    tools: Path

    def run(self, *words: str) -> None:
        user = ["runuser", "-u", "nobody", "--"] if os.geteuid() == 0 else []
        done = subprocess.run(
            [*user, *words], capture_output=True, text=True, cwd=self.folder, stdin=subprocess.DEVNULL
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def control(self, *words: str) -> None:
        options = f"-k {self.folder} -c listen_addresses="
        log = str(self.folder / "log")
        self.run(str(self.tools / "pg_ctl"), "-D", str(self.folder / "data"), "-l", log, "-o", options, "-w", *words)

    def database(self, name: str) -> str:
        """An empty database; returns its URL for SQLAlchemy."""
        self.run(str(self.tools / "createdb"), "-h", str(self.folder), "-U", "grader", name)
        return f"postgresql+psycopg://grader@/{name}?host={self.folder}"


@pytest.fixture(scope="module")
def server(postgres: None) -> Iterator[Server]:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    tools = found[-1].parent if found else Path(str(shutil.which("initdb"))).parent
    folder = Path(tempfile.mkdtemp(prefix="pg-", dir="/tmp"))  # where the server's own user may enter
    running = Server(folder, tools)
    try:
        if os.geteuid() == 0:
            nobody = pwd.getpwnam("nobody")
            os.chown(folder, nobody.pw_uid, nobody.pw_gid)
        running.run(str(tools / "initdb"), "-D", str(folder / "data"), "-U", "grader", "--auth", "trust", "--no-sync")
        running.control("start")
        yield running
        running.control("-m", "immediate", "stop")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def inferlab(*arguments: str, ok: bool = True) -> str:
    from grader.commands.grade_cli import app

    done = CliRunner().invoke(app, list(arguments))
    assert (done.exit_code == 0) == ok, done.output + str(done.exception)
    return " ".join(done.output.split())


def graded(job: Any) -> str:
    """A result with two of six points, without examining anything."""
    from grader.examination.worker import unexamined

    result = unexamined(job.setup.lab(), "failed", "not as expected")
    result.checks[0].status, result.checks[0].earned = "passed", result.checks[0].points
    result.student, result.received, result.lab_version = job.student, job.received, job.setup.lab_version
    return result.to_json()


@pytest.fixture
def course(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A course whose nbgrader_config.py names a database of its own; four submissions wait in it."""
    from grader.courses import batch

    root, handed = tmp_path / "course", tmp_path / "handed"
    inferlab("new-course", str(root))
    with (root / "nbgrader_config.py").open("a") as file:
        file.write(f'\nc.CourseDirectory.db_url = "{server.database(f"course_{uuid.uuid4().hex}")}"\n')
    inferlab("release", "01", "--course", str(root), "--sources", str(SOURCES))
    handed.mkdir()
    for student in STUDENTS:
        (handed / f"{student}.ipynb").write_text((root / "labs" / SLUG / "toy.ipynb").read_text())
    inferlab("collect", "01", str(handed), "--course", str(root))
    monkeypatch.setattr(batch, "check_worker", lambda setup: {})
    monkeypatch.setattr(batch, "grade_submission", graded)
    return root


def scores(root: Path) -> dict[str, list[float]]:
    from nbgrader.api import Gradebook

    from grader.courses.course import nbgrader_config
    from grader.labs.release import course_directory

    url = course_directory(nbgrader_config(root), SLUG).db_url
    assert url.startswith("postgresql")
    found: dict[str, list[float]] = {}
    with Gradebook(url) as book:
        for one in book.find_assignment(SLUG).submissions:
            found.setdefault(one.student.id, []).append(one.score)
    return found


def test_a_course_is_graded_into_postgresql_from_release_to_feedback(course: Path) -> None:
    assert "4 graded, 0 unchanged" in inferlab("run", "01", "--course", str(course))
    assert scores(course) == {student: [2.0] for student in STUDENTS}
    assert not (course / "gradebook.db").exists()
    assert "0 graded, 4 unchanged" in inferlab("run", "01", "--course", str(course))
    inferlab("feedback", "01", "--course", str(course))
    assert "2 of 6" in (course / "feedback" / "s0" / SLUG / "toy.html").read_text()
    assert "s3" in inferlab("report", "01", "--course", str(course))


def test_a_kill_in_the_middle_of_a_transaction_loses_and_doubles_nothing(course: Path) -> None:
    pid = os.fork()
    if pid == 0:
        from grader.courses import grading, recorder

        finished = iter(range(10))
        finish = recorder._SharedGradebook.finish

        def die_at_the_third(book: Any) -> None:
            if next(finished) == 2:
                book.db.flush()
                os.kill(os.getpid(), signal.SIGKILL)
            finish(book)

        recorder._SharedGradebook.finish = die_at_the_third  # type: ignore[method-assign]
        try:
            list(grading.run(course, SLUG))
        finally:
            os._exit(0)
    assert os.WIFSIGNALED(os.waitpid(pid, 0)[1])
    assert len(scores(course)) == 2
    inferlab("run", "01", "--course", str(course))
    assert scores(course) == {student: [2.0] for student in STUDENTS}


def test_a_server_that_stops_in_the_middle_stops_the_run_and_the_next_goes_on(
    course: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    from grader.courses import recorder

    finished, finish = iter(range(10)), recorder._SharedGradebook.finish

    def stop_after_the_second(book: Any) -> None:
        finish(book)
        if next(finished) == 1:
            server.control("-m", "immediate", "stop")

    with monkeypatch.context() as patch:
        patch.setattr(recorder._SharedGradebook, "finish", stop_after_the_second)
        try:
            said = inferlab("run", "01", "--course", str(course), ok=False)
        finally:
            server.control("start")
    assert "the gradebook cannot be used" in said
    inferlab("run", "01", "--course", str(course))
    assert scores(course) == {student: [2.0] for student in STUDENTS}
