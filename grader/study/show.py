"""A result as a table for a terminal, and as HTML for a notebook; and, while checks run, which one does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.table import Table
from rich.text import Text

from grader.labs.lab import Cell
from grader.results.result import WORDS, CheckResult, Result
from grader.study.check_view import Shown, checks_html, findings, grouped, running_text, shortened, together
from grader.study.lab_hints import Step
from grader.study.lab_work import next_step

SILENT_SECONDS = 3.0  # a check that takes longer is said to be running


def show_result(console: Console, result: Result, lab: str, in_notebook: bool = False) -> None:
    """Print what passed, what was seen, and what to do next. lab: as the learner names it on commands.

    What was seen helps to find a fault: while one is left, only checks that failed show it. Checks of what is
    not written yet share one line, and so do those that have the same to say.
    """
    title, written, lines = _parts(result)
    if written:
        table = Table(title=title, show_lines=True, expand=True)
        table.add_column("check", no_wrap=True)
        table.add_column("state", no_wrap=True)
        table.add_column("what it checks, and what was seen", ratio=1)
        for check, more in grouped(written):
            described = _described(check, result.status == "passed", bool(more))
            table.add_row("\n".join([check.grade_id, *more]), _state(check), described)
        console.print(table)
    else:
        console.print(title, markup=False, highlight=False)
    for line in lines:
        console.print(line, markup=False, highlight=False)
    if failed := next((check for check in written if check.status != "passed" and check.hint), None):
        ask = f"grader.hint({failed.grade_id!r})" if in_notebook else f"inferlab lab hint {lab} {failed.grade_id}"
        console.print(f"For a hint: {ask}", markup=False, highlight=False)
    console.print(next_step(result, lab, in_notebook), markup=False, highlight=False)


def notebook_view(result: Result, lab: str, steps: Mapping[str, list[Step]]) -> Shown:
    """The same for a notebook. steps: each check's hints."""
    console = Console(width=100, no_color=True, force_jupyter=False)
    with console.capture() as capture:
        show_result(console, result, lab, in_notebook=True)
    title, written, lines = _parts(result)
    html = checks_html(title, together(written, steps), [*lines, next_step(result, lab, in_notebook=True)])
    return Shown(html, capture.get().rstrip())


def _parts(result: Result) -> tuple[str, list[CheckResult], list[str]]:
    """The title, the checks that have something to say, and what else is said."""
    lines = []
    if unwritten := [check.grade_id for check in result.checks if check.status == "not written"]:
        lines.append(f"Not written yet, {len(unwritten)} of {len(result.checks)} checks: {', '.join(unwritten)}")
    lines += [f"Note: {note}" for note in result.notes]
    if result.printed.strip() and result.earned < result.points:
        lines.append("Your code printed:\n" + shortened(result.printed.strip()))
    title = f"{result.lab}: {result.earned:g} of {result.points:g} points"
    return title, [check for check in result.checks if check.status != "not written"], lines


def _state(check: CheckResult) -> Text:
    style = "green" if check.status == "passed" else "yellow"
    return Text(f"{WORDS[check.status]}\n{check.earned:g} of {check.points:g}", style=style)


def _described(check: CheckResult, all_passed: bool, shared: bool) -> Text:
    if check.status == "passed":
        text = Text(check.property)
        return text.append("\n" + check.seen.strip(), style="dim") if all_passed and check.seen.strip() else text
    text = Text("" if shared else check.property)
    if check.seen.strip():
        text.append("\n" + check.seen.strip(), style="dim")
    for name, found in findings(check):
        if name != "Property":
            text.append("\n" * bool(text) + f"{name}: {found}", style="yellow")
    return text


@contextmanager
def telling(console: Console) -> Iterator[Callable[[Cell], None]]:
    """While this lasts: what the given check is called, as soon as it has run for some seconds, and for how long.

    On a terminal in one line that goes away; elsewhere each check is named once.
    """
    ended, now = threading.Event(), [("the first check", time.monotonic())]

    def tell() -> None:
        said = ""
        with console.status("") as status:
            while not ended.wait(0.2):
                name, since = now[-1]
                seconds = time.monotonic() - since
                if seconds < SILENT_SECONDS:
                    status.update("")
                elif console.is_terminal:
                    status.update(running_text(name, seconds))
                elif said != name:
                    said = name
                    console.print(running_text(name, seconds), markup=False, highlight=False)

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield lambda cell: now.append((cell.grade_id, time.monotonic()))
    finally:
        ended.set()
        thread.join()
