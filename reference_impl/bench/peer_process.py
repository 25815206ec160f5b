"""Another program in a process and an environment of its own; nothing of it is imported here.

The environment is the user's: a virtual environment, named by a variable. There this file is run as a program, which
imports nothing of this project: it answers requests, a line of JSON each: {"do": name, ...} on its stdin, {"result":
...} or {"error": ...} on its stdout. What can be asked says the worker beside the bench, a file with a table CALLS.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing import Self  # the other environment may have an older Python


class PeerFailed(Exception):
    """There is nothing to compare with, or it refused, or its process ended: why."""


class PeerProcess:
    """A context manager, which ends the process. name: of the program, for errors."""

    def __init__(self, name: str, python: str | Path, worker: Path):
        self.name = name
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the process)
        command = [str(python), "-I", __file__, str(worker)]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said, text=True, encoding="utf-8"
        )
        assert process.stdin is not None
        assert process.stdout is not None
        self._process, self._to, self._from = process, process.stdin, process.stdout

    @classmethod
    def started(cls, name: str, variable: str, worker: Path) -> tuple[Self, dict[str, str]]:
        """The process, in the environment that the variable names, and its versions. Raises PeerFailed if there is
        none, or if it lacks a package."""
        peer = cls(name, interpreter(variable, name), worker)
        try:
            return peer, peer.ask("versions")
        except PeerFailed:
            peer.__exit__()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        with contextlib.suppress(BrokenPipeError):  # of a request that an ended process did not read
            self._to.close()
        self._process.wait()
        self._from.close()
        self._said.close()

    def ask(self, do: str, **what: Any) -> Any:
        """The answer of the process. Raises PeerFailed, with what it said, if it refuses or has ended."""
        try:
            self._to.write(json.dumps({"do": do, **what}) + "\n")
            self._to.flush()
            line = self._from.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            ended = self._process.wait()
            raise PeerFailed(f"{self.name}: {do}: its process ended with {ended}: {self._last_words()}")
        answer = json.loads(line)
        if "error" in answer:
            raise PeerFailed(f"{self.name}: {do}: {answer['error']}")
        return answer["result"]

    def _last_words(self) -> str:
        self._said.seek(0)
        return self._said.read().decode(errors="replace")[-500:].strip()


def interpreter(variable: str, name: str) -> Path:
    """The interpreter of the virtual environment that the variable names. Raises PeerFailed where there is none."""
    folder = os.environ.get(variable)
    if not folder:
        raise PeerFailed(f"{variable} names no environment with {name}")
    candidates = [Path(folder).expanduser() / name for name in ("bin/python", "Scripts/python.exe")]
    for python in candidates:
        if python.is_file():
            return python
    raise PeerFailed(f"{variable}: expected a virtual environment, with bin/python, got {folder}")


def answer(calls: dict[str, Any], line: str) -> dict[str, Any]:
    try:
        asked = json.loads(line)
        return {"result": calls[asked.pop("do")](**asked)}
    except Exception as error:  # the caller is told, and the next request is answered
        return {"error": f"{type(error).__name__}: {error}"}


def main() -> None:
    """Runs the other process."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints is no answer
    calls = runpy.run_path(sys.argv[1])["CALLS"]
    for line in sys.stdin:
        answers.write(json.dumps(answer(calls, line)) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
