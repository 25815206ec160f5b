"""`inferlab lab ...`: a learner's commands. Your notebook is labs/NN_slug/SLUG.ipynb in your workspace."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from grader.labs.lab import LabError
from grader.saying import stop as _stop

app = typer.Typer(
    name="lab",
    help="Build a part of the engine yourself: start, check, hint, reset, diff.",
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
    from grader.study import lab_log, lab_tries, lab_work
    from grader.study.show import show_result, telling

    try:
        work = lab_work.open_work(lab, file)
        submission = lab_work.submission_of(work)
        with telling(console) as on_start:
            result = lab_work.check_submission(work.lab, submission, on_start)
    except (LabError, OSError) as error:
        _stop(error)
    served = ""
    if result.status == "passed":
        from grader.study.milestone import milestone

        served = milestone(work.lab, submission)
    show_result(console, result, lab, served=served)
    # Another file may be another learner's: it is checked, and is not this one's progress.
    if file is None:
        problem = lab_log.record(result) or lab_tries.record_tries(work.lab, submission, result)
        if problem:
            console.print(f"Note: {problem}", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(0 if result.status == "passed" else 1)


@app.command(epilog="Example: inferlab lab hint 02 check_append")
def hint(
    lab: LabArgument,
    check: Annotated[str, typer.Argument(help="The check's name, such as check_append.")],
) -> None:
    """The next hint for a check: first a question, then a hint, and after three different tries an explanation."""
    from grader.study import lab_hints, lab_work

    try:
        text = lab_hints.next_hint(lab_work.released_lab(lab), check)
    except (LabError, OSError) as error:
        _stop(error)
    console.print(text, markup=False, highlight=False)


@app.command(epilog="Examples: inferlab lab reset 02 KVCache; inferlab lab reset 02 --all")
def reset(
    lab: LabArgument,
    cell: Annotated[
        str | None, typer.Argument(help="The cell's id: the name of the function or class it holds.")
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="The whole notebook, also where the file is damaged or empty.")
    ] = False,
    repair: Annotated[
        bool, typer.Option("--repair", help="Only the lab's own cells that are gone or changed; your code stays.")
    ] = False,
) -> None:
    """Put one cell back to what was handed out, or all. What was there is kept in a file beside the notebook."""
    from grader.study import lab_work

    if (cell is not None) + everything + repair != 1:
        raise typer.BadParameter(
            f"expected one of three: the id of a cell, --all, or --repair. The cells of this lab that you write: "
            f"{_cells(lab)}",
            param_hint="CELL",
        )
    try:
        work = lab_work.open_work(lab)
        if everything:
            kept: Path | None = lab_work.reset_all(work)
            console.print(f"{work.path} is as it was handed out.", markup=False, soft_wrap=True)
        elif repair:
            kept, notes = lab_work.repair(work)
            for note in notes:
                console.print(note, markup=False, highlight=False, soft_wrap=True)
            done = f"{work.path} has all of the lab's cells, and your code."
            console.print(done, markup=False, highlight=False, soft_wrap=True)
        else:
            kept = lab_work.reset_cell(work, cell or "")
            console.print(f"{cell} is as it was handed out.", markup=False, soft_wrap=True)
    except (LabError, OSError) as error:
        _stop(error)
    said = f"What was there is kept in {kept}" if kept else "It was not there any more; nothing had to be kept."
    console.print(said, markup=False, highlight=False, soft_wrap=True)
    console.print("If the notebook is open, reload it from disk before you go on.")
    console.print(f"When you have written it again: inferlab lab check {lab}", markup=False, highlight=False)


def _cells(lab: str) -> str:
    from grader.study import lab_work

    try:
        return ", ".join(cell.grade_id for cell in lab_work.released_lab(lab).of_kind("solution"))
    except (LabError, OSError) as error:
        _stop(error)


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
