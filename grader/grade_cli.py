"""`inferlab grade ...`: an instructor's commands. Each works in a course folder, by default the current one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from grader.course import CourseError, new_course, open_course

app = typer.Typer(
    name="grade", help="For instructors: release labs, collect, grade, give feedback.", no_args_is_help=True
)
console = Console()

LabArgument = Annotated[str, typer.Argument(help="Number or folder of the lab, such as 02.")]
CourseOption = Annotated[Path, typer.Option("--course", help="The course folder.")]


@app.command("new-course", epilog="Example: inferlab grade new-course ~/llm-inference-2027")
def new_course_command(folder: Annotated[Path, typer.Argument(help="A folder that is not a course yet.")]) -> None:
    """Make a course folder: nbgrader's structure, configured so that our examiner does the grading."""
    try:
        new_course(folder)
    except (CourseError, OSError) as error:
        _stop(error)
    console.print(f"Made {folder}. Next, in that folder: inferlab grade release 02")


@app.command(epilog="Example: inferlab grade release 02")
def release(lab: LabArgument, course: CourseOption = Path(), sources: Annotated[
    Path | None, typer.Option(help="Folder with the labs' sources; the repository's solutions/ if not given.")
] = None) -> None:  # fmt: skip
    """Make the notebook to hand out, and register its checks in the gradebook."""
    from grader import grading
    from grader.lab import LabError
    from grader.workspace import data_root

    try:
        root = open_course(course)
        slug, path = grading.release(root, lab, sources or data_root() / "solutions")
    except (CourseError, LabError, OSError) as error:
        _stop(error)
    console.print(f"Hand out {path.relative_to(root)}. Next: inferlab grade collect {slug} FOLDER_OR_ZIP")


@app.command(epilog="Example: inferlab grade collect 02 downloads/lab02.zip")
def collect(
    lab: LabArgument,
    source: Annotated[
        Path, typer.Argument(help="A folder or zip: STUDENT/NAME.ipynb or STUDENT.ipynb for each student.")
    ],
    course: CourseOption = Path(),
) -> None:
    """Take in submissions. What cannot be read is refused with a reason and graded with zero, never skipped."""
    from grader import grading
    from grader.collect import collect as collect_all

    try:
        root = open_course(course)
        slug = grading.lab_slug(root, lab)
        received = collect_all(root, slug, source)
    except (CourseError, OSError) as error:
        _stop(error)
    for one in received:
        if one.refused:
            console.print(f"{one.student}: refused: {one.refused}", style="yellow", markup=False)
        for note in one.notes:
            console.print(f"{one.student}: {note}", markup=False)
    refused = sum(1 for one in received if one.refused)
    console.print(f"{len(received)} submissions taken in, {refused} of them refused. Next: inferlab grade run {slug}")


@app.command(epilog="Example: inferlab grade run 02")
def run(
    lab: LabArgument,
    course: CourseOption = Path(),
    again: Annotated[bool, typer.Option("--all", help="Grade all again, not only what is new.")] = False,
) -> None:
    """Grade what is new. There is no sandbox yet: the code of the submissions runs on this account."""
    from grader import grading

    try:
        root = open_course(course)
        slug = grading.lab_slug(root, lab)
    except CourseError as error:
        _stop(error)
    waiting = len(grading.students(root, slug))
    broken = number = 0
    for number, result in enumerate(grading.run(root, slug, again), 1):
        broken += result.status == "machinery"
        points = f"{result.earned:g} of {result.points:g}"
        console.print(
            f"[{number}/{waiting}] {result.student}: {points}, {result.status}, {result.seconds:.1f} s", markup=False
        )
    console.print(f"{number} graded, {waiting - number} unchanged. Next: inferlab grade feedback {slug}")
    if broken:
        _stop(
            f"{broken} could not be graded because the grader failed; they have zero and wait for you in the gradebook"
        )


@app.command(epilog="Example: inferlab grade feedback 02")
def feedback(lab: LabArgument, course: CourseOption = Path()) -> None:
    """Write one page per student."""
    from grader import grading

    try:
        root = open_course(course)
        slug = grading.lab_slug(root, lab)
        pages = grading.feedback(root, slug)
    except CourseError as error:
        _stop(error)
    if not pages:
        _stop(f"nothing is graded yet; first: inferlab grade run {slug}")
    console.print(f"{len(pages)} pages in feedback/, for example {pages[0].relative_to(root)}")


@app.command(epilog="Example: inferlab grade report 02")
def report(lab: LabArgument, course: CourseOption = Path()) -> None:
    """Scores and states of all submissions, and how many passed each check."""
    from grader import grading

    try:
        root = open_course(course)
        slug = grading.lab_slug(root, lab)
        rows = grading.report(root, slug)
    except CourseError as error:
        _stop(error)
    table = Table("student", "points", "state", "seconds", "notes", title=slug)
    for row in rows:
        score = "not graded" if row.score is None else f"{row.score:g} of {row.max_score:g}"
        result = row.result
        state, seconds, notes = (
            (result.status, f"{result.seconds:.1f}", str(len(result.notes))) if result else ("", "", "")
        )
        table.add_row(row.student, score, state, seconds, notes)
    console.print(table)
    results = [row.result for row in rows if row.result is not None]
    checks = Table("check", "property", "passed", title="Checks")
    for number, check in enumerate(results[0].checks if results else []):
        passed = sum(result.checks[number].status == "passed" for result in results)
        checks.add_row(check.grade_id, check.property, f"{passed} of {len(results)}")
    console.print(checks)


def _stop(problem: object) -> NoReturn:
    typer.echo(f"inferlab: {problem}", err=True)
    raise typer.Exit(1)
