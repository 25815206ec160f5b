"""Workers in forks of a Python that has already imported torch (tests/warm.py), instead of in new ones.

What stands for a fork is the child of whoever starts a worker; who kills it kills the fork.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys

import pytest

from reference_impl.features.parallel import group
from reference_impl.features.process import worker
from tests.warm import Warm

# Packages are found where the process that starts a worker finds them.
_MODULE = """
import os, runpy, sys
sys.path[:] = os.environ["PYTHONPATH"].split(os.pathsep)
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


def start_beside(warm: Warm, module: str, *words: str) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """As the function of that name; its socket is the fork's standard input."""
    mine, theirs = socket.socketpair()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = warm.command(("-c", _MODULE, module, "0", *words))
    with theirs:
        return subprocess.Popen(command, stdin=theirs, env=environment), mine


def kill(given: worker.WorkerProcess) -> None:
    """And waits until it is gone: a fork outlives what stands for it by a moment."""
    os.kill(given.pid, signal.SIGKILL)
    given._process.wait()
    closed = select.poll()
    closed.register(given._connection.fileno(), select.POLLHUP)  # POLLHUP: the other end is closed, read or not
    assert closed.poll(600_000)


@pytest.fixture
def forked_workers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that get a process during this test are forked. The process that forks is started with the first one."""

    def start(module: str, *words: str) -> tuple[subprocess.Popen[bytes], socket.socket]:
        return start_beside(request.getfixturevalue("warm"), module, *words)

    monkeypatch.setattr(worker, "start_beside", start)
    monkeypatch.setattr(group, "nursery_supported", lambda: False)  # so ranks are started in the same way
