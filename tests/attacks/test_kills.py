"""Processes of a running batch are killed from outside: the batch goes on, and everybody's grade is right."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.bwrap

NUM_STUDENTS = 6
SLOW = "import time; time.sleep(0.7)"


def processes() -> dict[int, tuple[int, bytes]]:
    """pid -> (parent, command line), of all processes."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rsplit(")", 1)[1].split()[1])
            found[int(path.name)] = (parent, (path / "cmdline").read_bytes())
        except OSError:
            continue
    return found


def below(pid: int) -> dict[int, bytes]:
    """The processes that descend from `pid`, with their command lines."""
    everybody, found, new = processes(), {}, {pid}
    while new:
        new = {child for child, (parent, _) in everybody.items() if parent in new}
        found |= {child: everybody[child][1] for child in new}
    return found


def servers(batch: int) -> list[int]:
    return [pid for pid, (parent, line) in processes().items() if parent == batch and b"examiner_server" in line]


def examiners(batch: int) -> list[int]:
    own = set(servers(batch))
    return [pid for pid, (parent, line) in processes().items() if parent in own and b"examiner_server" in line]


def sandboxes(batch: int) -> list[int]:
    return [pid for pid, line in below(batch).items() if line.startswith(b"/") and b"/bwrap\0" in line[:30]]


def warm_processes(batch: int) -> list[int]:
    boxes = {pid for pid in below(batch) if b"bwrap" in below(batch).get(pid, b"")}
    return [pid for pid, line in below(batch).items() if b"learner_side" in line and pid not in boxes][:1]


def until(found: Callable[[], Any], what: str, seconds: float = 600.0) -> Any:
    """Poll, with a limit that only a fault reaches."""
    end = time.monotonic() + seconds
    while not (value := found()):
        assert time.monotonic() < end, f"waited in vain until {what}"
        time.sleep(0.02)
    return value


@pytest.fixture
def course(place: Any, solved: Any, command: Any, request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """A course with honest submissions that wait, each of which takes a while."""
    made = place(f"kills-{abs(hash(request.node.name))}")
    notebook = solved(made)
    notebook["cells"].insert(0, {"cell_type": "code", "metadata": {}, "id": "slow", "source": SLOW, "outputs": []})
    notebook["cells"][0]["execution_count"] = None
    for number in range(NUM_STUDENTS):
        (tmp_path / f"s{number}.ipynb").write_text(json.dumps(notebook))
    command("collect", "01", str(tmp_path), "--course", str(made.root))
    return made


@pytest.fixture
def run(course: Any, num_workers: int) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts `inferlab grade run`."""
    program = str(Path(sys.executable).with_name("inferlab"))
    words = [program, "grade", "run", "01", "--course", str(course.root), "--workers", str(num_workers)]
    started = []

    def start(*more: str) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        started.append(subprocess.Popen([*words, *more], stdout=pipe, stderr=subprocess.STDOUT, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def num_done(course: Any) -> int:
    return len(list((course.root / "results" / "01_toy").glob("s*.json")))


@pytest.fixture(scope="module")
def lab_and_solution() -> Any:
    from grader.labs.lab import lab_from_notebook
    from grader.labs.lab_source import solution_notebook

    source = Path(__file__).parents[1] / "grader" / "toy_lab" / "solutions" / "01_toy" / "toy.py"
    lab = lab_from_notebook(solution_notebook(source), "01_toy", "toy")
    return lab, {cell.grade_id: cell.source for cell in lab.of_kind("solution")}


VICTIMS = {
    "an examiner server": servers,
    "an examiner": examiners,
    "bubblewrap": sandboxes,
    "the warm process": warm_processes,
}


@pytest.mark.parametrize("num_workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_kills_in_a_batch_cost_nobody_anything(course: Any, run: Any, num_workers: int) -> None:
    batch, killed = run(), []

    def is_killed(found: Callable[[int], list[int]]) -> bool:
        """Killed one, while a submission was being examined. A batch that is through is started once more."""
        nonlocal batch
        if batch.poll() is not None:
            batch = run("--all")
        with contextlib.suppress(IndexError, ProcessLookupError):  # there is none now, or it has just ended
            if examiners(batch.pid):
                os.kill(found(batch.pid)[0], signal.SIGKILL)
                return True
        return False

    for number, (victim, found) in enumerate(VICTIMS.items(), 1):
        until(lambda number=number: num_done(course) >= number, f"{number} are done")
        until(lambda found=found: is_killed(found), f"there is {victim}")
        killed.append(victim)
    assert killed == list(VICTIMS)
    said, _ = batch.communicate(timeout=600)
    if batch.returncode:  # one submission was hit at every attempt; the batch says so, and the same command repairs it
        assert "The same command tries them again" in said, said
        again = run()
        said, _ = again.communicate(timeout=600)
        assert again.returncode == 0, said
    # Or it was hit at every attempt but the lab's own solution was not: it is blamed, with a flag for a person to see.
    blamed = [student for student, recorded in course.recorded().items() if recorded != (6.0, 0)]
    assert len(blamed) < 2, said
    for student in blamed:
        assert any("the grader failed on it" in flag for flag in course.result(student)["flags"]), course.result(
            student
        )
        assert run("--all").wait(600) == 0
    assert course.recorded() == {f"s{number}": (6.0, 0) for number in range(NUM_STUDENTS)}, said


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [2])
def test_after_a_kill_of_the_batch_nothing_is_left_and_a_new_one_goes_on(
    course: Any, run: Any, num_workers: int
) -> None:
    batch = run()
    until(lambda: num_done(course) > 1, "some are done")
    own = set(below(batch.pid))
    assert len(own) > 4
    batch.kill()
    batch.communicate()
    until(lambda: not own & set(processes()), "its processes have ended")
    said, _ = run().communicate(timeout=600)
    assert course.recorded() == {f"s{number}": (6.0, 0) for number in range(NUM_STUDENTS)}, said


@pytest.fixture(scope="module")
def started_again() -> Iterator[Any]:
    """A launcher whose sandbox was killed while it started."""
    from grader.isolation.launcher import Launcher

    with Launcher() as launcher:
        box = launcher._process
        assert box is not None
        os.killpg(box.pid, signal.SIGKILL)  # all of it: it takes seconds until torch is imported
        launcher.fork().end()
        assert launcher._process is not box
        yield launcher


def test_a_sandbox_that_is_killed_while_it_starts_is_started_again(started_again: Any) -> None:
    started_again.fork().end()


def test_a_sandbox_that_cannot_start_is_not_started_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    from grader.isolation import launcher as module

    started = []
    command = module.sandbox.command

    def broken(*arguments: Any) -> list[str]:
        started.append(arguments)
        words = command(*arguments)
        return [words[0], "--no-such-option", *words[1:]]

    monkeypatch.setattr(module.sandbox, "command", broken)
    with pytest.raises(module.SandboxError, match="no-such-option"), module.Launcher() as launcher:
        launcher.fork()
    assert len(started) == 1


def test_a_sandbox_that_is_killed_is_not_taken_for_a_crash_of_the_code_in_it(
    lab_and_solution: Any, started_again: Any
) -> None:
    from grader.examination.attempt import Lost
    from grader.examination.examiner import examine
    from grader.examination.submission import Added, Submission

    lab, solved = lab_and_solution
    sleeps = "Window.__len__ = lambda self: __import__('time').sleep(10**6)"
    submission = Submission(solved, [Added("apply_all", "code", sleeps)])
    box = started_again._process

    def kill_soon(check: Any) -> None:  # after the first check, when the second one has begun
        threading.Timer(1.0, box.kill).start()

    with pytest.raises(Lost):
        examine(lab, submission, started_again, secret=b"lost", on_check=kill_soon)
