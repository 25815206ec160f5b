"""The examiner: runs a lab's checks in this trusted process against a learner's code in a second one.

Here are the tests, the reference and the secret seed. The names the learner wrote are bound to proxies of the second
process, so results reach a check as data of exact types. Points need positive evidence: a check earns them when its
code ran to the end here. What died, hung or sent nonsense costs the check it happened in, and the next check gets a
fresh process.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import signal
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from grader.checks import secret_seed
from grader.codec import Malformed
from grader.intake import Submission, learner_cells
from grader.lab import Cell, Lab
from grader.launcher import Launcher, LearnerProcess
from grader.peer import LAB_MODULE, Peer
from grader.reference import Reference, run_cell
from grader.results import CheckResult, Result

MAX_SEEN = 4000  # characters of what a check printed, and of its message


@dataclass(frozen=True)
class Limits:
    """Seconds; generous, because they bound what hangs and not what is slow."""

    call: float = 20.0  # one call into the learner's code, in processor time; three times that in wall-clock time
    check: float = 180.0  # one check, in wall-clock time
    total: float = 600.0  # all checks of one submission, in wall-clock time


class Gone(BaseException):
    """The learner's process died, hung or broke the protocol. Not an Exception: no check may catch it."""

    def __init__(self, status: str, detail: str):
        super().__init__(detail)
        self.status, self.detail = status, detail


@dataclass
class Attempt:
    """One learner's process with the lab's cells run in it, and the namespace of the checks here."""

    process: LearnerProcess
    peer: Peer
    namespace: dict[str, Any]
    broken: dict[str, str] = field(default_factory=dict)  # learner's cell -> what went wrong in it

    def end(self) -> str:
        """End the process; returns what it printed last."""
        self.process.end()
        # The cells' functions and their globals refer to each other: without this a model that a lab loads stays in
        # memory until the garbage collector comes by, which counts objects and not bytes.
        self.namespace.clear()
        return clean(self.process.output())


def examine(
    lab: Lab, submission: Submission, launcher: Launcher, *, secret: bytes, limits: Limits | None = None
) -> Result:
    """Run all checks of `lab` on `submission`; every check has a result, whatever the submission does.

    secret: seeds the checks' randomness (`grader.checks`). Raises ConnectionError when no process can be started.
    """
    limits = limits or Limits()
    started = time.monotonic()
    result = Result(lab=lab.slug, points=lab.points, secret=secret.hex(), notes=list(submission.notes))
    attempt: Attempt | None = None
    failed_to_start: Gone | None = None
    try:
        with secret_seed(secret):
            for cell in lab.of_kind("check"):
                if failed_to_start is not None:
                    result.checks.append(_not_run(cell, failed_to_start))
                    continue
                if time.monotonic() - started > limits.total:
                    result.checks.append(
                        _not_run(cell, Gone("not run", f"all {limits.total:.0f} s were used up before"))
                    )
                    continue
                try:
                    attempt = attempt or _attempt(lab, submission, launcher, limits)
                except Gone as gone:
                    failed_to_start = gone
                    result.checks.append(_not_run(cell, gone))
                    continue
                check, alive = _run_check(lab, cell, attempt, limits)
                result.checks.append(check)
                if not alive:
                    result.printed = attempt.end()
                    attempt = None
            if attempt is not None:
                result.notes += [f"cell {name} stopped with an error" for name in attempt.broken]
    finally:
        if attempt is not None:
            result.printed = attempt.end()
    result.seconds = round(time.monotonic() - started, 3)
    return result


def _attempt(lab: Lab, submission: Submission, launcher: Launcher, limits: Limits) -> Attempt:
    """Fork a process, run the learner's cells there and the examiner's cells here. Raises Gone."""
    process = launcher.fork()

    def gone(error: Exception) -> BaseException:
        if isinstance(error, TimeoutError):
            return Gone("timed out", f"your code had not finished after {limits.call:.0f} s")
        if isinstance(error, Malformed):
            return Gone("crashed", f"your code's process sent what is not an answer ({error})")
        return Gone("crashed", "your code ended its process")

    peer = Peer(
        process.connection,
        strict=True,
        dataclasses_by_name=interface_dataclasses(),
        call_seconds=limits.call,
        gone=gone,
    )
    attempt = Attempt(process, peer, {})
    try:
        cells = learner_cells(lab, submission)
        outcomes = peer.request({"m": "cells"}, cells)
        attempt.broken = {name: str(text) for (_, name), text in zip(cells, outcomes, strict=True) if text is not None}
        found = peer.request({"m": "names"}, lab.graded_names)
        graded = {name: found.get(name, _Missing(name, attempt.broken)) for name in lab.graded_names}
        attempt.namespace = {"__name__": LAB_MODULE, "reference": Reference(lab)}
        attempt.namespace.update(graded)
        for cell in lab.cells:
            if cell.kind == "code" and cell.where in ("both", "examiner"):
                run_cell(cell.source, cell.grade_id, attempt.namespace)
                attempt.namespace.update(graded)
    except Gone:
        process.end()
        raise
    except BaseException as error:
        process.end()
        raise Gone("crashed", f"the cells before the checks failed: {type(error).__name__}: {error}") from error
    return attempt


def _run_check(lab: Lab, cell: Cell, attempt: Attempt, limits: Limits) -> tuple[CheckResult, bool]:
    """One check's result, and whether the learner's process can still be used."""
    started, printed, alive = time.monotonic(), io.StringIO(), True
    try:
        with contextlib.redirect_stdout(printed), _alarm(limits.check):
            run_cell(cell.source, cell.grade_id, attempt.namespace)
        status, message = "passed", ""
    except Gone as gone:
        status, message, alive = gone.status, gone.detail, False
    except BaseException as error:
        status, message = explain(error, cell)
        alive = not isinstance(error, (KeyboardInterrupt, SystemExit))
    check = check_result(cell, status, message, printed.getvalue(), time.monotonic() - started)
    return check, alive


def check_result(cell: Cell, status: str, message: str, seen: str = "", seconds: float = 0.0) -> CheckResult:
    """The result of one check; points are earned by the status `passed` and by nothing else."""
    return CheckResult(
        grade_id=cell.grade_id,
        points=cell.points,
        earned=cell.points if status == "passed" else 0.0,
        status=status,
        property=cell.property_text,
        message=clean(message)[:MAX_SEEN],
        hint="" if status == "passed" else cell.hint,
        seen=clean(seen)[:MAX_SEEN],
        seconds=round(seconds, 4),
    )


def clean(text: str) -> str:
    """Text of a learner without what no file or terminal should get: lone surrogates, control characters, and this
    machine's folders, which warnings of libraries name.
    """
    text = text.encode("utf-8", "replace").decode("utf-8")
    text = _folders().sub("", text)
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "", text)


@functools.cache
def _folders() -> re.Pattern[str]:
    """Matches the folders of Python, of the course and of the one who runs it, at the beginning of a path."""
    found = [*sys.path, *sysconfig.get_paths().values(), sys.prefix, sys.base_prefix, tempfile.gettempdir()]
    found += [os.getcwd(), os.path.expanduser("~"), os.path.dirname(os.path.dirname(os.path.abspath(__file__)))]
    absolute = {path.rstrip("/") for entry in found for path in (entry, os.path.realpath(entry)) if os.path.isabs(path)}
    longest_first = sorted(absolute - {""}, key=lambda path: (-len(path), path))
    return re.compile(rf"(?<![\w./-])(?:{'|'.join(map(re.escape, longest_first))})/")


def explain(error: BaseException, cell: Cell) -> tuple[str, str]:
    """Status and message for an exception that ended a check. Never shows the source of a check."""
    trace = getattr(error, "learner_traceback", "")
    if isinstance(error, NotImplementedError):
        cells = re.findall(r'File "<cell ([^>]+)>"', trace)
        return "not written", f"{cells[-1] if cells else 'a part that this check needs'} is not written yet"
    if isinstance(error, _NotDefined):
        return "failed", str(error)
    if trace:
        text = f"your code raised {error.learner_type}: {error}"  # type: ignore[attr-defined]
        return "failed", "\n".join(filter(None, [text, own_lines(trace)]))
    if isinstance(error, AssertionError):
        return "failed", str(error) or "the property does not hold"
    return "failed", f"the check could not use what your code gave it: {type(error).__name__}: {error}"


def own_lines(trace: str) -> str:
    """Of a traceback's text, the part from the learner's first own cell on: what is above is the call's machinery."""
    start = trace.find('  File "<cell ')
    return trace[start:].rstrip() if start >= 0 else ""


class _Missing:
    """Stands for a graded name that the learner's cells did not define."""

    def __init__(self, name: str, broken: dict[str, str]):
        self._text = "\n".join([f"{name} is not defined", *(f"cell {c}:\n{own_lines(t)}" for c, t in broken.items())])

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise _NotDefined(self._text)

    def __getattr__(self, attribute: str) -> Any:
        raise _NotDefined(self._text)


class _NotDefined(NameError):
    pass


def _not_run(cell: Cell, gone: Gone) -> CheckResult:
    return check_result(cell, gone.status, gone.detail)


@contextlib.contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """Raises Gone in the main thread after `seconds`: a check can hang in its own loop over endless short answers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(*_: Any) -> None:
        raise Gone("timed out", f"the check had not finished after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def interface_dataclasses() -> dict[str, type]:
    """The dataclasses of `reference_impl.interfaces` by name: the only classes whose instances cross as data."""
    import dataclasses
    import importlib

    try:
        module = importlib.import_module("reference_impl.interfaces")
    except ModuleNotFoundError:
        return {}
    return {n: c for n, c in vars(module).items() if isinstance(c, type) and dataclasses.is_dataclass(c)}
