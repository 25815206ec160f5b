"""A result as a table for a terminal or a notebook."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from grader.results.result import WORDS, CheckResult, Result
from grader.study.lab_work import next_step

MAX_LINES = 24  # of one message; the end of a traceback is what says what happened


def show_result(console: Console, result: Result, lab: str, in_notebook: bool = False) -> None:
    """Print what passed, what was seen, the hints, and what to do next. lab: as the learner names it on commands.

    What was seen helps to find a fault: while one is left, only checks that failed show it. Checks of what is
    not written yet share one line.
    """
    title = f"{result.lab}: {result.earned:g} of {result.points:g} points"
    unwritten = [check for check in result.checks if check.status == "not written"]
    written = [check for check in result.checks if check.status != "not written"]
    if written:
        table = Table(title=title, show_lines=True, expand=True)
        table.add_column("check", no_wrap=True)
        table.add_column("state", no_wrap=True)
        table.add_column("what it checks, and what was seen", ratio=1)
        for check in written:
            table.add_row(check.grade_id, _state(check), _described(check, result.status == "passed"))
        console.print(table)
    else:
        console.print(title, markup=False, highlight=False)
    if unwritten:
        names = ", ".join(check.grade_id for check in unwritten)
        count = f"{len(unwritten)} of {len(result.checks)} checks"
        console.print(f"Not written yet, {count}: {names}", markup=False, highlight=False)
    for note in result.notes:
        console.print(f"Note: {note}", markup=False, highlight=False)
    if result.printed.strip() and result.earned < result.points:
        console.print(
            "Your code printed:\n" + _shortened(result.printed.strip()), markup=False, highlight=False, style="dim"
        )
    console.print(next_step(result, lab, in_notebook), markup=False, highlight=False)


def _state(check: CheckResult) -> Text:
    style = "green" if check.status == "passed" else "yellow"
    return Text(f"{WORDS[check.status]}\n{check.earned:g} of {check.points:g}", style=style)


def _described(check: CheckResult, all_passed: bool) -> Text:
    text = Text(check.property)
    if check.seen.strip() and (all_passed or check.status != "passed"):
        text.append("\n" + check.seen.strip(), style="dim")
    if check.message:
        text.append("\n" + _shortened(check.message), style="yellow")
    if check.hint:
        text.append("\nHint: " + check.hint, style="cyan")
    return text


def _shortened(text: str) -> str:
    lines = text.split("\n")
    return text if len(lines) <= MAX_LINES else "\n".join([lines[0], "...", *lines[-MAX_LINES + 2 :]])
