"""What an instructor's commands share: their arguments, and how they print."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperCommand, TyperOption

from grader.course import open_course
from grader.results.shown_text import shown_line
from grader.saying import stop

if TYPE_CHECKING:
    from grader.courses.recorded import Damaged
    from grader.submissions.history import DamagedReceipt

console = Console()

STALE = "inferlab grade run {} --drop-manual, or --keep-manual"
LabArgument = Annotated[str, typer.Argument(help="Number or folder of the lab, such as 02.")]
CourseOption = Annotated[Path, typer.Option("--course", help="The course folder.")]


class Once(TyperCommand):
    """A command that refuses an option given twice, of which otherwise the last would count without a word."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        _, _, order = self.make_parser(ctx).parse_args(list(args))
        for option in order:
            once = isinstance(option, TyperOption) and not (option.multiple or option.count or option.is_flag)
            if once and order.count(option) > 1:
                raise typer.BadParameter(f"{option.opts[0]} is given {order.count(option)} times: give it once")
        return super().parse_args(ctx, args)


def open_lab(course: Path, lab: str) -> tuple[Path, str]:
    """The course folder and the slug of one of its labs. Raises CourseError."""
    from grader.courses.grading import lab_slug

    root = open_course(course)
    return root, lab_slug(root, lab)


def listed(title: str, lines: Sequence[str]) -> None:
    """Print a title and its lines, if there are any."""
    if lines:
        console.print(f"\n{title.rstrip('.')}:", markup=False)
    for line in lines:
        console.print(f"  {shown_line(line, 500)}", markup=False, highlight=False, soft_wrap=True)


def stop_for_damaged(damaged: Sequence[Damaged], missing: str = "all that the grader saw of them is missing") -> None:
    """Names each result that cannot be read, with what repairs it, and ends with exit status 1, if there are any."""
    if not damaged:
        return
    for one in damaged:
        typer.echo(shown_line(str(one), 1000), err=True)
    stop(f"{how_many(len({one.student for one in damaged}))} with a damaged result: {missing}; repair it as said above")


def stop_for_receipts(damaged: Sequence[DamagedReceipt], left: str) -> None:
    """Names each receipt that cannot be read, with what repairs it, and ends with exit status 1, if there are any."""
    if not damaged:
        return
    for one in damaged:
        typer.echo(shown_line(str(one), 1000), err=True)
    stop(f"{how_many(len({one.student for one in damaged}))} with damaged receipts: {left}; repair them as said above")


def how_many(students: int) -> str:
    return f"{students} student{'' if students == 1 else 's'}"


def some(names: tuple[str, ...], most: int = 6) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
