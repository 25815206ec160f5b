"""A result as a table for a terminal or a notebook."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from grader.feedback import WORDS
from grader.lab_work import next_step
from grader.results import Result

MAX_LINES = 24  # of one message; the end of a traceback is what says what happened


def show_result(console: Console, result: Result, lab: str, in_notebook: bool = False) -> None:
    """Print what passed, what was seen, the hints, and what to do next. lab: as the learner names it on commands."""
    table = Table(title=f"{result.lab}: {result.earned:g} of {result.points:g} points", show_lines=True, expand=True)
    table.add_column("check", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("what it checks, and what was seen", ratio=1)
    for check in result.checks:
        passed = check.status == "passed"
        text = Text(check.property)
        if check.seen.strip():
            text.append("\n" + check.seen.strip(), style="dim")
        if check.message:
            text.append("\n" + _shortened(check.message), style="yellow")
        if check.hint:
            text.append("\nHint: " + check.hint, style="cyan")
        state = Text(
            f"{WORDS[check.status]}\n{check.earned:g} of {check.points:g}", style="green" if passed else "yellow"
        )
        table.add_row(check.grade_id, state, text)
    console.print(table)
    for note in result.notes:
        console.print(f"Note: {note}", markup=False, highlight=False)
    if result.printed.strip() and result.earned < result.points:
        console.print(
            "Your code printed:\n" + _shortened(result.printed.strip()), markup=False, highlight=False, style="dim"
        )
    console.print(next_step(result, lab, in_notebook), markup=False, highlight=False)


def _shortened(text: str) -> str:
    lines = text.split("\n")
    return text if len(lines) <= MAX_LINES else "\n".join([lines[0], "...", *lines[-MAX_LINES + 2 :]])
