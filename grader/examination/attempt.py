"""One learner's process with the submission's cells run in it, seen from the examiner."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import re
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from grader.examination.intake import Submission, learner_cells
from grader.examination.verdict import Missing, clean
from grader.isolation.launcher import Launcher, LearnerProcess
from grader.isolation.sandbox import MEMORY
from grader.labs.lab import Lab
from grader.learner_side.codec import CannotCross, Malformed
from grader.learner_side.peer import Peer

_OWN_FRAME = re.compile(r'File "<cell ([^>"]+)>", line (\d+) in (\S+)')  # the innermost is the first
_launching = threading.Lock()  # a launcher answers one at a time; the threads of several roles may ask at once


@dataclass(frozen=True)
class Limits:
    """Seconds and bytes; generous, because they bound what hangs and not what is slow."""

    call: float = 20.0  # one call into the learner's code, in processor time; three times that in wall-clock time
    later_call: float = 5.0  # the same, once a call of this submission has timed out: others wait for it
    check: float = 180.0  # one check, or all cells before the checks, in wall-clock time
    total: float = 600.0  # all checks of one submission, in wall-clock time
    memory: int = 4 << 30  # bytes by which results of the learner's code may make the examiner's process grow
    learner_memory: int = MEMORY  # bytes of one process of the learner's; all together have those of its disk besides


OWN_CALL = 10.0  # as Limits.call, for a learner's own check, which is run by hand; calls that return take less than one


class Gone(BaseException):
    """The learner's process died, hung or broke the protocol. Not an Exception: no check may catch it."""

    def __init__(self, status: str, detail: str, cell: str = ""):
        super().__init__(detail)
        self.status, self.detail = status, detail
        self.cell = cell  # the learner's cell with the code that did not return, where that is known


class Lost(BaseException):
    """The sandbox was ended from outside, not by the submission, which has to be examined again."""


@dataclass
class Attempt:
    """A learner's process. graded: the names the learner writes, as proxies; broken: cell -> what went wrong in it."""

    process: LearnerProcess
    graded: dict[str, Any] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)
    namespace: dict[str, Any] = field(default_factory=dict)  # of the checks, here

    def interrupt(self) -> None:
        """Make a call that waits for the process, in another thread, raise Gone."""
        with contextlib.suppress(OSError):
            self.process.connection.sock.shutdown(socket.SHUT_RDWR)

    def end(self) -> str:
        """End the process; returns what it printed last."""
        with _launching:
            self.process.end()
        # The cells' functions and their globals refer to each other: without this a model that a lab loads stays in
        # memory until the garbage collector runs, which counts objects and not bytes.
        self.namespace.clear()
        return clean(self.process.output())


def start(lab: Lab, submission: Submission, launcher: Launcher, limits: Limits, who: str = "") -> Attempt:
    """Fork a process and run the learner's cells in it. who: begins every message, "role 2: ".

    Raises Gone when the process does not survive that; errors in cells are in `broken`.
    """
    with _launching:
        process = launcher.fork(limits.learner_memory)
    attempt, doing = Attempt(process), ["your code"]

    cells = learner_cells(lab, submission)

    def gone(error: Exception) -> BaseException:
        return _gone(error, process, who, doing[0], limits, {name: source for source, name in cells})

    peer = Peer(
        process.connection,
        strict=True,
        dataclasses_by_name=interface_dataclasses(),
        call_seconds=limits.call,
        gone=gone,
    )
    try:
        for source, name in cells:
            doing[0] = f"cell {name}"
            # One by one: each has the time of a call, and together they may be longer than a message.
            [error] = _list(peer.request({"m": "cells"}, [(source, name)]), gone)
            if error is not None:
                attempt.broken[name] = str(error)
        doing[0] = "your code"
        for name in lab.graded_names:  # one by one: one that cannot cross must not cost the others
            attempt.graded[name] = _named(peer, name, attempt.broken, gone)
    except CannotCross as error:
        attempt.end()
        raise Gone("crashed", f"{who}{doing[0]} is too long: {error}") from None
    except Exception as error:
        attempt.end()
        if not hasattr(error, "learner_traceback"):
            raise
        # Our own code answers these requests there; only code that has taken its place sends an exception.
        raise Gone("crashed", f"{who}{doing[0]} sent what is not an answer") from None
    except BaseException:
        attempt.end()
        raise
    return attempt


def _named(peer: Peer, name: str, broken: dict[str, str], gone: Callable[[Exception], BaseException]) -> Any:
    """What the learner's cells call `name`: a proxy, or what says that it is missing."""
    try:
        found = peer.request({"m": "names"}, [name])
    except Exception as error:
        if not hasattr(error, "learner_traceback"):
            raise
        return Missing(name, {**broken, name: f"{error}\n"})
    if type(found) is not dict:
        raise gone(Malformed("no names"))
    return found.get(name, Missing(name, broken))


def _list(value: Any, gone: Any) -> list[Any]:
    if type(value) is not list or len(value) != 1:
        raise gone(Malformed("no list"))
    return value


def _gone(
    error: Exception, process: LearnerProcess, who: str, doing: str, limits: Limits, sources: dict[str, str]
) -> BaseException:
    what = who + doing
    if isinstance(error, MemoryError):
        return Gone("crashed", f"{what} sent more than the examiner can hold")
    if isinstance(error, Malformed):
        return Gone("crashed", f"{what} sent what is not an answer ({error})")
    stack = process.stack() if isinstance(error, TimeoutError) else ""
    with _launching:
        ending = process.end()
    # Of several processes the kernel may have ended the others, and this one waits for them: memory is the reason.
    if ending.out_of_memory:
        return Gone("killed for memory", f"{what} used more memory than it may")
    if isinstance(error, TimeoutError):
        if found := _OWN_FRAME.search(stack):
            cell, line, function = found.group(1), int(found.group(2)), found.group(3)
            doing = f"cell {cell}" if function.startswith("<") else f"{function} (cell {cell})"
            text = f"{who}{doing} had not finished after {limits.call:g} s; it was at line {line}:"
            code = [*sources.get(cell, "").split("\n"), *[""] * line][line - 1]
            return Gone("timed out", f"{text}\n    {code.strip()}", cell)
        return Gone("timed out", f"{what} had not finished after {limits.call:g} s")
    if ending.lost:
        return Lost("the sandbox was ended from outside")
    return Gone("crashed", f"{what} ended its process")


def interface_dataclasses() -> dict[str, type]:
    """The dataclasses of `reference_impl.interfaces` by name: the only classes whose instances cross as data."""
    try:
        module = importlib.import_module("reference_impl.interfaces")
    except ModuleNotFoundError:
        return {}
    return {n: c for n, c in vars(module).items() if isinstance(c, type) and dataclasses.is_dataclass(c)}
