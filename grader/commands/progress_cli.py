"""`inferlab progress`: what you have done, chapter by chapter, and the one thing to do next."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from grader.study.progress import ChapterProgress, LabProgress, Progress
from grader.study.progress_next import Step

app = typer.Typer()

LEGEND = (
    "read: code cells that you have run. predicted: guesses made of those asked for, and the factor between guess and "
    "answer at the median. quiz: questions answered at least once. due: for review now. lab: points of your best check."
)


@app.command(epilog="Example: inferlab progress --json")
def progress(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document, for tools.")] = False,
) -> None:
    """Show what you have read, predicted, answered and solved, what is due for review, and what to do next."""
    from grader.study.progress import measure
    from grader.study.progress_next import next_step

    measured = measure()
    step = next_step(measured)
    if as_json:
        print(as_document(measured, step))
        return
    show(Console(highlight=False), measured, step)


def as_document(progress: Progress, step: Step) -> str:
    """Everything as JSON; `read` of a chapter is a share of 1, times are ISO 8601."""
    document = asdict(progress)
    for chapter, measured in zip(document["chapters"], progress.chapters, strict=True):
        chapter["read"] = measured.read
        for lab, counted in zip(chapter["labs"], measured.labs, strict=True):
            lab["solved"] = counted.solved
    return json.dumps(document | {"next": asdict(step)}, indent=1, default=str)


def show(console: Console, progress: Progress, step: Step) -> None:
    """A table, what could not be read, and the next step. In a pipe there are no colours, and sentences stay whole."""
    whole = not console.is_terminal
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("chapter", ratio=1)
    for name in ("read", "predicted", "quiz", "due", "lab"):
        table.add_column(name, justify="right", no_wrap=True)
    for chapter in progress.chapters:
        table.add_row(*_row(chapter), style="dim" if chapter.planned else None)
    console.print(table)
    console.print()
    console.print(LEGEND, style="dim", soft_wrap=whole)
    for problem in progress.problems:
        console.print(f"Note: {problem}", markup=False, style="yellow", soft_wrap=whole)
    console.print()
    console.print(Text.assemble(("Next: ", "bold"), step.why), soft_wrap=whole)
    console.print(Text.assemble("  ", (step.command, "bold cyan")), soft_wrap=True)  # to be copied in one piece
    if step.notebook:
        console.print(Text(f"  {progress.home / step.notebook}"), soft_wrap=True)


def _row(chapter: ChapterProgress) -> list[str]:
    name = f"{chapter.folder.split('_')[0]} {chapter.title}"
    labs = "\n".join(map(_lab, chapter.labs))
    if chapter.planned:
        return [name, "planned", "", "", "", labs]
    near = "" if chapter.near is None else f" ×{chapter.near:.2g}" if chapter.near < 99.5 else f" ×{chapter.near:.0f}"
    return [
        name,
        "?" if chapter.read is None else f"{_percent(chapter.read)} %",
        f"{chapter.predicted}/{chapter.predictions}{near}" if chapter.predictions else "",
        f"{chapter.answered}/{chapter.items}" if chapter.items else "",
        str(chapter.due or ""),
        labs,
    ]


def _percent(share: float) -> int:
    """The share in percent, rounded; 0 and 100 only for nothing and everything."""
    return round(share * 100) if share in (0, 1) else min(99, max(1, round(share * 100)))


def _lab(lab: LabProgress) -> str:
    if lab.points is None:
        return ""
    return f"{'-' if lab.best is None else format(lab.best, 'g')}/{lab.points}"
