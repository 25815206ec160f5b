"""A result as a table for a terminal, and as HTML for a notebook; and, while checks run, which one does."""

from __future__ import annotations

import io
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


def show_result(console: Console, result: Result, lab: str, in_notebook: bool = False, served: str = "") -> None:
    """Print what was seen where a check did not pass, what to do next, and the score last. lab: as the learner names it
    on commands. served: what the engine served with the learner's parts.

    Passed checks are names on one line: what they saw stands under each of them in the notebook. So are those that are
    not written yet; and checks that have the same to say share a row.
    """
    failed, lines = _parts(result)
    if failed:
        table = Table(show_lines=True, expand=True)
        table.add_column("check", no_wrap=True)
        table.add_column("state", no_wrap=True)
        table.add_column("what it checks, and what was seen", ratio=1)
        for check, more in grouped(failed):
            table.add_row("\n".join([check.grade_id, *more]), _state(check), _described(check, bool(more)))
        console.print(table)
    for line in lines:
        console.print(line, markup=False, highlight=False)
    if served:
        console.print("\n" + served.rstrip() + "\n", markup=False, highlight=False, soft_wrap=True)
    if asked := next((check for check in failed if check.hint), None):
        ask = f"grader.hint({asked.grade_id!r})" if in_notebook else f"inferlab lab hint {lab} {asked.grade_id}"
        console.print(f"For a hint: {ask}", markup=False, highlight=False)
    console.print(next_step(result, lab, in_notebook), markup=False, highlight=False)
    console.print(_score(result), markup=False, highlight=False)


def notebook_view(result: Result, lab: str, steps: Mapping[str, list[Step]]) -> Shown:
    """The result as a view for a notebook. steps: each check's hints."""
    console = Console(width=100, no_color=True, force_jupyter=False, file=io.StringIO())
    show_result(console, result, lab, in_notebook=True)
    failed, lines = _parts(result)
    below = [*lines, next_step(result, lab, in_notebook=True)]
    html = checks_html(_score(result), together(failed, steps), below)
    assert isinstance(console.file, io.StringIO)
    return Shown(html, console.file.getvalue().rstrip())


def _score(result: Result) -> str:
    return f"{result.lab}: {result.earned:g} of {result.points:g} points"


def _parts(result: Result) -> tuple[list[CheckResult], list[str]]:
    """The checks that have something to say, and what else is said."""
    lines, total = [], len(result.checks)
    for status, words in (("passed", "Passed"), ("not written", "Not written yet")):
        if names := [check.grade_id for check in result.checks if check.status == status]:
            lines.append(f"{words}, {len(names)} of {total} checks: {', '.join(names)}")
    lines += [f"Note: {note}" for note in result.notes]
    if result.printed.strip() and result.earned < result.points:
        lines.append("Your code printed:\n" + shortened(result.printed.strip()))
    return [check for check in result.checks if check.status not in ("passed", "not written")], lines


def _state(check: CheckResult) -> Text:
    return Text(f"{WORDS[check.status]}\n{check.earned:g} of {check.points:g}", style="yellow")


def _described(check: CheckResult, shared: bool) -> Text:
    text = Text("" if shared else check.property)
    if check.seen.strip():
        text.append("\n" + shortened(check.seen.strip()), style="dim")
    for name, found in findings(check):
        if name != "Property":
            text.append("\n" * bool(text) + f"{name}: {found}", style="yellow")
    return text


@contextmanager
def telling(console: Console) -> Iterator[Callable[[Cell], None]]:
    """Says inside the block what the given check is called, as soon as it has run for some seconds, and for how long.

    On a terminal it is one line that goes away; elsewhere each check is named once. The console writes to where it
    writes now: while a check runs, sys.stdout is that check's own report, and a console looks it up for each line.
    """
    ended, now = threading.Event(), [("the first check", time.monotonic())]
    console = Console(file=console.file, width=console.width, force_terminal=console.is_terminal)

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
