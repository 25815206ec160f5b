"""The examiner: runs a lab's checks in this trusted process against a learner's code in a second one.

Here are the tests, the reference and the secret seed. The names the learner wrote are bound to proxies of the second
process, so results reach a check as data of exact types. Points need positive evidence: a check earns them when its
code ran to the end here. What died, hung or sent nonsense costs the check it happened in, and the next check gets a
fresh process.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from grader.checks import secret_seed
from grader.examination.attempt import Attempt, Gone, Limits, Lost, interface_dataclasses, known_as, start
from grader.examination.flags import flags
from grader.examination.needed import needed_cells
from grader.examination.own_process import CELL, hash_of_role
from grader.examination.reference import Reference, run_cell
from grader.examination.roles import roles_from
from grader.examination.submission import Submission, learner_cells
from grader.examination.verdict import MAX_SEEN, check_result, clean, explain
from grader.examination.written import texts_in
from grader.isolation.launcher import Launcher
from grader.labs.lab import Cell, Lab, defined_names
from grader.learner_side.peer import LAB_MODULE
from grader.results.result import CheckResult, Result

__all__ = ["Gone", "Limits", "check_result", "clean", "examine", "explain", "interface_dataclasses", "prepare"]

RING_AGAIN = 5.0  # seconds: an exception that a signal raised may be lost in a place that swallows all
MAX_PRINTED = 64 << 10


def prepare(lab: Lab, secret: bytes) -> dict[str, Any] | None:
    """The checks' namespace with the examiner's cells run in it, for `examine(prepared=...)` in forks of this process.

    None for a lab whose cells need the learner's names, or fail: each attempt then runs them itself and says what is
    wrong. Functions find the learner's names when they are called, as these are bound in the same namespace later. A
    function cached without arguments gives one value, so it is called here: a model is loaded once for all.
    """
    namespace = _fresh(lab)
    with secret_seed(secret):
        try:
            for cell in _examiner_cells(lab):
                run_cell(cell.source, cell.grade_id, namespace)
                for name in lab.graded_names:
                    namespace.pop(name, None)  # each attempt binds the learner's after every cell
        except Exception:
            return None
        for value in list(namespace.values()):
            if isinstance(value, functools._lru_cache_wrapper) and not inspect.signature(value).parameters:
                with contextlib.suppress(Exception):
                    value()
    return namespace


def examine(
    lab: Lab,
    submission: Submission,
    launcher: Launcher,
    *,
    secret: bytes,
    limits: Limits | None = None,
    prepared: dict[str, Any] | None = None,
    on_check: Callable[[CheckResult], None] = lambda check: None,
    on_start: Callable[[Cell], None] = lambda cell: None,
    skip_hung: bool = False,
) -> Result:
    """Run all checks of `lab` on `submission`; every check has a result, whatever the submission does.

    secret: seeds the checks' randomness (`grader.checks`). prepared: from `prepare(lab, secret)`, and used up: give it
    to one call only, in a fork. on_check: called with each check's result at once, as this process may be killed.
    on_start: called before each check. skip_hung: what did not return once is not called again; checks that need it
    are not run. For a learner's own check, run by hand; in a grade every check is run.
    Raises ConnectionError, SandboxError when no process can be started, `attempt.Lost`, KeyboardInterrupt.
    """
    started = time.monotonic()
    examination = _Examination(lab, submission, launcher, limits or Limits(), prepared, skip_hung)
    result = Result(lab=lab.slug, points=lab.points, secret=secret.hex(), notes=list(submission.notes))
    result.flags = flags(lab, submission)
    try:
        with secret_seed(secret), roles_from(examination), _bounded_memory(examination.limits.memory):
            for cell in lab.of_kind("check"):
                on_start(cell)
                result.checks.append(examination.check(cell, time.monotonic() - started))
                on_check(result.checks[-1])
        result.notes += [_stopped_note(submission, name, text) for name, text in examination.broken.items()]
    finally:
        examination.end()
    result.printed = "\n".join(filter(None, examination.printed))[-MAX_PRINTED:]
    result.seconds = round(time.monotonic() - started, 3)
    return result


def _stopped_note(submission: Submission, name: str, text: str) -> str:
    """Which cell stopped, by its first line where it is the learner's own, and with what: a traceback's last line."""
    number = name.removeprefix("added-")
    cell = known_as(name, "" if number == name else submission.added[int(number)].source)
    return f"{cell} stopped with an error: {text.strip().splitlines()[-1][:200] if text.strip() else 'unknown'}"


def milestone(lab: Lab, submission: Submission, launcher: Launcher, *, secret: bytes) -> str:
    """What the lab's cell for "milestone" prints: a text that the engine served with the learner's parts.

    For a submission whose checks all passed; it earns nothing. "" for a lab without one. Where it fails, why.
    """
    cells = [cell for cell in lab.of_kind("code") if cell.where == "milestone"]
    if not cells:
        return ""
    examination, printed = _Examination(lab, submission, launcher, Limits(), None), io.StringIO()
    try:
        with secret_seed(secret), roles_from(examination), _bounded_memory(examination.limits.memory):
            for cell in cells:
                namespace = examination.open_namespace()
                with contextlib.redirect_stdout(printed), _alarm(examination.limits.check, "the milestone"):
                    run_cell(cell.source, cell.grade_id, namespace)
    except (KeyboardInterrupt, Lost):
        raise
    except BaseException as error:
        return f"All checks passed, and the milestone did not run: {type(error).__name__}: {clean(str(error))}"
    finally:
        examination.end()
    return clean(printed.getvalue())


class _Examination:
    """The processes of one submission: one for its checks, renewed when it is gone, and those of a check's roles."""

    def __init__(
        self,
        lab: Lab,
        submission: Submission,
        launcher: Launcher,
        limits: Limits,
        prepared: dict[str, Any] | None,
        skip_hung: bool = False,
    ):
        self.lab, self.submission, self.launcher, self.limits = lab, submission, launcher, limits
        self.broken: dict[str, str] = {}
        self.printed = [""]  # by the last process, then by the last roles
        self._prepared = prepared
        self._attempt: Attempt | None = None
        self._roles: list[Attempt] = []
        self._failed: Gone | None = None
        self._skip_hung = skip_hung
        self._hung: set[str] = set()  # the learner's cells with code that did not return
        self._lost: float | None = None  # seconds in checks that timed out, after the first of them
        self._call_seconds = limits.call

    def check(self, cell: Cell, spent: float) -> CheckResult:
        """One check's result. spent: seconds since the first one began."""
        if self._failed is not None:
            return check_result(cell, self._failed.status, self._failed.detail)
        if spent > self.limits.total:
            which = f"all {self.limits.total:.0f} s" if self._lost is None else "the time left after one had hung"
            return check_result(cell, "not run", f"{which} was used up by the checks before")
        if waits_for := sorted(self._hung and self._hung & needed_cells(self.lab, self.submission, cell)):
            return check_result(cell, "not run", f"it needs {', '.join(waits_for)}, which did not return before")
        try:
            attempt = self._attempt = self._attempt or self._start()
        except Gone as failed:
            self._failed, self.printed[:1] = failed, [failed.printed]
            return check_result(cell, failed.status, failed.detail)
        attempt.peer.calls_left = self.limits.calls
        result, alive, gone = _run_check(cell, attempt.namespace, self.limits)
        if not alive:
            self.end()
        if self._skip_hung and gone is not None and gone.status == "timed out" and gone.cell:
            self._hung.add(gone.cell)
        if result.status == "timed out":
            self._less_time(spent, result.seconds)
        return result

    def _less_time(self, spent: float, lost: float) -> None:
        """Shortens the limits of this submission after a check that timed out. spent: seconds before it; lost: in
        it."""
        limits = self.limits
        if self._lost is None:
            self._lost = 0.0
            total = min(limits.total, spent + lost + limits.rest)
            self.limits = replace(limits, call=min(limits.call, limits.later_call), total=total)
        else:
            self._lost += lost
        last = self._lost > limits.lost
        self._call_seconds = min(self.limits.call, limits.last_call) if last else self.limits.call

    def open_namespace(self) -> dict[str, Any]:
        """The namespace in which cells run, with the learner's parts in it. Raises Gone."""
        attempt = self._attempt = self._attempt or self._start()
        return attempt.namespace

    def _start(self) -> Attempt:
        """Starts a process with the learner's cells run in it, and runs the examiner's cells here. Raises Gone."""
        with _alarm(self.limits.check, "the cells before the checks"):
            attempt = start(self.lab, self.submission, self.launcher, self.limits, call_seconds=self._call_seconds)
            try:
                self.broken = attempt.broken
                namespace, self._prepared = self._prepared, None
                attempt.namespace = _fresh(self.lab) if namespace is None else namespace
                attempt.namespace.update(attempt.graded)
                for cell in _examiner_cells(self.lab) if namespace is None else ():
                    run_cell(cell.source, cell.grade_id, attempt.namespace)
                    attempt.namespace.update(attempt.graded)
            except Exception as error:
                attempt.end()
                status = "crashed" if hasattr(error, "learner_traceback") else "machinery"
                raise Gone(status, f"the cells before the checks failed: {type(error).__name__}: {error}") from error
            except BaseException:
                attempt.end()
                raise
        return attempt

    @contextlib.contextmanager
    def open(self, num_roles: int) -> Iterator[list[dict[str, Any]]]:
        """The graded names of as many new processes as there are roles, for `checks.roles`; they end with the block."""
        first = len(self._roles)
        try:
            for role in range(num_roles):
                who, given = f"role {role}: ", [(hash_of_role(role), CELL)]
                self._roles.append(
                    start(self.lab, self.submission, self.launcher, self.limits, who, self._call_seconds, given)
                )
            yield [attempt.graded for attempt in self._roles[first:]]
        finally:
            self._end_roles(first)

    def interrupt(self) -> None:
        """Ends the calls of roles in other threads, for `checks.together`."""
        for attempt in self._roles:
            attempt.interrupt()

    def texts(self, name: str) -> list[str]:
        """The texts in the learner's code, for `checks.texts_of`: those of the cell that defines `name` first."""
        cells = [source for source, _ in learner_cells(self.lab, self.submission)]
        return texts_in(sorted(cells, key=lambda source: name not in defined_names(source)))

    def _end_roles(self, first: int = 0) -> None:
        ending, self._roles = self._roles[first:], self._roles[:first]
        if ending:
            texts = [(role, attempt.end().strip()) for role, attempt in enumerate(ending)]
            self.printed[1:] = [f"role {role}: {text}" for role, text in texts if text]

    def end(self) -> None:
        """Ends all processes."""
        self._end_roles()
        if self._attempt is not None:
            self.printed[:1] = [self._attempt.end()]
            self._attempt = None


def _examiner_cells(lab: Lab) -> list[Cell]:
    return [cell for cell in lab.of_kind("code") if cell.where in ("both", "examiner")]


def _fresh(lab: Lab) -> dict[str, Any]:
    return {"__name__": LAB_MODULE, "reference": Reference(lab)}


def _run_check(cell: Cell, namespace: dict[str, Any], limits: Limits) -> tuple[CheckResult, bool, Gone | None]:
    """One check's result, whether the learner's process can still be used, and if not, how it went."""
    started, printed, alive = time.monotonic(), _Beginning(), True
    how: Gone | None = None
    try:
        with contextlib.redirect_stdout(printed), _alarm(limits.check, "the check"):
            run_cell(cell.source, cell.grade_id, namespace)
        status, message = "passed", ""
    except Gone as gone:
        status, message, alive, how = gone.status, gone.detail, False, gone
    except (KeyboardInterrupt, Lost):
        raise  # from the user at this machine: no learner's code can send one
    except BaseException as error:
        status, message = explain(error, cell)
        alive = isinstance(error, Exception)
    return check_result(cell, status, message, printed.getvalue(), time.monotonic() - started), alive, how


class _Beginning(io.StringIO):
    """Keeps the first characters only: a check may print what a learner's code sent, again and again."""

    def write(self, text: str) -> int:
        super().write(text[: max(0, 4 * MAX_SEEN - self.tell())])
        return len(text)


@contextlib.contextmanager
def _alarm(seconds: float, what: str) -> Iterator[None]:
    """Raises Gone in the main thread after `seconds`: a check can hang in its own loop over endless short answers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    over = threading.Event()

    def ring(*_: Any) -> None:
        if not over.is_set():
            raise Gone("timed out", f"{what} had not finished after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds, RING_AGAIN)
    try:
        try:
            yield
        finally:
            over.set()
    finally:  # reached even when it rang in the line above
        over.set()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def _bounded_memory(more: int) -> Iterator[None]:
    """Lets this process grow by `more` bytes; beyond, allocations fail with an exception that costs the check.

    Without this a check that collects what a learner's code yields without end takes the whole machine. Only on Linux,
    and not where CUDA is in use: it maps far more than it takes.
    """
    import torch

    used = _data_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    infinity = resource.RLIM_INFINITY
    limit = min([used + more, *(bound for bound in (soft, hard) if bound != infinity)])
    if not used or torch.cuda.is_initialized():
        yield
        return
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _data_bytes() -> int:
    """What counts against RLIMIT_DATA in this process now; 0 where the system does not say."""
    with contextlib.suppress(OSError, ValueError, StopIteration), open("/proc/self/status") as status:
        return int(next(line for line in status if line.startswith("VmData")).split()[1]) << 10
    return 0
