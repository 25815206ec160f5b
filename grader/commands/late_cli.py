"""`inferlab grade due|extend|late`: when a lab is due, and what being late costs."""

from __future__ import annotations

from datetime import UTC
from pathlib import Path
from typing import Annotated

import typer

from grader.commands.common import CourseOption, LabArgument, console, listed, open_lab
from grader.course import CourseError
from grader.results.shown_text import shown_line
from grader.saying import asked
from grader.saying import stop as _stop


def due(
    lab: LabArgument,
    when: Annotated[str, typer.Argument(help="YYYY-MM-DD HH:MM ZONE, or never.")],
    course: CourseOption = Path(),
) -> None:
    """Set when a lab is due. What being late costs: inferlab grade late."""
    from grader.courses.late import set_due

    try:
        root, slug = open_lab(course, lab)
        moment = set_due(root, slug, when)
    except CourseError as error:
        _stop(error)
    if moment is None:
        console.print(f"{slug} is never due.")
        return
    console.print(
        f"{slug} is due {moment:%A, %Y-%m-%d %H:%M %Z}, which is {moment.astimezone(UTC):%Y-%m-%d %H:%M} UTC."
    )


def extend(
    student: Annotated[str, typer.Argument(help="The student's id.")],
    lab: LabArgument,
    days: Annotated[int, typer.Argument(help="Days in all; 0 takes an extension back.", min=0, max=365)],
    course: CourseOption = Path(),
) -> None:
    """Give a student more time for a lab. Works before and after grading."""
    from grader.courses.late import extend as extend_student

    try:
        root, slug = open_lab(course, lab)
        moment = extend_student(root, slug, student, days)
    except CourseError as error:
        _stop(error)
    console.print(f"{slug} is due for {shown_line(student)} {moment:%A, %Y-%m-%d %H:%M %Z}.", markup=False)


def late(
    lab: LabArgument,
    course: CourseOption = Path(),
    grace_minutes: Annotated[float | None, typer.Option(help="Minutes that cost nothing.")] = None,
    per_day: Annotated[float | None, typer.Option(help="Fraction of the lab's points for each day begun.")] = None,
    maximum: Annotated[float | None, typer.Option(help="Largest fraction taken off.")] = None,
    time: Annotated[
        tuple[str, str] | None,
        typer.Option(metavar="STUDENT WHEN", help="When a student handed in: YYYY-MM-DD HH:MM ZONE, or unknown."),
    ] = None,
    file_times: Annotated[
        bool,
        typer.Option(
            "--file-times", help="Times that only files have, or that have no zone, hold: they cost points, too."
        ),
    ] = False,
) -> None:
    """Say who was late and what it costs, after setting the course's policy where options are given."""
    from dataclasses import asdict

    from grader.courses import late as lateness
    from grader.courses.late import Policy, read_policy, settle, without_time, write_policy

    try:
        root, slug = open_lab(course, lab)
        policy = old = read_policy(root)
        for name, value in (("grace_minutes", grace_minutes), ("per_day", per_day), ("maximum", maximum)):
            if value is not None:
                policy = Policy(**{**asdict(policy), name: value})
        if policy != old:
            write_policy(root, policy)
        if time is not None:
            lateness.set_time(root, slug, *time)
        found = settle(root, slug)
        unconfirmed = [one for one in found if one.unconfirmed] if policy.per_day else []
        if unconfirmed and not file_times:
            what = "a file's own, which unpacking and copying change, or one without a zone"
            listed(f"Late only by times that may be wrong: {what}", [one.line for one in unconfirmed])
            file_times = asked("Do these times hold, and are points to be taken off?")
            if not file_times:
                said = f"If they hold: inferlab grade late {slug} --file-times; if not: --time STUDENT WHEN"
                console.print(said, soft_wrap=True)
        if unconfirmed and file_times:
            lateness.confirm_file_times(root, slug, unconfirmed)
            found, unconfirmed = settle(root, slug), []
    except CourseError as error:
        _stop(error)
    console.print(f"Due: {policy.due.get(slug, 'never')}. A day costs {policy.per_day:.0%} of the lab's points, at "
                  f"most {policy.maximum:.0%}; {policy.grace_minutes:g} minutes of grace.", markup=False)  # fmt: skip
    if not found:
        console.print(f"Nobody is graded yet; first: inferlab grade run {slug}", markup=False)
    listed("Late", [one.line for one in found if one.days and one not in unconfirmed])
    listed("Without a time of handing in; not penalised", without_time(root, slug, found))
