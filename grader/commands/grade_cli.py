"""`inferlab grade ...`: an instructor's commands. Each works in a course folder, by default the current one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from grader.commands.collect_cli import collect, repair, roster
from grader.commands.common import Once
from grader.commands.late_cli import due, extend, late
from grader.commands.prove_cli import prove
from grader.commands.report_cli import report
from grader.commands.results_cli import app as results_app
from grader.commands.run_cli import replay, run
from grader.commands.web_cli import web
from grader.course import SECRET_FILE, CourseError, new_course, open_course, released_labs
from grader.saying import stop as _stop

app = typer.Typer(
    name="grade", help="For instructors: release labs, collect, grade, give feedback.", no_args_is_help=True
)
console = Console()

LabArgument = Annotated[str, typer.Argument(help="Number or folder of the lab, such as 02.")]
CourseOption = Annotated[Path, typer.Option("--course", help="The course folder.")]


@app.command("new-course", epilog="Example: inferlab grade new-course ~/llm-inference-2027")
def new_course_command(
    folder: Annotated[Path, typer.Argument(help="A folder that is not a course yet.")],
    seed: Annotated[
        str | None, typer.Option(help="A text nobody can guess: makes a private course, the same for the same seed.")
    ] = None,
) -> None:
    """Make a course folder: nbgrader's structure, configured so that our examiner does the grading.

    Without --seed it hands out the public labs. With it each lab gets conventions that were drawn for this course, so
    that a copy of the public solution loses points.
    """
    try:
        new_course(folder, seed)
    except (CourseError, OSError) as error:
        _stop(error)
    kind = "a private course" if seed is not None else "a course of the public labs"
    console.print(f"Made {kind} in {folder}. Next, in that folder:", markup=False, soft_wrap=True)
    console.print("inferlab grade release 02")
    console.print(f"Keep a copy of {SECRET_FILE} where no student can read it.")


@app.command(epilog="Example: inferlab grade doctor")
def doctor() -> None:
    """Is the sandbox real on this machine? Attacks it, and prints a table with causes and remedies."""
    from grader.isolation import sandbox_doctor

    raise typer.Exit(sandbox_doctor.run())


@app.command(epilog="Example: inferlab grade release 02")
def release(lab: LabArgument, course: CourseOption = Path(), sources: Annotated[
    Path | None, typer.Option(help="Folder with the labs' sources; the repository's solutions/ if not given.")
] = None) -> None:  # fmt: skip
    """Make the notebook to hand out, and register its checks in the gradebook."""
    from grader.courses import grading
    from grader.labs.lab import LabError
    from grader.study.workspace import data_root

    try:
        root = open_course(course)
        slug, path = grading.release(root, lab, sources or data_root() / "solutions")
    except (CourseError, LabError, OSError) as error:
        _stop(error)
    console.print(f"Released {path.relative_to(root)}, with nothing hidden in it.", markup=False, soft_wrap=True)
    if (root / "conventions.md").exists():
        console.print("What differs from the public lab: conventions.md")
    console.print("Next, for students: inferlab grade bundle -o labs.zip")
    console.print(
        f"When they have handed in: inferlab grade collect {slug} FOLDER_OR_ZIP", markup=False, soft_wrap=True
    )


@app.command(epilog="Example: inferlab grade bundle 02 -o lab02.zip")
def bundle(
    output: Annotated[Path, typer.Option("--output", "-o", help="The zip to write.")],
    labs: Annotated[list[str] | None, typer.Argument(help="Labs such as 02; all that are released if none.")] = None,
    course: CourseOption = Path(),
) -> None:
    """Pack what students get into one zip. Nothing is written if a solution, hidden test or secret is found in it."""
    from grader.courses import grading
    from grader.courses.bundle import make_bundle
    from grader.labs.lab import LabError

    try:
        root = open_course(course)
        wanted = labs or released_labs(root)
        slugs = sorted({grading.lab_slug(root, lab) for lab in wanted})
        if not slugs:
            raise CourseError("nothing is released yet; first: inferlab grade release 02")
        files = make_bundle(root, slugs, output)
    except (CourseError, LabError, OSError) as error:
        _stop(error)
    console.print(f"Wrote {output}: {', '.join(files)}. Nothing hidden is in it.", markup=False, soft_wrap=True)


app.command(epilog="Example: inferlab grade roster participants.csv")(roster)
app.command(epilog="Example: inferlab grade collect 02 downloads/lab02.zip")(collect)
app.command(epilog="Example: inferlab grade repair 02 --student ada")(repair)
app.command(epilog="Example: inferlab grade run 02 --workers 4")(run)
app.command(epilog="Example: inferlab grade replay ada 02")(replay)
app.command(epilog="Example: inferlab grade report 02 --html report.html")(report)
app.command(epilog='Example: inferlab grade due 02 "2027-03-01 23:59 Europe/Berlin"')(due)
app.command(epilog="Example: inferlab grade extend alice 02 3")(extend)
app.command(epilog="Example: inferlab grade late 02 --grace-minutes 15 --per-day 0.1 --maximum 0.5")(late)
app.command(epilog="Example: inferlab grade web --port 8090")(web)
app.command(epilog="Example: inferlab grade prove 02 --sample 50 --jobs 2")(prove)


app.add_typer(results_app)
for _command in (*app.registered_commands, *results_app.registered_commands):
    _command.cls = Once
