"""A program that is run in a fork of a warm Python does what it does in one of its own (tests/warm.py)."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.warm import Warm, starts_cold, starts_warm


@pytest.fixture(scope="module")
def warm() -> Iterator[Warm]:
    made = Warm("colorsys")
    yield made
    made.close()


def test_a_fork_has_what_was_imported_and_the_folder_environment_umask_and_words_of_who_asks(
    warm: Warm, tmp_path: Path
) -> None:
    code = "import os, sys; print('colorsys' in sys.modules, os.getcwd(), os.environ['ONE'], os.umask(0), sys.argv)"
    command = warm.command(["-P", "-c", code, "a", "b c"])
    done = subprocess.run(command, cwd=tmp_path, env={"ONE": "1"}, umask=0o027, capture_output=True, text=True)
    assert done.stdout == f"True {tmp_path} 1 {0o027} ['-c', 'a', 'b c']\n"


@pytest.mark.parametrize(
    ("code", "status"),
    [("raise SystemExit(3)", 3), ("1 / 0", 1), ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -15),
     ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -9)],
)  # fmt: skip
def test_what_stands_for_a_fork_ends_as_the_fork_ends(warm: Warm, code: str, status: int) -> None:
    assert subprocess.run(warm.command(["-c", code]), capture_output=True).returncode == status


def test_files_that_are_passed_keep_their_numbers_and_end_with_the_fork(warm: Warm) -> None:
    ours, theirs = socket.socketpair()
    code = "import socket, sys; s = socket.socket(fileno=int(sys.argv[1])); s.sendall(s.recv(9).upper())"
    with theirs:
        command = warm.command(["-c", code, str(theirs.fileno())])
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
    ours.sendall(b"hello")
    assert (ours.recv(9), ours.recv(9)) == (b"HELLO", b""), "no other process holds the other end"
    assert process.wait(600) == 0


def test_who_kills_what_stands_for_a_fork_kills_the_fork(warm: Warm) -> None:
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    with subprocess.Popen(warm.command(["-c", code]), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        fork = int(process.stdout.readline())
        assert fork != process.pid
        os.kill(process.pid, signal.SIGKILL)
        assert process.stdout.read() == b"", "the fork had it open"


def test_where_programs_start_warm_so_do_those_that_they_start(warm: Warm) -> None:
    program = [sys.executable, "-P", "-c"]
    said = "import sys; print('colorsys' in sys.modules)  # THIS"
    start = f"import subprocess, sys; subprocess.run([*{program!r}, {said!r}])"

    def says(code: str) -> str:
        return subprocess.run([*program, code], capture_output=True, text=True).stdout

    with starts_warm(lambda: warm.address, ["THIS"]):
        assert says(start) == "True\n"
        assert says(said.replace("THIS", "that")) == "False\n"
        with starts_cold():
            assert says(said) == "False\n"
        assert says(said) == "True\n"
    assert says(said) == "False\n"
