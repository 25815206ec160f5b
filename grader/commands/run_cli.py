"""`inferlab grade run` and `replay`: examine what was handed in, with a progress bar on a terminal."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from grader.commands.common import stop_for_receipts
from grader.course import CourseError, open_course
from grader.results.result import Result
from grader.saying import stop as _stop

console = Console()
Lab = Annotated[str, typer.Argument(help="Number or folder of the lab, such as 02.")]
Course = Annotated[Path, typer.Option("--course", help="The course folder.")]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="No sandbox: only for submissions you would run on this account yourself.")
]


def run(
    lab: Lab,
    course: Course = Path(),
    again: Annotated[bool, typer.Option("--all", help="Grade all again, not only what is new.")] = False,
    workers: Annotated[
        int | None, typer.Option(help="Submissions at once; the number of cores if not given.", min=1)
    ] = None,
    executor: Annotated[str, typer.Option(help="A Dask cluster instead: dask://HOST:PORT.")] = "",
    insecure: Insecure = False,
    student: Annotated[
        list[str] | None, typer.Option(help="Only this student, also where nothing changed; may be repeated.")
    ] = None,
    drop_manual: Annotated[
        bool | None,
        typer.Option(
            "--drop-manual/--keep-manual",
            help="Points by hand from before a submission was graded again: drop them, or keep them. They count, and "
            "are listed, until you say.",
        ),
    ] = None,
) -> None:
    """Grade what is new or changed, several submissions at once, each isolated from this machine and from the others.

    It can be stopped or killed at any moment: the same command continues where it stopped.
    """
    from grader.courses import grading
    from grader.courses.batch import grade_students, plan, record_students
    from grader.courses.by_hand import settle_stale
    from grader.courses.scores import scores

    broken = number = recorded = 0
    lower: list[str] = []
    try:
        root = open_course(course)
        slug = grading.lab_slug(root, lab)
        with _stoppable():
            who = grading.students(root, slug, student)
            todo = plan(root, slug, who, again or (bool(student) and drop_manual is None))
            for _ in record_students(root, slug, todo.record):
                recorded += 1
            before = _points_of(root, slug, todo.examine)
            results = grade_students(root, slug, todo.examine, workers=workers, executor=executor, insecure=insecure)
            with _shown(len(todo.examine), slug) as show, contextlib.closing(results):
                for number, result in enumerate(results, 1):
                    broken += result.status == "machinery"
                    show(number, result)
                    if result.earned < before.get(result.student, 0.0):
                        lower.append(f"{result.student}: {result.earned:g}, was {before[result.student]:g}")
        if drop_manual is not None:
            for name, one in settle_stale(root, slug, drop_manual, who):
                console.print(f"{name}: {'dropped' if drop_manual else 'kept'}: {one}", markup=False, highlight=False)
        stale = [(score.student, one) for score in scores(root, slug) for one in score.stale]
    except KeyboardInterrupt:
        rest = "The others keep the results they had. To grade all again" if again else "To go on"
        typer.echo(f"\nStopped. {number} are graded and recorded. {rest}: inferlab grade run {lab}"
                   + " --all" * again, err=True)  # fmt: skip
        raise typer.Exit(130) from None
    except (CourseError, OSError) as error:
        _stop(error)
    if recorded:
        console.print(
            f"{recorded} were graded before: what the gradebook lacked of them (results, times) is in it now."
        )
    console.print(f"{number} graded, {len(todo.done) + recorded} unchanged. Next: inferlab grade feedback {slug}")
    if lower:
        console.print(f"Fewer points than at the last grading ({len(lower)}):", style="red")
        for line in lower:
            console.print(f"  {line}", markup=False, highlight=False)
    if stale:
        console.print(f"Points by hand from before the last grading, which count ({len(stale)}):", style="yellow")
        for name, one in stale:
            console.print(f"  {name}: {one}", markup=False, highlight=False)
        console.print(f"To drop or to keep them: inferlab grade run {slug} --drop-manual, or --keep-manual (with "
                      "--student ID: one student's)", markup=False, soft_wrap=True)  # fmt: skip
    if todo.outdated:
        console.print(f"{len(todo.outdated)} of them were graded before the lab's checks changed; to see what would "
                      f"change, and to change it: inferlab grade regrade {slug}", style="yellow")  # fmt: skip
    if broken:
        _stop(
            f"{broken} could not be graded because the grader failed; they have zero and wait for you in the gradebook."
            " The same command tries them again"
        )
    stop_for_receipts(todo.damaged, "they keep the grade they had, if any")


def replay(student: Annotated[str, typer.Argument(help="The student's id.")], lab: Lab, course: Course = Path(),
           insecure: Insecure = False) -> None:  # fmt: skip
    """Examine one submission again with the same secret numbers, and print the result. Nothing is recorded."""
    from grader.courses import batch, grading

    try:
        root = open_course(course)
        result, differs = batch.replay(root, grading.lab_slug(root, lab), student, insecure)
    except (CourseError, OSError) as error:
        _stop(error)
    for line in differs:
        typer.echo(f"inferlab: {line}", err=True)
    typer.echo(replace(result, secret="").to_json(), nl=False)  # from the secret, all that is hidden follows


def _points_of(root: Path, slug: str, students: list[str]) -> dict[str, float]:
    """The points that the grader gave these students last, where there are any and the result can be read."""
    from grader.courses.nbgrader_hooks import load_result

    found = {}
    for student in students:
        with contextlib.suppress(OSError, ValueError):
            found[student] = load_result(root, slug, student).earned
    return found


@contextlib.contextmanager
def _shown(total: int, slug: str) -> Iterator[Callable[[int, Result], None]]:
    """Yields a function that shows a result: on a terminal a bar, with lines for what a person should see; or a line
    each."""
    if not console.is_terminal:
        yield lambda number, result: console.print(_line(number, total, result), markup=False, soft_wrap=True)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
               TextColumn("left"), TimeRemainingColumn())  # fmt: skip
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(slug, total=total)

        def show(number: int, result: Result) -> None:
            bar.advance(task)
            if result.status not in ("passed", "failed"):
                bar.console.print(_line(number, total, result), markup=False, soft_wrap=True)

        yield show


def _line(number: int, total: int, result: Result) -> str:
    points = f"{result.earned:g} of {result.points:g}"
    return f"[{number}/{total}] {result.student}: {points}, {result.status}, {result.seconds:.1f} s"


@contextlib.contextmanager
def _stoppable() -> Iterator[None]:
    """Makes SIGTERM end a run as Ctrl-C does: jobs in progress are ended, nothing is left behind."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
