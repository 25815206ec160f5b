"""Chat templates are rendered in a process of their own, within limits of processor time and memory.

A chat template comes with a model's weights, from anywhere, and may loop forever. The process is started for the first
template, serves its model's conversations, and is replaced when a template used up its limits: the engine goes on. The
limit is processor time, not time on the clock: a busy machine refuses nothing that an idle one takes.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pickle
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

SECONDS = 5.0  # of processor time; 1,000 messages of 800 characters take some hundredths
MEMORY = 1 << 30  # bytes of addresses
_ROOT = Path(__file__).parents[3]


class ChatTemplateError(ValueError):
    """A template that cannot be read or rendered, or refuses a conversation: which one, the line, and why."""


class TooLong(Exception):
    """Raised in the process that renders, when the time is up."""


class Renderer:
    """The rendering process of one model. seconds: the limit of processor time for one template and conversation."""

    def __init__(self, seconds: float = SECONDS):
        self.seconds = seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def render(self, source: str, variables: Mapping[str, Any], where: str) -> str:
        """The text that a chat template makes. where: what errors call it. Raises ChatTemplateError."""
        return str(self._ask("render", where, source, variables, where))

    def check(self, source: str, where: str) -> None:
        """Raises ChatTemplateError if the source is not a Jinja template. where: what errors call it."""
        self._ask("check", where, source, where)

    def reads_parts(self, source: str, where: str) -> bool:
        """Whether the template can take a list of parts as a message's content."""
        return bool(self._ask("reads_parts", where, source, where))

    def _ask(self, function: str, where: str, *arguments: Any) -> Any:
        with self._lock:
            process = self._running()
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                with contextlib.suppress(BrokenPipeError):
                    pickle.dump((function, arguments, self.seconds), process.stdin)
                    process.stdin.flush()
                line = process.stdout.readline()  # JSON: nothing of a template's choosing is unpickled
            except BaseException:  # Ctrl-C: the next answer would be to this question
                self._end(process)
                raise
            if not line.endswith(b"\n"):
                process.wait()  # it has closed its end
                status = self._end(process)
                why = _too_long(self.seconds) if status == -signal.SIGXCPU else f"ends its process: status {status}"
                raise ChatTemplateError(f"{where}: the chat template {why}")
        answer = json.loads(line)
        if "error" in answer:
            raise ChatTemplateError(answer["error"])
        return answer["found"]

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", f"from {__name__} import main; main()"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            )  # fmt: skip
            weakref.finalize(self, _end, self._process)
        return self._process

    def _end(self, process: subprocess.Popen[bytes]) -> int:
        self._process = None
        return _end(process)


def _end(process: subprocess.Popen[bytes]) -> int:
    process.kill()
    with contextlib.suppress(BrokenPipeError):
        process.communicate()
    return process.wait()


def _too_long(seconds: float) -> str:
    return f"does not end within {seconds:g} s of processor time, which is the limit"


def main() -> None:
    """Runs the process: answers one question after another, until its input ends."""
    import resource

    from reference_impl.features.chat import sandbox

    seconds = 0.0

    def stop(number: int, frame: object) -> None:
        raise TooLong(f"the chat template {_too_long(seconds)}")

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the engine's to handle
    signal.signal(signal.SIGPROF, stop)
    for limit, value in ((resource.RLIMIT_AS, MEMORY), (resource.RLIMIT_CORE, 0)):
        with contextlib.suppress(ValueError, OSError):  # a system without it, or one that allows less
            resource.setrlimit(limit, (value, value))
    functions: dict[str, Callable[..., Any]] = {
        "render": sandbox.render, "check": sandbox.check, "reads_parts": sandbox.reads_parts,
    }  # fmt: skip
    while True:
        try:
            function, arguments, seconds = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        # Python's own code is stopped with an error that names the line; a long operation in C ends the process.
        used = resource.getrusage(resource.RUSAGE_SELF)
        until, most = math.ceil(used.ru_utime + used.ru_stime + seconds) + 1, resource.getrlimit(resource.RLIMIT_CPU)[1]
        resource.setrlimit(resource.RLIMIT_CPU, (until if most == resource.RLIM_INFINITY else min(until, most), most))
        try:
            signal.setitimer(signal.ITIMER_PROF, seconds, seconds)  # again, where something has caught it
            try:
                answer = {"found": functions[function](*arguments)}
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
            line = json.dumps(answer)
        except ChatTemplateError as error:
            line = json.dumps({"error": str(error)})
        except (TooLong, MemoryError) as error:  # while an error was made of another, or its text was sent
            why = str(error) or "the chat template makes too much: MemoryError"
            line = json.dumps({"error": f"{arguments[-1]}: {why}"})
        print(line, flush=True)
