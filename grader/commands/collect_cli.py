"""`inferlab grade collect` and `inferlab grade roster`: who is in the course, and what they handed in."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from grader.course import CourseError, open_course
from grader.saying import stop as _stop

console = Console()
SHOWN = 20  # names in a list; the rest is counted

LabArgument = Annotated[str, typer.Argument(help="Number or folder of the lab, such as 02.")]
CourseOption = Annotated[Path, typer.Option("--course", help="The course folder.")]


def collect(
    lab: LabArgument,
    source: Annotated[Path, typer.Argument(help="A folder or zip of submissions, or an LMS's download of them.")],
    course: CourseOption = Path(),
    form: Annotated[
        str,
        typer.Option(
            "--format", help="canvas, moodle, blackboard, gradescope, exchange or folders; detected if not given."
        ),
    ] = "auto",
) -> None:
    """Take in submissions. What cannot be read is refused with a reason and graded with zero, never skipped."""
    from grader.courses import grading
    from grader.submissions.collect import collect as collect_all

    try:
        root = open_course(course)
        slug = grading.lab_slug(root, lab)
        done = collect_all(root, slug, source, form)
    except (CourseError, OSError) as error:
        _stop(error)
    for one in done.received:
        if one.refused:
            console.print(f"{one.student}: refused: {one.refused}", style="yellow", markup=False, highlight=False)
        for note in one.notes:
            console.print(f"{one.student}: {note}", markup=False, highlight=False)
    _list("ignored, files of no student", [str(path) for path in done.ignored])
    for time_from in sorted({one.time_from for one in done.received if one.time}):
        times = sorted(one.time[:16].replace("T", " ") for one in done.received if one.time_from == time_from)
        console.print(f"handed in from {times[0]} to {times[-1]} UTC, by {time_from}", markup=False, highlight=False)
    _list("late by the LMS", [one.student for one in done.received if one.late])
    _list("older than what is there, kept beside it", [one.student for one in done.received if one.news == "older"])
    if (root / "roster.json").exists() and (done.missing or len(done.unknown) < len(done.received)):
        _list("not in the roster, taken in", [f"{i} ({n})" if n and n != i else i for i, n in done.unknown.items()])
        _list("nothing handed in", done.missing)
    elif done.form == "moodle":
        console.print("Moodle numbers people anew for every assignment: with a roster, names become lasting ids.")
    refused = sum(1 for one in done.received if one.refused)
    same = sum(1 for one in done.received if one.news == "unchanged")
    console.print(
        f"{len(done.received)} submissions taken in, {refused} of them refused, {same} unchanged "
        f"(format: {done.form}). Next: inferlab grade run {slug}"
    )


def roster(
    file: Annotated[
        Path, typer.Argument(help="A CSV file: your own, Canvas' gradebook, Moodle's participants or worksheet.")
    ],
    course: CourseOption = Path(),
) -> None:
    """Import the course's students: names, addresses, and what an LMS calls them. May be repeated."""
    from grader.courses.recorder import register
    from grader.submissions.roster import load_roster, save_roster
    from grader.submissions.roster_file import import_roster

    try:
        root = open_course(course)
        known = load_roster(root)
        done = import_roster(file, known)
        save_roster(root, known)
        register(root, known)
    except (CourseError, OSError) as error:
        _stop(error)
    for note in done.notes:
        console.print(note, markup=False, highlight=False)
    _list("in the course, but not in this file", done.absent)
    console.print(
        f"{len(known.students)} students: {len(done.added)} new, {len(done.changed)} changed. "
        "Next: inferlab grade collect LAB FOLDER_OR_ZIP"
    )


def _list(what: str, names: list[str]) -> None:
    if names:
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        console.print(f"{what} ({len(names)}): {', '.join(names[:SHOWN])}{more}", markup=False, highlight=False)
