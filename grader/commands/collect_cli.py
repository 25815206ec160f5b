"""`inferlab grade collect` and `inferlab grade roster`: who is in the course, and what they handed in."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from grader.commands.common import stop_for_receipts
from grader.course import CourseError, open_course
from grader.results.shown_text import shown_line
from grader.saying import asked
from grader.saying import stop as _stop

if TYPE_CHECKING:
    from grader.submissions.receipt import Received

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
    whose: Annotated[
        list[str] | None,
        typer.Option(help="FILE=STUDENT: whose a file, or all of a folder, is; FILE= leaves it out. May be repeated."),
    ] = None,
    zone: Annotated[
        str | None, typer.Option(metavar="ZONE", help="Blackboard: the time zone of its server, such as Europe/Berlin.")
    ] = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="Replace what is there also by what is older or worse, without asking.")
    ] = False,
) -> None:
    """Take in submissions. What cannot be read is refused with a reason and graded with zero, never skipped."""
    from grader.courses import grading
    from grader.courses.late import zone_named
    from grader.courses.recorded import recorded
    from grader.submissions.collect import collect as collect_all

    def allow(doubts: dict[str, str]) -> bool:
        graded = recorded(root, slug).results  # a damaged one is for `run`
        for student, why in doubts.items():
            points = f" ({graded[student].earned:g} points)" if student in graded else ""
            console.print(f"{student}{points}: {why}", style="red", markup=False, highlight=False, soft_wrap=True)
        return yes or asked("Replace what is there by these? Otherwise it stays, and still counts.")

    try:
        root = open_course(course)
        slug = grading.lab_slug(root, lab)
        done = collect_all(root, slug, source, form, _whose(whose or []), allow, zone_named(zone) if zone else None)
    except (CourseError, OSError) as error:
        _stop(error)
    for one in done.received:
        if line := _line(one):
            console.print(line, style="yellow" if one.refused else None, markup=False, highlight=False, soft_wrap=True)
    for warning in done.warnings:
        console.print(warning, style="red", markup=False, highlight=False, soft_wrap=True)
    _list("left as it was, see above; --yes replaces it", list(done.kept))
    _list("ignored, of other labs", done.of_other_labs)
    _list("ignored, files of no student", [str(path) for path in done.ignored])
    for time_from in sorted({one.time_from for one in done.received if one.time}):
        times = sorted(one.time[:16].replace("T", " ") for one in done.received if one.time_from == time_from)
        console.print(
            f"handed in from {times[0]} to {times[-1]} UTC, by {time_from}",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
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
    stop_for_receipts(done.damaged, "nothing of theirs was taken in; when it is repaired, collect again")


def _whose(told: list[str]) -> dict[str, str]:
    found = {}
    for text in told:
        file, sign, student = text.rpartition("=")
        if not sign or not file:
            raise CourseError(f"--whose is {text!r}, expected FILE=STUDENT, or FILE= to leave the file out")
        found[file.rstrip("/")] = student
    return found


def _line(one: Received) -> str:
    """A line with all that is to be said of one student; nothing of what is unchanged and can be read."""
    if one.refused:
        return f"{one.student}: refused: {'; '.join([one.refused, *one.notes])}"
    return f"{one.student}: {'; '.join([one.news, *one.notes])}" if one.news != "unchanged" else ""


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
        console.print(note, markup=False, highlight=False, soft_wrap=True)
    for line in done.changes:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    _list("in the course, but not in this file", done.absent)
    console.print(
        f"{len(known.students)} students: {len(done.added)} new, {len(done.changed)} changed. "
        "Next: inferlab grade collect LAB FOLDER_OR_ZIP"
    )


def repair(
    lab: LabArgument,
    student: Annotated[
        list[str] | None,
        typer.Option(help="Only this student; may be repeated. All whose receipts are damaged if none."),
    ] = None,
    course: CourseOption = Path(),
) -> None:
    """Make damaged receipts of what was handed in anew from what lies beside them; says what they rest on then."""
    from grader.courses import grading
    from grader.submissions.repair import damaged_receipts
    from grader.submissions.repair import repair as repair_receipts

    failed = 0
    try:
        root = open_course(course)
        slug = grading.lab_slug(root, lab)
        for one in student or damaged_receipts(root, slug):
            if not (root / "received" / one / slug).is_dir():
                raise CourseError(f"{one} has handed in nothing for {slug}; ids are the folders in received/")
            try:
                said = f"{one}: {repair_receipts(root, slug, one)}"
            except CourseError as error:
                said, failed = str(error), failed + 1
            console.print(shown_line(said, 1000), markup=False, highlight=False, soft_wrap=True)
    except (CourseError, OSError) as error:
        _stop(error)
    if failed:
        _stop(f"{failed} could not be repaired: see above")
    console.print(f"Look at the times, then: inferlab grade run {slug}", markup=False, soft_wrap=True)


def _list(what: str, names: list[str]) -> None:
    if names:
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        console.print(
            f"{what} ({len(names)}): {', '.join(names[:SHOWN])}{more}", markup=False, highlight=False, soft_wrap=True
        )
