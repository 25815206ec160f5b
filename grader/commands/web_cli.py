"""`inferlab grade web`: the class at a glance, in a browser on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from grader.course import CourseError, open_course
from grader.saying import stop


def web(
    course: Annotated[Path, typer.Option("--course", help="The course folder.")] = Path(),
    port: Annotated[int, typer.Option(help="Of 127.0.0.1; 0 for a free one.", min=0, max=65535)] = 0,
) -> None:
    """Show who has which points in which lab, with the way to reports and feedback pages. Changes no grade.

    The address that it prints works on this machine only, and only with its token.
    """
    from grader.reports.class_web import serve

    try:
        serve(open_course(course), port)
    except (CourseError, OSError) as error:
        stop(error)
