"""A lab's check cells in a notebook: what each found is shown below it, and a loop without end is ended.

A check is an ordinary cell, whose asserts raise. `install` asks IPython to call us before and after each cell: for a
check a panel is shown in place of a traceback, the try is counted, and while it runs a thread watches. When a call into
the learner's code has not returned after the time that a grader gives it, the thread says where it is and interrupts it
as the button in JupyterLab does. A cell that is no check is left alone.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any

from grader.examination.attempt import OWN_CALL, Limits
from grader.examination.verdict import check_result, explain
from grader.labs.lab import Cell, Lab, LabError, comment_text, defined_names
from grader.notebook import bare, executed_cells, known_labs, submission_from_history
from grader.results.result import CheckResult
from grader.study import lab_hints, lab_tries
from grader.study.check_view import Shown, check_html, check_text, running_html, running_text

SHOWN_AFTER = 3.0  # seconds; a check that takes longer is said to be running
PATIENCE = 3  # a call may take so many times its limit where the machine gives it no processor
LOOK_EVERY = 0.2
STOP_EVERY = 2.0

_checks: NotebookChecks | None = None


def install() -> None:
    """Begin, in this kernel; again does nothing. Outside a notebook nothing happens."""
    global _checks
    try:
        from IPython import get_ipython
    except ModuleNotFoundError:
        return
    shell = get_ipython()
    if shell is None or _checks is not None:
        return
    _checks = NotebookChecks(shell, known_labs())
    shell.events.register("pre_run_cell", _checks.before)
    shell.events.register("post_run_cell", _checks.after)
    shell.set_custom_exc((BaseException,), _checks.caught)


def print_hint(wanted: str = "") -> None:
    """Prints the next hint, for `grader.hint()`. Raises LabError."""
    if _checks is None:
        install()
    if _checks is None:
        raise LabError("grader.hint() works inside a notebook; in a terminal: inferlab lab hint 02 check_append")
    lab, check = _checks.meant(wanted)
    print(lab_hints.next_hint(lab, check))


@dataclass(frozen=True)
class Hung:
    """The place where the learner's code was when its time was over. source: that of its cell."""

    function: str
    source: str
    line: int
    seconds: float

    @property
    def text(self) -> str:
        code = [*self.source.split("\n"), *[""] * self.line][self.line - 1].strip()
        return f"{self.function} had not finished after {self.seconds:g} s; it was at line {self.line}:\n    {code}"


class NotebookChecks:
    """The hooks of one kernel."""

    def __init__(self, shell: Any, labs: list[Lab]):
        self.shell, self.labs = shell, labs
        self.known = {bare(cell.source): (lab, cell) for lab in labs for cell in lab.of_kind("check")}
        self.given = {bare(cell.source) for lab in labs for cell in lab.cells if cell.kind != "solution"}
        self.last: tuple[Lab, str] | None = None  # the last check that did not pass
        self.hung: set[str] = set()  # the sources of cells that did not return
        self.running: tuple[Lab | None, Cell] | None = None
        self.watch: Watch | None = None
        self.failure: BaseException | None = None

    def before(self, info: Any) -> None:
        self.running, self.failure = None, None
        source = str(info.raw_cell or "")
        if not comment_text(source, "property"):
            return
        lab, cell = self.known.get(bare(source), (None, None))
        if cell is None:  # edited, or of another course: its name is its id, its points are not known
            name = str(getattr(info, "cell_id", None) or "this check")
            lab, cell = None, Cell(name, "check", source)
        self.running = (lab, cell)
        self.watch = Watch(self, cell.grade_id)
        self.watch.start()

    def caught(self, shell: Any, kind: type, error: BaseException, trace: TracebackType, tb_offset: Any = None) -> None:
        """Handles an exception that ended a cell. IPython has marked the cell as failed, so that "Run All" stops
        here."""
        if self.running is None or (isinstance(error, KeyboardInterrupt) and not (self.watch and self.watch.hung)):
            shell.showtraceback((kind, error, trace), tb_offset=tb_offset, running_compiled_code=True)
            return
        self.failure = error

    def after(self, result: Any) -> None:
        if self.running is None or self.watch is None:
            return
        (lab, cell), watch, self.running, self.watch = self.running, self.watch, None, None
        watch.end()
        if result.success:
            watch.show_last(_passed(cell))
        elif self.failure is not None:
            found = self._result(cell, self.failure, watch.hung)
            if watch.hung is not None:
                self.hung.add(watch.hung.source)
            watch.show_last(self._not_passed(lab, cell, found))
        elif watch.handle is not None:
            watch.show_last(Shown("", ""))

    def _result(self, cell: Cell, error: BaseException, hung: Hung | None) -> CheckResult:
        if hung is not None:
            return check_result(cell, "timed out", hung.text)
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        if own := [self.place(f) for f in frames if self.is_learners(f)]:
            lines = zip(_line_numbers(error, self), own, strict=True)
            text = "".join(
                f'  File "<cell {name}>", line {number}, in {function}\n    {_line(source, number)}\n'
                for number, (name, function, source) in lines
            )
            with contextlib.suppress(AttributeError, TypeError):  # an exception of a class that takes no attributes
                error.learner_traceback, error.learner_type = text, type(error).__name__  # type: ignore[attr-defined]
        elif isinstance(error, NameError) and error.name:
            return check_result(
                cell, "not run", f"{error.name} is not defined: run the cells above, then this one again"
            )
        status, message = explain(error, cell)
        if own and status == "failed" and message.startswith("your code raised"):
            message = message.replace("  File ", "").replace('"<cell ', "cell ").replace('>", line', ", line")
        return check_result(cell, status, message)

    def _not_passed(self, lab: Lab | None, cell: Cell, found: CheckResult) -> Shown:
        steps: list[lab_hints.Step] = []
        problem = ""
        if lab is not None:
            self.last = (lab, cell.grade_id)
            try:
                if found.status not in ("not written", "not run"):
                    submission = submission_from_history(lab, executed_cells())
                    problem = lab_tries.record_try(lab, submission, cell)
                tries = lab_tries.read_tries(lab.slug).get(cell.grade_id, lab_tries.Tries())
            except OSError as error:
                tries, problem = lab_tries.Tries(), str(error)
            steps = [] if found.status in ("not written", "not run") else lab_hints.steps(cell, tries)
        text = check_text(found, steps, f"grader.hint({cell.grade_id!r})")
        html = check_html(found, steps)
        return Shown(html, text + (f"\nNote: {problem}" if problem else ""))

    def meant(self, wanted: str) -> tuple[Lab, str]:
        """The lab and the check that `grader.hint(wanted)` is about. Raises LabError."""
        if not wanted:
            if self.last is None:
                raise LabError("no check has failed in this notebook yet; name one: grader.hint('check_append')")
            return self.last
        if self.last is not None:
            return self.last[0], wanted
        from grader.notebook import which_lab

        return which_lab(self.labs, executed_cells()), wanted

    def is_learners(self, frame: FrameType) -> bool:
        """Whether this is code of a cell of the notebook that is not one of the lab's own."""
        source = _source(frame)
        return bool(source) and bare(source) not in self.given and not comment_text(source, "property")

    def place(self, frame: FrameType) -> tuple[str, str, str]:
        """(cell, function, source) of the learner's code."""
        source = _source(frame)
        names = set(defined_names(source))
        cells = [cell for lab in self.labs for cell in lab.of_kind("solution")]
        name = next((cell.grade_id for cell in cells if names.intersection(cell.names)), "of your own")
        return name, frame.f_code.co_name, source


class Watch:
    """A thread beside one check: says that it is running, and ends it when a call into the learner's code hangs."""

    def __init__(self, checks: NotebookChecks, name: str):
        import contextvars

        self.checks, self.name = checks, name
        self.hung: Hung | None = None
        self.handle: Any = None
        self._ended = threading.Event()
        self._main = threading.main_thread().ident or 0
        # What a thread displays belongs to a cell by a context variable of ipykernel's.
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=lambda: context.run(self._look), daemon=True)

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        self._ended.set()
        self._thread.join()

    def show_last(self, shown: Shown) -> None:
        """Shows what the check found, in place of "is running"."""
        from IPython.display import display

        if self.handle is None:
            display(shown)
        else:
            self.handle.update(shown)

    def _look(self) -> None:
        began = told = time.monotonic()
        inside: FrameType | None = None  # the outermost call into the learner's code
        since = busy = 0.0
        while not self._ended.wait(LOOK_EVERY):
            now = time.monotonic()
            frames = _stack(self._main)
            own = [frame for frame in frames if self.checks.is_learners(frame)]
            outermost = own[-1] if own else None
            if outermost is not inside:
                inside, since, busy = outermost, now, time.process_time()
            if now - began >= SHOWN_AFTER and now - told >= 1.0:
                told = now
                self._tell(now - began)
            if inside is None:
                continue
            again = any(_source(frame) in self.checks.hung for frame in own)
            allowed = min(Limits.later_call, OWN_CALL) if again else OWN_CALL
            if now - since >= PATIENCE * allowed or (now - since >= allowed and time.process_time() - busy >= allowed):
                self._stop(own[0], now - since)
                return

    def _stop(self, frame: FrameType, seconds: float) -> None:
        name, function, source = self.checks.place(frame)
        what = f"cell {name}" if function.startswith("<") else f"{function} (cell {name})"
        self.hung = Hung(what, source, frame.f_lineno, round(seconds))
        del frame
        interrupt()
        while not self._ended.wait(STOP_EVERY):  # code that catches every exception goes on; so do we
            interrupt()

    def _tell(self, seconds: float) -> None:
        from IPython.display import display

        shown = Shown(running_html(self.name, seconds), running_text(self.name, seconds))
        if self.handle is None:
            self.handle = display(shown, display_id=True)
        else:
            self.handle.update(shown)


def interrupt() -> None:
    """Interrupts the thread that runs cells, as the button "Interrupt" does."""
    if hasattr(signal, "pthread_kill"):
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
    else:
        import _thread

        _thread.interrupt_main()


def _passed(cell: Cell) -> Shown:
    found = check_result(cell, "passed", "")
    return Shown(check_html(found), check_text(found))


def _stack(thread: int) -> list[FrameType]:
    """The calls of a thread, innermost first."""
    frames, frame = [], sys._current_frames().get(thread)
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def _source(frame: FrameType) -> str:
    """The text of the notebook's cell that a frame is in; "" for code of a file."""
    name = frame.f_code.co_filename
    return "" if os.path.isfile(name) else "".join(linecache.getlines(name))


def _line(source: str, number: int) -> str:
    lines = source.split("\n")
    return lines[number - 1].strip() if 0 < number <= len(lines) else ""


def _line_numbers(error: BaseException, checks: NotebookChecks) -> list[int]:
    return [line for frame, line in traceback.walk_tb(error.__traceback__) if checks.is_learners(frame)]
