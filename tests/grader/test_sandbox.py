"""The sandbox, tried by code that attacks it: as whoever runs the tests, and as an ordinary user."""

from __future__ import annotations

import inspect
import itertools
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from grader.isolation import (
    cgroups,
    launcher,
    sandbox,
    sandbox_doctor,
    sandbox_trials,
    trials_limits,
    trials_neighbours,
    trials_walls,
)
from grader.isolation.launcher import Ending, Launcher
from grader.isolation.sandbox import SandboxError
from grader.isolation.trial import Trial
from grader.learner_side.confine import ABOVE

from .test_learner_triton import with_kernel

ROOT = Path(__file__).parents[2]
TRIALS = list(sandbox_trials.ALL)


@pytest.fixture(scope="module")
def isolated(bwrap: None) -> Iterator[Launcher]:
    with Launcher() as launcher:
        yield launcher


def as_ordinary_user(script: str) -> list[str]:
    """The command that runs a Python script as a user who owns nothing, where we are root."""
    python = [sys.executable, "-B", "-c", script]
    if os.geteuid():
        return python
    # Python may lie in root's home, which others cannot enter. In a mount namespace of its own it gets another one.
    prefix, home = os.path.realpath(sys.base_prefix), os.path.realpath(os.path.expanduser("~root"))
    steps = ["set -e"]
    if prefix.startswith(home + "/"):
        steps += [
            "mount -t tmpfs -o mode=755 none /mnt",
            "mkdir /mnt/python",
            f"mount --bind {prefix} /mnt/python",
            f"mount -t tmpfs -o mode=755 none {home}",
            f"mkdir -p {prefix}",
            f"mount --bind /mnt/python {prefix}",
        ]
    steps += ['exec setpriv --reuid=12345 --regid=12345 --clear-groups env HOME=/tmp "$@"']
    return ["unshare", "--mount", "sh", "-c", "\n".join(steps), "sh", *python]


def test_every_trial_of_the_doctor_is_tried_here() -> None:
    subjects = (trials_walls, trials_neighbours, trials_limits)
    functions = [f for module in subjects for _, f in inspect.getmembers(module, inspect.isfunction)]
    takes_launcher = {f for f in functions if [*inspect.signature(f).parameters] == ["launcher"]}
    assert takes_launcher == set(TRIALS)


@pytest.mark.parametrize("trial", TRIALS, ids=lambda trial: trial.__name__)
def test_the_property_holds(isolated: Launcher, trial: Callable) -> None:
    row = trial(isolated)
    assert row.verdict == "ok", row.found


@pytest.mark.bwrap
def test_the_properties_hold_for_an_ordinary_user() -> None:
    script = textwrap.dedent("""
        import os
        from grader.isolation.launcher import Launcher
        from grader.isolation.sandbox_doctor import trials
        assert os.geteuid()
        with Launcher() as launcher:
            for row in trials(launcher):
                print(row.verdict, row.name, row.found, flush=True)
    """)
    done = subprocess.run(as_ordinary_user(script), capture_output=True, text=True, cwd="/", timeout=600)
    lines = done.stdout.splitlines()
    assert len(lines) == len(TRIALS) + 4, done.stdout + done.stderr
    assert [line for line in lines if line.startswith("fail")] == []
    assert "ordinary user" in lines[0]


def test_doctor_sees_which_rights_the_keeper_of_a_submission_has(isolated: Launcher) -> None:
    if os.geteuid() != 0:
        assert sandbox_doctor.rights(isolated).found.startswith("an ordinary user's")
        return
    script = textwrap.dedent("""
        from grader.isolation.launcher import Launcher
        from grader.isolation.sandbox_doctor import rights
        with Launcher() as launcher:
            print(rights(launcher).found)
    """)
    without = ["setpriv", "--bounding-set=-sys_ptrace,-sys_nice", sys.executable, "-P", "-c", script]
    done = subprocess.run(without, capture_output=True, text=True, cwd=ROOT, timeout=600)
    assert done.stdout.startswith("without CAP_SYS_PTRACE and CAP_SYS_NICE"), done.stderr
    ours = int(sandbox_doctor._status(os.getpid())["CapPrm"], 16)
    here = sandbox_doctor.rights(isolated)
    has_both = all(ours >> capability & 1 for capability in (19, 23))
    can_be_first = os.getpriority(os.PRIO_PROCESS, 0) > ABOVE  # not where the tests themselves run as far ahead
    assert ("without" not in here.found) == (has_both and can_be_first)


@pytest.mark.parametrize(
    ("missing", "has_group", "verdict", "words"),
    [
        ([], False, "ok", ""),
        (["SYS_PTRACE"], False, "warn", "an honest submission may be ended. In a container, start it with --cap-add "),
        (["SYS_PTRACE", "SYS_NICE"], False, "warn", "start it with --cap-add SYS_PTRACE --cap-add SYS_NICE, or"),
        (["SYS_NICE"], True, "info", ""),
    ],
)
def test_missing_rights_are_said_in_one_line_with_what_to_do(
    missing: list[str], has_group: bool, verdict: str, words: str
) -> None:
    row = sandbox_doctor.rights_row(missing, has_group)
    assert (row.verdict, bool(row.advice)) == (verdict, verdict == "warn")
    assert words in row.advice
    assert "\n" not in row.found + row.advice
    assert all(f"CAP_{name}" in row.found for name in missing)


@pytest.mark.parametrize("trial", ["number_of_processes", "memory_of_many", "survival"])
def test_the_limits_hold_without_a_control_group(
    isolated: Launcher, monkeypatch: pytest.MonkeyPatch, trial: str
) -> None:
    monkeypatch.setattr(cgroups, "available", lambda: (1, {}))  # each submission gets a group of its own, or none
    row = getattr(sandbox_trials, trial)(isolated)
    assert row.verdict == "ok", row.found


def test_an_ended_process_says_how_it_ended(isolated: Launcher) -> None:
    source = "import os, sys\ndef leave(): os._exit(3)\ndef abort(): os.abort()"
    for name, wanted in (("leave", 3 << 8), ("abort", signal.SIGABRT)):
        with Trial(isolated, source) as trial:
            with pytest.raises(ConnectionError):
                trial.ask(name)
            assert trial.process.end() == Ending(wanted)
            assert trial.process.end() == Ending(wanted)


def test_of_the_course_only_the_learners_side_and_the_interfaces_are_inside(isolated: Launcher) -> None:
    source = """
        import os
        def shipped():
            top = "/learner/side"
            return [os.listdir(folder) for folder in (top, f"{top}/learner_side", f"{top}/learner_side/interfaces")]
    """
    with Trial(isolated, source) as trial:
        top, files, interfaces = trial.ask("shipped")
    assert top == ["learner_side"]
    assert set(files) == {path.name for path in (ROOT / "grader" / "learner_side").glob("*.py")} | {"interfaces"}
    assert set(interfaces) == {path.name for path in (ROOT / "reference_impl" / "interfaces").glob("*.py")}


def test_a_process_uses_its_own_processor_time_as_seen_from_here(isolated: Launcher) -> None:
    source = "import time\ndef burn():\n    end = time.process_time() + 0.5\n    while time.process_time() < end: pass"
    with Trial(isolated, source) as trial:
        before = trial.process.cpu_seconds()
        trial.ask("burn")
        after = trial.process.cpu_seconds()
    assert before is not None
    assert after is not None
    assert after - before >= 0.4


@pytest.mark.parametrize("lab", ["01_prefill_decode/metrics_sampling", "02_kv_cache/kv_cache"])
def test_the_reference_has_all_points_inside(isolated: Launcher, lab: str) -> None:
    from grader.examination.examiner import examine
    from grader.examination.submission import Submission
    from grader.labs.lab import load_lab

    loaded = load_lab(ROOT / "solutions" / f"{lab}.ipynb")
    solved = {cell.grade_id: cell.source for cell in loaded.of_kind("solution")}
    result = examine(loaded, Submission(solved), isolated, secret=b"sandbox")
    assert {check.grade_id: check.message for check in result.checks if check.status != "passed"} == {}


def test_a_triton_kernel_runs_inside(isolated: Launcher, lab: Any) -> None:
    from grader.examination.examiner import examine

    result = examine(lab, with_kernel(lab), isolated, secret=b"test")
    assert {check.grade_id: check.message for check in result.checks if check.status != "passed"} == {}


@pytest.mark.bwrap
def test_nothing_is_left_when_who_grades_is_killed(tmp_path: Path) -> None:
    script = textwrap.dedent("""
        import sys, time
        from grader.isolation.launcher import Launcher
        from grader.isolation.trial import Trial
        launcher = Launcher()
        launcher.start()
        trial = Trial(launcher, "import os\\ndef more(): return os.fork() or __import__('time').sleep(300)")
        trial.ask("more")
        print(trial.process.pid, launcher._process.pid, flush=True)
        time.sleep(300)
    """)
    grader = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert grader.stdout is not None
    pids = [int(word) for word in grader.stdout.readline().split()]
    assert all(Path("/proc", str(pid)).exists() for pid in pids)
    grader.kill()
    grader.wait()
    deadline = time.monotonic() + 300
    while any(Path("/proc", str(pid)).exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [pid for pid in pids if Path("/proc", str(pid)).exists()] == []


def test_one_who_inherits_a_launcher_can_end_what_its_dead_user_started(isolated: Launcher) -> None:
    isolated.fork().end()  # it has said that it is ready: to this process, not to the one that will be dead
    pid = os.fork()
    if pid == 0:
        isolated.fork()
        os._exit(0)
    os.waitpid(pid, 0)
    isolated.end_all()
    with Trial(isolated, "def f(): return 1") as trial:
        assert trial.ask("f") == 1


def test_an_answer_to_a_dead_user_is_not_taken_for_ones_own(isolated: Launcher) -> None:
    isolated.fork().end()
    warm = isolated._process
    assert isolated._control is not None
    isolated._control.send(b'{"op": "end all", "id": "of a dead one"}')
    assert select.select([isolated._control], [], [], 600)[0]  # it is answered; nobody has read that
    with Trial(isolated, "def f(): return 2") as trial:
        assert trial.ask("f") == 2
    assert isolated._process is warm, "the answer was not left out: the sandbox was started anew"


def test_without_bubblewrap_it_refuses_and_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(SandboxError, match=r"bubblewrap is not installed.*apt install bubblewrap.*--insecure"):
        Launcher().start()


def test_on_another_system_it_refuses_and_names_the_container(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(SandboxError, match="only be isolated on Linux.*container"):
        Launcher().start()


def test_where_bubblewrap_fails_nothing_runs_and_its_words_are_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'bwrap: setting up uid map: Permission denied' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda name: str(broken))
    with Launcher() as launcher, pytest.raises(SandboxError, match="setting up uid map: Permission denied.*container"):
        launcher.fork()


def test_inside_there_is_nothing_of_the_course(tmp_path: Path) -> None:
    names = set(sandbox.packages())
    assert {"torch", "numpy"} <= names
    assert names.isdisjoint({"grader", "reference_impl", "chapters", "solutions", "nbgrader", "inferlab", "pytest"})
    words = sandbox.command(sandbox.Isolation("bwrap", None), str(tmp_path), ["true"])
    shown = [source for option, source in itertools.pairwise(words) if option == "--ro-bind"]
    assert not any(os.path.realpath(ROOT) == os.path.realpath(path) for path in shown)


def test_the_environment_inside_holds_nothing_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COURSE_SECRET", "x")
    assert "COURSE_SECRET" not in sandbox.environment()


SLOWLY = """
import os, signal, time
def where(*_):
    os.write(1, b'Current thread 0x1 (most recent call first):\\n  File "<frozen x>", line 1 in wait\\n')
    time.sleep(0.5)  # until it gets a processor again
    os.write(1, b'  File "<cell Window>", line 2 in append\\n  File "/x/learner_side/learner.py", line 9 in main\\n')
    os.write(1, b'  File "<string>", line 1 in <module>\\nprinted after it\\n')
signal.signal(signal.SIGUSR1, where)
print("printed before it", flush=True)
while True: time.sleep(600)
"""


def test_where_a_process_is_is_read_to_its_end_however_slowly_it_says_it() -> None:
    ours, theirs = socket.socketpair()
    with subprocess.Popen([sys.executable, "-c", SLOWLY], stdout=subprocess.PIPE) as asked, ours, theirs:
        assert asked.stdout is not None
        insecure: Any = types.SimpleNamespace(insecure=True)
        process = launcher.LearnerProcess(insecure, asked.pid, 0, ours, os.dup(asked.stdout.fileno()), None)
        try:
            while not process.output():
                assert asked.poll() is None
                time.sleep(0.01)
            assert process.stack().splitlines()[1:2] == ['  File "<cell Window>", line 2 in append']
        finally:
            asked.kill()
        process._reader.join(600)
    assert process.output() == "printed before it\nprinted after it\n"


@pytest.mark.parametrize(("module", "name"), [(cgroups, "inferlab"), (launcher, "learner")])
def test_what_killed_graders_left_is_swept(tmp_path: Path, module: Any, name: str) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    stale, own = tmp_path / f"{name}-{ended.pid}-0", tmp_path / f"{name}-{os.getpid()}-0"
    stale.mkdir()
    own.mkdir()
    module._sweep(tmp_path)
    assert not stale.exists()
    assert own.exists()
