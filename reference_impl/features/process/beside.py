"""Processes beside this one: how they are started, how they end with it, and how they ended."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from typing import Protocol


class Process(Protocol):
    """What is asked of a process, as of `subprocess.Popen`."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def kill(self) -> None: ...


def start_beside(module: str, *words: str) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Starts a process that runs `module`; returns it, and this end of a socket between the two. Its first argument is
    the number of the other end; `words` follow."""
    mine, theirs = socket.socketpair()
    command = [sys.executable, "-P", "-m", module, str(theirs.fileno()), *words]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}  # so that what is pickled is found there
    with theirs:
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=environment)
    return process, mine


def how_it_ended(process: Process) -> str:
    """Waits for the process to end, and says how it did."""
    code = process.wait()
    return f"was killed by signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"ended with code {code}"


def end_with_the_other(number: int) -> None:
    """Makes sure that this process is killed when the other end of socket `number` is closed, even in the middle of a
    step, and even if it is stopped: a child does that, which does nothing else and ends with this process."""
    ends_with_this, kept = os.pipe()  # `kept` stays open as long as this process
    this = os.getpid()
    if os.fork():
        os.close(ends_with_this)
        return
    try:
        os.close(kept)
        hung_up = select.poll()
        for each in (number, ends_with_this):
            hung_up.register(each, 0)
        if all(each == number for each, _ in hung_up.poll()):  # and this process has not ended itself
            os.kill(this, signal.SIGKILL)
    except ProcessLookupError:
        pass  # it has, meanwhile
    finally:
        os._exit(0)


def ignore_signals() -> None:
    """Ignores SIGINT and SIGTERM, which a terminal or a service sends to all its processes: the process at the other
    end decides when to end."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
