"""One learner's process with the submission's cells run in it, seen from the examiner."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import re
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from grader.examination.kernel_source import in_cells, is_jitted
from grader.examination.kernels import Kernel
from grader.examination.submission import Submission, learner_cells
from grader.examination.verdict import Missing, clean
from grader.isolation.launcher import Launcher, LearnerProcess
from grader.isolation.sandbox import MEMORY
from grader.labs.lab import Lab
from grader.learner_side.codec import CannotCross, Malformed
from grader.learner_side.kernel_run import COMPILE_SECONDS
from grader.learner_side.peer import Peer, TooManyCalls

_OWN_FRAME = re.compile(r'File "<cell ([^>"]+)>", line (\d+) in (\S+)')  # the innermost is the first
_launching = threading.Lock()  # a launcher answers one at a time; the threads of several roles may ask at once


@dataclass(frozen=True)
class Limits:
    """Seconds and bytes; generous, because they bound what hangs and not what is slow."""

    call: float = 20.0  # one call into the learner's code, in processor time; three times that in wall-clock time
    calls: int = 50_000  # into one process in one check; the labs' own checks make 5,000 at most
    check: float = 180.0  # one check, or all cells before the checks, in wall-clock time
    total: float = 600.0  # all checks of one submission, in wall-clock time
    # One endless loop is often behind many checks, and others wait for this submission. What ends by itself needs a
    # second or two for a call, so these leave honest parts their points.
    later_call: float = 5.0  # as call, once a check of this submission has timed out
    lost: float = 30.0  # wall-clock time that checks may then still lose by timing out; after that,
    last_call: float = 1.0  # as call
    rest: float = 120.0  # as total: all checks after the first one that timed out
    # Bytes by which all that the learner's code sends, as results and in call-backs, may make the examiner's process
    # grow over all checks. Honest parts take 0.1 GiB; the largest message takes 0.75 GiB for a moment.
    memory: int = 1 << 30
    learner_memory: int = MEMORY  # bytes of one process of the learner's; all together have those of its disk besides


MUCH_PRINTED = 20  # MB
OWN_CALL = 10.0  # as Limits.call, for a learner's own check, which is run by hand; calls that return take less than one


class Gone(BaseException):
    """The learner's process died, hung or broke the protocol. Not an Exception: no check may catch it."""

    def __init__(self, status: str, detail: str, cell: str = ""):
        super().__init__(detail)
        self.status, self.detail = status, detail
        self.cell = cell  # the learner's cell with the code that did not return, where that is known
        self.printed = ""  # by a process that did not survive its start


class Lost(BaseException):
    """The sandbox was ended from outside, not by the submission, which has to be examined again."""


@dataclass
class Attempt:
    """A learner's process. graded: the names the learner writes, as proxies; broken: cell -> what went wrong in it."""

    process: LearnerProcess
    peer: Peer
    graded: dict[str, Any] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)
    namespace: dict[str, Any] = field(default_factory=dict)  # of the checks, here
    kernels: _KernelProcess | None = None  # for a lab whose learner writes kernels

    def interrupt(self) -> None:
        """Makes a call that waits for the process, in another thread, raise Gone."""
        with contextlib.suppress(OSError):
            self.process.connection.sock.shutdown(socket.SHUT_RDWR)

    def end(self) -> str:
        """Ends the process; returns what it printed last."""
        with _launching:
            self.process.end()
        if self.kernels is not None:
            self.kernels.end()
        # The cells' functions and their globals refer to each other: without this a model that a lab loads stays in
        # memory until the garbage collector runs, which counts objects and not bytes.
        self.namespace.clear()
        return clean(self.process.output())


def start(
    lab: Lab,
    submission: Submission,
    launcher: Launcher,
    limits: Limits,
    who: str = "",
    call_seconds: float | None = None,
    given: Sequence[tuple[str, str]] = (),
) -> Attempt:
    """Forks a process and runs the learner's cells in it. who: begins every message, "role 2: ". given: cells, (source,
    name), that are run before.

    call_seconds: like `limits.call`, for calls after the cells; those have what `limits` says.
    Raises Gone when the process does not survive that; errors in cells are in `broken`.
    """
    with _launching:
        process = launcher.fork(limits.learner_memory)
    doing, seconds = ["your code"], [limits.call]
    cells = [*given, *learner_cells(lab, submission)]

    def gone(error: Exception) -> BaseException:
        sources = {name: source for source, name in cells}
        return _gone(error, process, who, doing[0], seconds[0], sources)

    peer = Peer(
        process.connection,
        strict=True,
        dataclasses_by_name=interface_dataclasses(),
        call_seconds=limits.call,
        gone=gone,
    )
    attempt = Attempt(process, peer)
    stopped: dict[str, str] = {}  # as `broken`, by what a learner knows the cell by
    try:
        for source, name in cells:
            doing[0] = known_as(name, source)
            # One by one: each has the time of a call, and together they may be longer than a message.
            [error] = _list(peer.request({"m": "cells"}, [(source, name)]), gone)
            if error is not None:
                attempt.broken[name] = stopped[doing[0]] = str(error)
        doing[0] = "your code"
        peer.call_seconds = seconds[0] = limits.call if call_seconds is None else call_seconds
        peer.calls_left = limits.calls
        jitted = kernel_names(lab)
        for name in lab.graded_names:  # one by one: one that cannot cross must not cost the others
            attempt.graded[name] = _named(peer, name, stopped, gone, _magic(lab, submission, name))
        if jitted:
            attempt.kernels = _KernelProcess(launcher, limits, seconds[0], cells, who)
            find = in_cells(cells)
            for name in jitted:
                # Of a kernel the learner's process only tells whether its cell came that far; the source is graded.
                if find(name) and not isinstance(attempt.graded[name], Missing):
                    attempt.graded[name] = Kernel(name, find, attempt.kernels.request)
                else:
                    attempt.graded[name] = Missing(name, stopped)
    except CannotCross as error:
        attempt.end()
        raise Gone("crashed", f"{who}{doing[0]} is too long: {error}") from None
    except Gone as error:
        error.printed = attempt.end()
        raise
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


def known_as(name: str, source: str) -> str:
    """What a learner knows a cell by: its id in the lab, or, of a cell of their own, its first line."""
    if not name.startswith("added-"):
        return f"cell {name}"
    return f"your cell that begins with {(source.strip().splitlines() or [''])[0][:60]!r}"


class _KernelProcess:
    """The process in which a submission's kernels run: no cell of it runs there. It begins with the first launch."""

    def __init__(self, launcher: Launcher, limits: Limits, call_seconds: float, cells: list[tuple[str, str]], who: str):
        self._launcher, self._limits, self._call_seconds, self._who = launcher, limits, call_seconds, who
        self._sources = {name: source for source, name in cells}
        self._process: LearnerProcess | None = None
        self._peer: Peer | None = None

    def request(self, operation: str, payload: Any) -> Any:
        """One operation of `learner_side.learner`. Raises Gone, and what the kernel raises."""
        if self._peer is None:
            with _launching:
                process = self._process = self._launcher.fork(self._limits.learner_memory)
            doing = f"kernel {payload[1]}"

            def gone(error: Exception) -> BaseException:
                return _gone(error, process, self._who, doing, self._call_seconds, self._sources)

            self._peer = Peer(process.connection, strict=True, gone=gone)
        # The compiler is ours, has a limit of its own, and runs in a process whose time is not the kernel's.
        self._peer.call_seconds = 2 * COMPILE_SECONDS if operation == "compile" else self._call_seconds
        return self._peer.request({"m": operation}, payload)

    def end(self) -> None:
        if self._process is not None:
            with _launching:
                self._process.end()
        self._process = self._peer = None


def kernel_names(lab: Lab) -> set[str]:
    """The graded names that are Triton kernels: functions under `@triton.jit`, as the lab itself has them."""
    trees = [ast.parse(cell.source) for cell in lab.of_kind("solution")]
    return {node.name for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef) and is_jitted(node)}


def _magic(lab: Lab, submission: Submission, name: str) -> tuple[str, str]:
    """The cell that should define `name` and the line that makes it something else than Python; ("", "") for none."""
    for cell in lab.of_kind("solution"):
        first = submission.answers.get(cell.grade_id, "").lstrip().split("\n")[0]
        if name in cell.names and re.match(r"%%(?!(time|capture|prun)\b)", first):
            return cell.grade_id, first[:40]
    return "", ""


def _named(
    peer: Peer,
    name: str,
    broken: dict[str, str],
    gone: Callable[[Exception], BaseException],
    magic: tuple[str, str],
) -> Any:
    """What the learner's cells call `name`: a proxy, or what says that it is missing."""
    try:
        found = peer.request({"m": "names"}, [name])
    except Exception as error:
        if not hasattr(error, "learner_traceback"):
            raise
        return Missing(name, {**broken, name: f"{error}\n"})
    if type(found) is not dict:
        raise gone(Malformed("no names"))
    return found.get(name, Missing(name, broken, magic))


def _list(value: Any, gone: Any) -> list[Any]:
    if type(value) is not list or len(value) != 1:
        raise gone(Malformed("no list"))
    return value


def _gone(
    error: Exception, process: LearnerProcess, who: str, doing: str, seconds: float, sources: dict[str, str]
) -> BaseException:
    what = who + doing
    if isinstance(error, MemoryError):
        return Gone("crashed", f"{what} sent more than the examiner can hold")
    if isinstance(error, Malformed):
        return Gone("crashed", f"{what} sent what is not an answer ({error})")
    if isinstance(error, TooManyCalls):
        with _launching:
            process.end()
        return Gone("timed out", f"{what} had not come to an end after as many calls as one check may make")
    stack = process.stack() if isinstance(error, TimeoutError) else ""
    with _launching:
        ending = process.end()
    # Of several processes the kernel may have ended the others, and this one waits for them: memory is the reason.
    if ending.out_of_memory:
        return Gone("killed for memory", f"{what} used more memory than it may")
    if isinstance(error, TimeoutError):
        much = process.num_printed >> 20
        printed = f"; it had printed {much} MB, which takes time: print less" if much > MUCH_PRINTED else ""
        if found := _OWN_FRAME.search(stack):
            cell, line, function = found.group(1), int(found.group(2)), found.group(3)
            where = known_as(cell, sources.get(cell, ""))
            doing = where if function.startswith("<") else f"{function} ({where})"
            text = f"{who}{doing} had not finished after {seconds:g} s; it was at line {line}:"
            code = [*sources.get(cell, "").split("\n"), *[""] * line][line - 1]
            return Gone("timed out", f"{text}\n    {code.strip()}{printed}", cell)
        return Gone("timed out", f"{what} had not finished after {seconds:g} s{printed}")
    if ending.lost:
        return Lost("the sandbox was ended from outside")
    return Gone("crashed", f"{what} ended its process")


def interface_dataclasses() -> dict[str, type]:
    """The dataclasses of `reference_impl.interfaces` by name: the only classes whose instances cross as data."""
    from reference_impl import interfaces

    return {n: c for n, c in vars(interfaces).items() if isinstance(c, type) and dataclasses.is_dataclass(c)}
