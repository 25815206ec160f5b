"""Workers and the command as they run: real processes, killed and stopped in the middle of their work."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from grader.course import student_secret
from grader.courses import batch
from grader.courses.batch import job_of, lab_setup
from grader.examination import worker
from grader.examination.worker import Job, Setup, WorkerError, check_worker, grade_submission
from tests.warm import starts_cold

SLUG = "01_toy"
MARK = "INFERLAB_TEST_MARK"
# For the file with this name it waits as long as its limits allow; they bound what hangs, and nothing here does.
PATIENT = {"call": 1000.0, "check": 3000.0, "total": 3000.0}
WAITING = "import os, time\nwhile not os.path.exists({0!r}): time.sleep(0.02)"


def inferlab(*arguments: str, ok: bool = True) -> str:
    from grader.commands.grade_cli import app

    done = CliRunner().invoke(app, list(arguments))
    assert (done.exit_code == 0) == ok, done.output + str(done.exception)
    return done.output


def hand_in(root: Path, submissions: dict[str, str]) -> Path:
    """The course in which these submissions are collected."""
    handed = root.parent / "handed"
    handed.mkdir()
    for student, notebook in submissions.items():
        (handed / f"{student}.ipynb").write_text(notebook)
    inferlab("collect", "01", str(handed), "--course", str(root))
    return root


@pytest.fixture(scope="module")
def course(
    tmp_path_factory: pytest.TempPathFactory,
    released_course: Callable[[Path], Path],
    solution_text: str,
    warm_examiners: None,
) -> Path:
    """A course with one submission, which is graded."""
    root = hand_in(released_course(tmp_path_factory.mktemp("real") / "course"), {"s0": solved(solution_text)})
    inferlab("run", "01", "--insecure", "--workers", "1", "--course", str(root))
    return root


@pytest.fixture(scope="module")
def setup(course: Path) -> Setup:
    """Of `course`, so that what tests do with it and what the course's runs do can share examiners."""
    return lab_setup(course, SLUG, insecure=True)


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test starts for other setups ends with it, and the idle servers of `setup` stay for the next test."""
    others = set(worker._alive)
    monkeypatch.setattr(worker, "_idle", {})
    yield
    for server in worker._alive - others:
        server.close()


def solved(text: str, first: str = "") -> str:
    """The solution as a submission; `first` runs in the learner's process before all else."""
    notebook = json.loads(text)
    if first:
        notebook["cells"].insert(0, {"cell_type": "code", "metadata": {}, "source": first, "id": "first"})
    return json.dumps(notebook)


def changed(setup: Setup, grade_id: str, source: str) -> Setup:
    """The lab with the code of one check replaced."""
    notebook = json.loads(setup.solution)
    cell = next(cell for cell in notebook["cells"] if cell["id"] == grade_id)
    cell["source"] = f"# property: something.\n# hint: none.\n{source}"
    return replace(setup, solution=json.dumps(notebook))


def grade(setup: Setup, first: str = "", **fields: Any) -> dict[str, Any]:
    fields = {"secret": setup.secret} | fields
    return dict(json.loads(grade_submission(Job(setup, "ada", solved(setup.solution, first), **fields))))


def children(pid: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = path.read_text()
        except OSError:
            continue
        if int(text.rsplit(")", 1)[1].split()[1]) == pid:
            found.append(int(path.parent.name))
    return found


def wait_until(true: Callable[[], Any], what: str, seconds: float = 600.0) -> Any:
    """Poll, with a limit that only a fault reaches."""
    end = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < end, f"waited in vain until {what}"
        time.sleep(0.02)
    return found


def examiner_child(server: worker.Server) -> int:
    """The process that examines; the server's other child is the launcher of learners' code, which has run exec."""
    own = Path(f"/proc/{server._process.pid}/cmdline").read_bytes()
    return int(
        wait_until(
            lambda: [c for c in children(server._process.pid) if Path(f"/proc/{c}/cmdline").read_bytes() == own],
            "an examiner runs",
        )[0]
    )


def test_a_submission_is_graded_with_the_secret_that_its_result_names(setup: Setup) -> None:
    result = grade(setup, received="12ef", notes=("a note",), secret="ab" * 32)
    assert (result["status"], result["earned"], result["student"]) == ("passed", 6, "ada")
    assert (result["secret"], result["received"], result["notes"]) == ("ab" * 32, "12ef", ["a note"])
    assert result["lab_version"] == setup.lab_version


def test_what_a_check_draws_is_a_students_own_and_the_same_when_they_hand_in_again(
    course: Path, setup: Setup, beside: None
) -> None:
    drawing = changed(setup, "check_window", "from grader.checks import seed\nprint(seed('x'))")

    def drawn(student: str) -> str:
        job = replace(job_of(course, drawing, "s0"), student=student)
        job = replace(job, secret=student_secret(course, SLUG, student).hex())
        result = json.loads(grade_submission(job))
        return str(next(check["seen"] for check in result["checks"] if check["grade_id"] == "check_window"))

    assert drawn("s0") == drawn("s0") != drawn("s1")
    assert job_of(course, setup, "s0").secret == student_secret(course, SLUG, "s0").hex()
    assert student_secret(course, SLUG, "s0") != student_secret(course, "02_x", "s0")


def at_work(setup: Setup) -> list[worker.Server]:
    return [s for s in worker._alive if s.key == setup.key and not any(s in idle for idle in worker._idle.values())]


def test_a_process_that_is_killed_costs_no_submission_anything(setup: Setup, beside: None, tmp_path: Path) -> None:
    cold = replace(setup, secret="ab" * 16)  # servers of its own, whose children can be found
    for victim in ("the examiner's child", "the server"):
        go_on = tmp_path / victim
        with starts_cold(), ThreadPoolExecutor(2) as pool:
            slow = pool.submit(grade, cold, WAITING.format(str(go_on)), limits=PATIENT)
            servers = wait_until(lambda: at_work(cold), "a server is at work")
            child = examiner_child(servers[0])
            neighbour = pool.submit(grade, cold)
            os.kill(child if victim == "the examiner's child" else servers[0]._process.pid, signal.SIGKILL)
            go_on.touch()
            assert slow.result()["status"] == neighbour.result()["status"] == "passed", victim
        assert not Path(f"/proc/{child}").exists(), victim


def test_a_worker_with_other_versions_refuses(setup: Setup) -> None:
    other = replace(setup, versions={**setup.versions, "torch": "1.0"})
    with pytest.raises(WorkerError, match="has other versions than this machine .torch: .* here, expected 1.0"):
        grade(other)


def start(course: Path, workers: int) -> subprocess.Popen[str]:
    code = f"from grader.courses import batch; batch.LIMITS = {PATIENT}; from grader.cli import main; main()"
    command = [sys.executable, "-P", "-c", code]
    return subprocess.Popen(
        [*command, "grade", "run", "01", "--insecure", "--workers", str(workers), "--course", str(course)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, MARK: str(course), "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip


def left_behind(course: Path) -> list[str]:
    """Processes that carry the mark of this course in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"{MARK}={course}".encode() in path.read_bytes():
                found.append(path.parent.name)
        except OSError:
            pass
    return found


def graded(course: Path) -> set[str]:
    return {path.stem for path in (course / "results" / SLUG).glob("*.json")}


def test_a_run_that_is_killed_and_one_that_is_stopped_leave_no_process_and_the_next_goes_on(
    tmp_path: Path, released_course: Callable[[Path], Path], solution_text: str, warm_examiners: None
) -> None:
    go_on = tmp_path / "go on"
    waiting = dict.fromkeys(["s1", "s2", "s3"], solved(solution_text, WAITING.format(str(go_on))))
    course = hand_in(released_course(tmp_path / "course"), {"s0": solved(solution_text), **waiting})

    running = start(course, workers=1)
    wait_until(lambda: graded(course) or running.poll() is not None, "the first is graded")
    running.kill()
    running.communicate()
    wait_until(lambda: not left_behind(course), "the processes of a killed run are gone")
    assert graded(course) == {"s0"}

    running = start(course, workers=2)
    wait_until(lambda: len(left_behind(course)) > 4, "its workers have started")
    os.killpg(running.pid, signal.SIGINT)  # as the terminal does
    said = running.communicate(timeout=600)[1]
    assert running.returncode == 130, said
    assert "To go on: inferlab grade run 01" in said
    assert "Traceback" not in said
    wait_until(lambda: not left_behind(course), "the processes of a stopped run are gone")

    go_on.touch()
    inferlab("run", "01", "--insecure", "--workers", "1", "--course", str(course))
    assert graded(course) == {"s0", *waiting}
    from nbgrader.api import Gradebook

    with Gradebook(f"sqlite:///{course}/gradebook.db") as book:
        found = sorted((one.student.id, one.score) for one in book.find_assignment(SLUG).submissions)
    assert found == [(student, 6.0) for student in ("s0", *waiting)]


# A server that does all that is asked of it here, without importing torch: it is ready, and has no end of work.
BUSY = """
import sys
from multiprocessing.connection import Connection
channel = Connection(int(sys.argv[1]))
channel.recv_bytes()
channel.send_bytes(b'{"ready": true}')
try:
    channel.recv_bytes()
    channel.send_bytes(b'{"seconds": 6000}')
    channel.recv_bytes()
except EOFError:
    pass
"""


def test_a_server_that_starts_while_a_run_is_stopped_is_ended_too(
    setup: Setup, beside: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    starting, closed, close, popen = threading.Event(), threading.Event(), worker.close_servers, subprocess.Popen

    def start_late(*arguments: Any, **named: Any) -> Any:
        starting.set()
        assert closed.wait(600)  # until the run has ended all servers that it knows
        return popen(*arguments, **named)

    def closing(key: str) -> None:
        close(key)
        closed.set()

    setup = replace(setup, secret="ef" * 16)
    monkeypatch.setattr(worker, "SERVER", ("-c", BUSY))
    monkeypatch.setattr(batch, "close_servers", closing)
    endless = Job(setup, "ada", solved(setup.solution, WAITING.format("/does not exist")), setup.secret, limits=PATIENT)
    with batch._pool("", 2, setup) as (pool, _):
        monkeypatch.setattr(subprocess, "Popen", start_late)
        jobs = [pool.submit(grade_submission, endless) for _ in range(2)]  # one server is there, one more starts
        assert starting.wait(600)
    assert [type(job.exception()) for job in jobs] == [worker.Stopped, worker.Stopped]


def test_idle_servers_are_ended_however_soon_the_threads_end(
    setup: Setup, beside: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class EndsAtOnce(threading.Thread):
        def start(self) -> None:
            super().start()
            self.join()

    setup = replace(setup, secret="ef" * 16)
    monkeypatch.setattr(worker, "SERVER", ("-c", BUSY))
    monkeypatch.setattr(batch, "close_servers", worker.close_servers)
    with batch._pool("", 1, setup):
        assert [server for server in worker._alive if server.key == setup.key]
        monkeypatch.setattr(threading, "Thread", EndsAtOnce)
    assert [server for server in worker._alive if server.key == setup.key] == []


def test_replay_gives_the_same_result_and_records_nothing(course: Path) -> None:
    path = course / "results" / SLUG / "s0.json"
    recorded, book = path.read_bytes(), (course / "gradebook.db").read_bytes()
    again = json.loads(inferlab("replay", "s0", "01", "--insecure", "--course", str(course)))

    def timeless(result: dict[str, Any]) -> dict[str, Any]:
        return {**result, "seconds": 0, "checks": [{**check, "seconds": 0} for check in result["checks"]]}

    assert timeless(again) == timeless({**json.loads(recorded), "secret": ""})  # it may be shown
    assert path.read_bytes() == recorded
    assert (course / "gradebook.db").read_bytes() == book


def test_an_examiner_that_dies_every_time_is_a_failure_of_the_grader(setup: Setup, beside: None) -> None:
    broken = changed(setup, "check_len", "import os\nos._exit(3)")
    result = grade(broken)
    assert (result["status"], result["earned"]) == ("machinery", 0)
    said = "on the lab's own solution: the examiner's process ended (exit status 3)"
    assert said in result["checks"][0]["message"]
    assert grade(broken, refused="not a notebook")["status"] == "refused"


# What goes wrong in the grader's own code, and what is said of it. The submission says which of them.
FAULTS = {
    "raise RecursionError('too deep')": "RecursionError: too deep",
    "os._exit(4)": "the examiner's process ended (exit status 4)",
    "raise examiner.Lost('ended from outside')": "Lost: ended from outside",
}
FAILS = f"""
import os, sys
import grader.examination.examiner as examiner
import grader.examination.examiner_server as server
check = examiner._Examination.check
def fail(self, cell, spent):
    for fault in {[*FAULTS]}:
        if cell.grade_id == "check_len" and any(fault in added.source for added in self.submission.added):
            exec(fault)
    return check(self, cell, spent)
examiner._Examination.check = fail
server.main(int(sys.argv[1]))
"""


def test_what_makes_the_grader_fail_on_one_submission_only_is_that_submissions_fault(
    setup: Setup, beside: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "SERVER", ("-c", FAILS))
    other = replace(setup, secret="cd" * 16)  # a server of its own
    for fault, said in FAULTS.items():
        result = grade(other, f"# {fault}")
        assert result["status"] == "crashed in check_len", fault
        assert {check["grade_id"]: check["status"] for check in result["checks"]} == {
            "check_window": "passed", "check_len": "crashed", "check_calls": "crashed",
        }, fault  # fmt: skip
        assert result["earned"] == 2, fault
        assert f"and not on the lab's own solution: {said}" in result["checks"][1]["message"]
        assert said in result["flags"][0]
    assert grade(other)["status"] == "passed"


def test_an_examiner_that_hangs_is_ended_from_outside_and_what_was_passed_stays(
    setup: Setup, beside: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # When the first check is done, time flies for who waits for the second one. Before, there is as much as it needs.
    start = """
import sys
import grader.examination.examiner_server as server
wait, waits = server.wait, iter(range(100))
server.wait = lambda channels, seconds: wait(channels, seconds if next(waits) == 0 else seconds / 2000)
server.main(int(sys.argv[1]))
"""
    monkeypatch.setattr(worker, "SERVER", ("-c", start))
    deaf = "import signal, time\nsignal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])\ntime.sleep(600)"
    result = grade(changed(setup, "check_len", deaf))
    assert {c["grade_id"]: c["status"] for c in result["checks"]} == {
        "check_window": "passed", "check_len": "timed out", "check_calls": "timed out",
    }  # fmt: skip
    assert result["earned"] == 2
    assert "grading was ended after 810 s" in result["checks"][1]["message"]


def test_without_isolation_a_run_refuses_before_the_first_submission_and_says_what_to_do(
    course: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[bool] = []

    def check(setup: Setup) -> dict[str, str]:
        checked.append(setup.insecure)
        with pytest.raises(WorkerError, match="bubblewrap is not installed.*--insecure") as refused:
            check_worker(setup)
        raise refused.value

    before = {path: path.stat().st_mtime_ns for path in (course / "results" / SLUG).iterdir()}
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(batch, "check_worker", check)
    said = inferlab("run", "01", "--all", "--course", str(course), ok=False)
    assert checked == [False]
    assert re.search("bubblewrap is not installed.*--insecure", said, re.DOTALL)
    assert {path: path.stat().st_mtime_ns for path in (course / "results" / SLUG).iterdir()} == before
