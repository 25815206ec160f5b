"""A run is killed, in the middle of anything: no grade is lost, none is doubled, and what a person wrote stays.

Submissions are not examined here: `grade_submission` is replaced, so that writing and recording are what is killed.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

SOURCES = Path(__file__).parent / "toy_lab" / "solutions"
SLUG = "01_toy"
STUDENTS = [f"s{number}" for number in range(6)]


def inferlab(*arguments: str, ok: bool = True) -> str:
    from grader.commands.grade_cli import app

    done = CliRunner().invoke(app, list(arguments))
    assert (done.exit_code == 0) == ok, done.output + str(done.exception)
    return " ".join(done.output.split())


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A course with six submissions that wait."""
    folder = tmp_path_factory.mktemp("pristine")
    root, handed = folder / "course", folder / "handed"
    inferlab("new-course", str(root))
    inferlab("release", "01", "--course", str(root), "--sources", str(SOURCES))
    handed.mkdir()
    for student in STUDENTS:
        (handed / f"{student}.ipynb").write_text((root / "labs" / SLUG / "toy.ipynb").read_text())
    inferlab("collect", "01", str(handed), "--course", str(root))
    return root


@pytest.fixture
def course(pristine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it; examining a submission gives two of its six points."""
    from grader.courses import batch

    root = shutil.copytree(pristine, tmp_path / "course")
    monkeypatch.setattr(batch, "check_worker", lambda setup: {})
    monkeypatch.setattr(batch, "grade_submission", lambda job: graded(job, "check_window"))
    return root


def graded(job: Any, *passed: str) -> str:
    """A result in which some checks passed."""
    from grader.examination.worker import unexamined

    result = unexamined(job.setup.lab(), "failed", "not as expected")
    for check in result.checks:
        if check.grade_id in passed:
            check.status, check.earned = "passed", check.points
    result.student, result.received, result.lab_version = job.student, job.received, job.setup.lab_version
    return result.to_json()


def gradebook(root: Path) -> dict[str, list[tuple[float, bool]]]:
    """Student -> one (score, whether a person must look) per submission in the gradebook."""
    from nbgrader.api import Gradebook

    found: dict[str, list[tuple[float, bool]]] = {}
    with Gradebook(f"sqlite:///{root}/gradebook.db") as book:
        for one in book.find_assignment(SLUG).submissions:
            found.setdefault(one.student.id, []).append((one.score, one.needs_manual_grade))
    return found


def killed(act: Callable[[], None], after: float | None = None) -> None:
    """Do something in a fork of this process, which kills itself, or is killed after some seconds."""
    pid = os.fork()
    if pid == 0:
        try:
            act()
        finally:
            os._exit(0)
    if after is not None:
        time.sleep(after)
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    assert after is not None or os.WIFSIGNALED(status), "the process ended before the moment of its kill"


def run(root: Path) -> list[str]:
    from grader.courses import grading

    return [result.student for result in grading.run(root, SLUG)]


def everything_is_recorded(root: Path, number: int = len(STUDENTS)) -> None:
    book = gradebook(root)
    assert book == {student: [(2.0, False)] for student in STUDENTS[:number]}
    for student in STUDENTS[:number]:
        assert json.loads((root / "results" / SLUG / f"{student}.json").read_text())["earned"] == 2
        assert (root / "autograded" / student / SLUG / "toy.ipynb").is_file()
    assert not [path for path in (root / "results" / SLUG).iterdir() if path.name.startswith(".inferlab")]


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_at_the_third(original: Callable[..., Any], before: bool) -> Callable[..., Any]:
    calls = iter(range(100))

    def call(*arguments: Any) -> Any:
        third = next(calls) == 2
        if third and before:
            die()
        value = original(*arguments)
        if third:
            die()
        return value

    return call


# where the process dies: module, name in it, before or after that is done for the third submission
MOMENTS = {
    "before the result is written": ("grader.courses.nbgrader_hooks", "save_result", True),
    "after the result is written": ("grader.courses.nbgrader_hooks", "save_result", False),
    "in the middle of the transaction": ("grader.courses.nbgrader_hooks", "write_scores", False),
    "with the transaction ready": ("grader.courses.recorder", "_SharedGradebook.finish", True),
    "between transaction and journal": ("grader.courses.recorder", "_SharedGradebook.finish", False),
    "when all is done for it": ("grader.courses.recorder", "Journal.add", False),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_after_a_kill_a_new_run_does_what_is_missing_and_nothing_twice(
    course: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, name, before = MOMENTS[moment]

    def interrupted() -> None:
        import importlib

        owner: Any = importlib.import_module(module)
        *way, last = name.split(".")
        for step in way:
            owner = getattr(owner, step)
        setattr(owner, last, die_at_the_third(getattr(owner, last), before))
        run(course)

    killed(interrupted)
    assert sum(len(found) for found in gradebook(course).values()) in (2, 3)
    assert {len(found) for found in gradebook(course).values()} == {1}
    again = run(course)
    assert len(again) in (3, 4), "only the one it was killed in may be done again"
    everything_is_recorded(course)
    assert run(course) == []


def test_kills_at_random_moments_lose_nothing(course: Path, pristine: Path) -> None:
    draw = random.Random(4)
    began = time.monotonic()
    run(course)
    whole = time.monotonic() - began
    shutil.rmtree(course)
    shutil.copytree(pristine, course)
    for _ in range(5):
        killed(lambda: run(course), after=draw.uniform(0.1, 0.7) * whole)
        assert all(len(found) == 1 for found in gradebook(course).values())
    run(course)
    everything_is_recorded(course)


def test_what_a_person_gave_and_wrote_survives_grading_again(course: Path) -> None:
    from nbgrader.api import Gradebook

    run(course)
    with Gradebook(f"sqlite:///{course}/gradebook.db") as book:
        book.find_grade("check_len", "toy", SLUG, "s0").manual_score = 0.5
        book.find_comment("Window", "toy", SLUG, "s0").manual_comment = "see me"
        book.db.commit()
    (course / "results" / SLUG / "s0.json").unlink()

    def interrupted() -> None:
        from grader.courses import recorder

        recorder._SharedGradebook.finish = die_at_the_third(recorder._SharedGradebook.finish, True)  # type: ignore
        for _ in range(3):
            (course / "results" / SLUG / "s0.json").unlink(missing_ok=True)
            run(course)

    killed(interrupted)
    run(course)
    with Gradebook(f"sqlite:///{course}/gradebook.db") as book:
        assert book.find_submission(SLUG, "s0").score == 2.5
        assert book.find_comment("Window", "toy", SLUG, "s0").comment == "see me"


def test_a_gradebook_from_before_is_filled_again_from_the_results(course: Path, pristine: Path) -> None:
    run(course)
    (course / "gradebook.db").unlink()
    said = inferlab("run", "01", "--course", str(course), ok=False)
    assert "01_toy is not in the gradebook; first: inferlab grade release 01_toy" in said
    shutil.copyfile(pristine / "gradebook.db", course / "gradebook.db")
    said = inferlab("run", "01", "--course", str(course))
    assert "6 were graded before: what the gradebook lacked of them (results, times) is in it now." in said
    assert "0 graded, 6 unchanged." in said
    everything_is_recorded(course)


def test_a_failure_of_nbgrader_in_one_submission_concerns_no_other(
    course: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from grader.courses import nbgrader_hooks

    write_scores = nbgrader_hooks.write_scores

    def fail_for_one(notebook: Any, result: Any) -> None:
        write_scores(notebook, result)
        if result.student == "s2" and result.status != "machinery":
            raise ValueError("a cell is not as expected")

    with monkeypatch.context() as patch:
        patch.setattr(nbgrader_hooks, "write_scores", fail_for_one)
        said = inferlab("run", "01", "--course", str(course), ok=False)
    assert "[6/6]" in said
    assert "1 could not be graded because the grader failed" in said
    assert gradebook(course) == {s: [(0.0, True) if s == "s2" else (2.0, False)] for s in STUDENTS}
    result = json.loads((course / "results" / SLUG / "s2.json").read_text())
    assert result["status"] == "machinery"
    assert "a cell is not as expected" in result["checks"][0]["message"]
    assert run(course) == ["s2"]
    everything_is_recorded(course)


def test_only_one_run_at_a_time_in_a_course(course: Path) -> None:
    from grader.course import course_lock

    with course_lock(course):
        said = inferlab("run", "01", "--course", str(course), ok=False)
    assert f"another command works in this course (process {os.getpid()}: " in said
    assert gradebook(course) == {}
    with (course / "results" / ".lock").open() as file:  # the lock of a killed run is free
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    run(course)
    everything_is_recorded(course)


def test_feedback_beside_a_run_says_what_runs_and_writes_nothing(course: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from grader.course import course_lock

    run(course)
    monkeypatch.setattr(sys, "argv", ["/usr/bin/inferlab", "grade", "run", "01"])
    with course_lock(course):
        said = inferlab("feedback", "01", "--course", str(course), ok=False)
    assert f"(process {os.getpid()}: inferlab grade run 01); wait until it has ended" in said
    assert not (course / "feedback").exists()
    assert "6 pages in feedback/" in inferlab("feedback", "01", "--course", str(course))


def test_a_gradebook_that_is_locked_while_pages_are_written_is_said_without_a_traceback(
    course: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    import sqlite3

    from grader.courses import late

    run(course)
    with (course / "nbgrader_config.py").open("a") as file:  # nbgrader waits 5 s where nothing is said
        file.write(f'c.CourseDirectory.db_url = "sqlite:///{course}/gradebook.db?timeout=0.1"\n')
    other = sqlite3.connect(course / "gradebook.db", isolation_level=None)
    monkeypatch.setattr(late, "settle", lambda *_: other.execute("BEGIN EXCLUSIVE"))
    try:
        said = inferlab("feedback", "01", "--course", str(course), ok=False)
    finally:
        other.close()
    assert "the gradebook cannot be used: database is locked" in said
    assert "Traceback" not in said + "".join(capfd.readouterr())
    assert "grade it again" not in said


def test_what_was_handed_in_again_is_graded_again_and_a_new_time_is_recorded(course: Path, tmp_path: Path) -> None:
    run(course)
    changed = json.loads((course / "labs" / SLUG / "toy.ipynb").read_text())
    changed["cells"][2]["source"] = "x = 1"
    (tmp_path / "again").mkdir()
    (tmp_path / "again" / "s1.ipynb").write_text(json.dumps(changed))
    inferlab("collect", "01", str(tmp_path / "again"), "--course", str(course))
    (course / "submitted" / "s3" / SLUG / "timestamp.txt").write_text("2026-11-20 10:00:00.000000 UTC")
    said = inferlab("run", "01", "--course", str(course))
    assert "s1: 2 of 6" in said
    assert "1 were graded before: what the gradebook lacked of them (results, times) is in it now." in said
    assert "1 graded, 5 unchanged." in said


def test_a_run_says_which_results_rest_on_other_checks(course: Path) -> None:
    run(course)
    path = course / "solutions" / SLUG / "toy.ipynb"
    path.write_text(path.read_text().replace("expected a mean of 3", "expected the mean 3"))
    said = inferlab("run", "01", "--course", str(course))
    assert "6 of them were graded before the lab's checks changed" in said
    assert "inferlab grade regrade 01_toy" in said


def test_a_gradebook_that_cannot_be_written_stops_the_run_and_loses_no_result(course: Path) -> None:
    import sqlite3

    from grader.courses import recorder

    other = sqlite3.connect(course / "gradebook.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")  # somebody else is writing, for longer than we wait
    before, recorder.BUSY_MS = recorder.BUSY_MS, 100
    try:
        said = inferlab("run", "01", "--course", str(course), ok=False)
    finally:
        recorder.BUSY_MS = before
        other.close()
    assert "the gradebook cannot be used: database is locked" in said
    assert (course / "results" / SLUG / "s0.json").is_file()
    run(course)
    everything_is_recorded(course)


def test_a_run_deletes_what_a_killed_one_was_writing_and_nothing_else(course: Path) -> None:
    folder = course / "results" / SLUG
    folder.mkdir(parents=True)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    left, written_now = folder / f".inferlab-{gone.pid}-abc", folder / f".inferlab-{os.getpid()}-abc"
    for path in (left, written_now):
        path.write_bytes(b"{")
    run(course)
    assert (left.exists(), written_now.exists()) == (False, True)
    written_now.unlink()
    everything_is_recorded(course)
