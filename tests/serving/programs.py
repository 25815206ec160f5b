"""Processes of engines, and `inferlab serve`, in forks of a Python that has already imported what is not ours.

A process that stands for the fork (`tests/warm.py`) is the child of whoever starts it, has its id for those who wait
for it, and ends as it ends; who kills it kills the fork. Other signals, and who looks at what the process does, need
the fork itself: `Program` knows it, an engine that is stopped or watched is started cold.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from reference_impl.serving import process
from tests.warm import Warm

MODULES = ("torch", "numpy", "safetensors", "tokenizers", "prometheus_client", "fastapi", "uvicorn", "typer", "yaml")
ROOT = Path(__file__).parents[2]
StartBeside = Callable[[str], tuple[subprocess.Popen[bytes], socket.socket]]

# Packages are found where the process that starts an engine finds them.
_ENGINE = """
import os, runpy, sys
sys.path[:] = os.environ["PYTHONPATH"].split(os.pathsep)
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""

# `inferlab`, whose tries count for hours: on a busy machine three of them may take more than its 300 s.
_PROGRAM = f"""
import json, os, resource, sys
sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # pipes, and no files
print(os.getpid())
if number := os.environ.pop("MAX_FILES"):
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(number), int(number)))
sys.path.insert(0, {str(ROOT)!r})
from reference_impl.serving.supervision import Restarts
Restarts.__init__.__defaults__ = (3, 30_000.0, 1.0)
if command := json.loads(os.environ.pop("WARM_ENGINES")):
    from tests.serving import programs
    programs.start_engines_warm(command)
from grader.cli import main
main()
"""


def engines(warm: Warm) -> list[str]:
    """The command line that runs an engine's module, given as an argument; its socket is standard input."""
    return warm.command(("-c", _ENGINE))


def start_beside(command: list[str]) -> StartBeside:
    """In the place of the function of that name: as it, but warm."""

    def start(module: str) -> tuple[subprocess.Popen[bytes], socket.socket]:
        mine, theirs = socket.socketpair()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        with theirs:
            return subprocess.Popen([*command, module, "0"], stdin=theirs, env=environment), mine

    return start


def start_engines_warm(command: list[str]) -> None:
    """From now on, in this process."""
    process.start_beside = start_beside(command)  # type: ignore[assignment]


def run(warm: Warm, *words: str) -> subprocess.CompletedProcess[str]:
    """`inferlab *words`, which ends by itself and starts no engine."""
    return warm.run(("-c", _PROGRAM, *words), {**os.environ, "WARM_ENGINES": "null", "MAX_FILES": ""})


class Program:
    """`inferlab serve draft` on a free port, in a session of its own. cold_engine: started as it starts it.

    max_files: that it may have open.
    """

    def __init__(self, warm: Warm, *options: str, cold_engine: bool = False, max_files: int | None = None):
        self._stands_for_it = subprocess.Popen(
            warm.command(("-c", _PROGRAM, "serve", "draft", "--port", "0", *options)),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={
                **os.environ, "MAX_FILES": str(max_files or ""),
                "WARM_ENGINES": json.dumps(None if cold_engine else engines(warm)),
            },
        )  # fmt: skip
        assert self._stands_for_it.stdout is not None
        self.pid = int(self._stands_for_it.stdout.readline())
        self.url = self._stands_for_it.stdout.readline().split("/v1")[0]
        self.wait, self.communicate = self._stands_for_it.wait, self._stands_for_it.communicate

    @property
    def returncode(self) -> int | None:
        return self._stands_for_it.returncode

    def send_signal(self, number: int) -> None:
        if self._stands_for_it.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def end(self) -> None:
        self.kill()
        self.communicate()


@contextlib.contextmanager
def running(warm: Warm) -> Iterator[Callable[..., Program]]:
    """A function that starts a `Program`, with its arguments; they all end with the block."""
    started: list[Program] = []

    def start(*options: str, **more: Any) -> Program:
        started.append(Program(warm, *options, **more))
        return started[-1]

    yield start
    for program in started:
        program.end()
