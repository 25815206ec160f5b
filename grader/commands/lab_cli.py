"""`inferlab lab ...`: a learner's commands. Your notebook is labs/NN_slug/SLUG.ipynb in your workspace."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from grader.labs.lab import LabError

app = typer.Typer(
    name="lab",
    help="Build a part of the engine yourself: start, check, reset, diff.",
    epilog="Start with: inferlab lab start 02",
    no_args_is_help=True,
)
console = Console()

LabArgument = Annotated[str, typer.Argument(help="Number or folder of the lab, such as 02.")]


@app.command(epilog="Example: inferlab lab start 02")
def start(lab: LabArgument) -> None:
    """Bring the lab's notebook into your workspace. What you have edited is never overwritten."""
    from grader.study import lab_work
    from grader.study.workspace import WorkspaceError, prepare

    try:
        edited = lab_work.has_edits(lab)
        prepare()
        work = lab_work.open_work(lab)
    except (LabError, WorkspaceError, OSError) as error:
        _stop(error)
    console.print(f"{'It is there, with your work in it' if edited else 'Your notebook'}:", end=" ")
    console.print(str(work.path), markup=False, soft_wrap=True)
    console.print(f"It has {len(work.lab.of_kind('check'))} checks. Open it with: inferlab learn")
    console.print(f"When you have written a part: inferlab lab check {lab}")


@app.command(epilog="Example: inferlab lab check 02")
def check(
    lab: LabArgument,
    file: Annotated[Path | None, typer.Option(help="Check this notebook instead of the one in your workspace.")] = None,
) -> None:
    """Run the lab's visible checks on your saved notebook, the way a grader does.

    The result is kept and shown by `inferlab progress`; that of another --file is not.
    """
    from grader.examination.intake import read_submission
    from grader.study import lab_log, lab_work
    from grader.study.show import show_result

    try:
        work = lab_work.open_work(lab, file)
        result = lab_work.check_file(work)
    except (LabError, OSError) as error:
        _stop(error)
    show_result(console, result, lab)
    if result.status == "passed":
        from grader.study.milestone import milestone

        submission = read_submission(work.path.read_bytes(), work.lab)
        console.print("\n" + milestone(work.lab, submission), markup=False, highlight=False, soft_wrap=True)
    # Another file may be another learner's: it is checked, and is not this one's progress.
    if file is None and (problem := lab_log.record(result)):
        console.print(f"Note: {problem}", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(0 if result.status == "passed" else 1)


@app.command(epilog="Example: inferlab lab reset 02 KVCache")
def reset(
    lab: LabArgument,
    cell: Annotated[str, typer.Argument(help="The cell's id: the name of the function or class it holds.")],
) -> None:
    """Put one cell back to what was handed out. Your text is kept in a file beside the notebook."""
    from grader.study import lab_work

    try:
        work = lab_work.open_work(lab)
        kept = lab_work.reset_cell(work, cell)
    except (LabError, OSError) as error:
        _stop(error)
    console.print(f"{cell} is as it was handed out. What you had written: {kept}", markup=False, soft_wrap=True)
    console.print("If the notebook is open, reload it from disk before you go on.")
    console.print(f"When you have written it again: inferlab lab check {lab}", markup=False, highlight=False)


@app.command(epilog="Example: inferlab lab diff 02")
def diff(lab: LabArgument) -> None:
    """After full marks: your solution beside the reference."""
    from rich.syntax import Syntax

    from grader.study import lab_work

    try:
        work = lab_work.open_work(lab)
        result = lab_work.check_file(work)
        if result.status != "passed":
            _stop(f"the comparison opens when all checks pass; see: inferlab lab check {lab}")
        text = lab_work.difference(work)
    except (LabError, OSError) as error:
        _stop(error)
    console.print(
        Syntax(text or "Your solution is the reference, line by line.", "diff", theme="ansi_dark", word_wrap=True)
    )


def _stop(problem: object) -> NoReturn:
    typer.echo(f"inferlab: {problem}", err=True)
    raise typer.Exit(1)
