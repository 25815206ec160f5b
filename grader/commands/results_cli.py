"""`inferlab grade feedback|regrade|points|export|book|forget`: what comes after grading."""

from __future__ import annotations

import shlex
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from grader.commands.common import (
    STALE,
    CourseOption,
    LabArgument,
    console,
    how_many,
    listed,
    open_lab,
    stop_for_damaged,
)
from grader.course import CourseError, course_lock, open_course
from grader.results.shown_text import shown_line
from grader.saying import stop as _stop

if TYPE_CHECKING:
    from grader.results.result import Result

app = typer.Typer(no_args_is_help=True)


@app.command(epilog="Example: inferlab grade feedback 02")
def feedback(
    lab: LabArgument,
    packed: Annotated[
        Path | None, typer.Option("--zip", help="Pack the pages too, named as Canvas or Moodle takes them back.")
    ] = None,
    lms: Annotated[
        str, typer.Option(metavar="canvas|moodle", help="Of which LMS the zip is, where students handed in by both.")
    ] = "",
    course: CourseOption = Path(),
) -> None:
    """Write one page per student, with scores and comments as the gradebook has them now."""
    from grader.courses import grading
    from grader.courses.late import settle
    from grader.reports.feedback_zip import write_feedback_zip

    try:
        if lms and packed is None:
            raise CourseError("--lms says of which LMS the zip is: it goes with --zip FILE")
        root, slug = open_lab(course, lab)
        with course_lock(root):
            settle(root, slug)
            pages, failed = grading.feedback(root, slug)
        form, left_out = write_feedback_zip(root, slug, pages, packed, lms) if packed and pages else ("", [])
    except (CourseError, OSError) as error:
        _stop(error)
    if not pages and not failed:
        _stop(f"nothing is graded yet; first: inferlab grade run {slug}")
    example = f", for example {pages[0].relative_to(root)}" if pages else ""
    console.print(f"{len(pages)} pages in feedback/{example}", markup=False)
    if form:
        console.print(f"Written: {packed}, named as for {form}", markup=False)
    listed(f"Not in the zip; they did not hand in by {form}, or by a name that does not say who, or says two", left_out)
    for student, cause in failed.items():
        typer.echo(f"{shown_line(student)}: no page could be written ({shown_line(cause)}); grade it again: inferlab "
                   f"grade run {slug} --student {shlex.quote(shown_line(student))}", err=True)  # fmt: skip
    if failed:
        _stop(f"no page could be written for {how_many(len(failed))}: {', '.join(map(shown_line, failed))}")


@app.command(epilog="Example: inferlab grade regrade 02 --dry-run")
def regrade(
    lab: LabArgument,
    course: CourseOption = Path(),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would change and record nothing.")] = False,
    workers: Annotated[int | None, typer.Option(help="As for `run`.", min=1)] = None,
    executor: Annotated[str, typer.Option(help="As for `run`.")] = "",
    insecure: Annotated[bool, typer.Option("--insecure", help="As for `run`.")] = False,
    student: Annotated[list[str] | None, typer.Option(help="Only this student; may be repeated.")] = None,
) -> None:
    """After a test was fixed and the lab released again: grade all again, and show old against new.

    The old results stay in results/LAB/history/; points that a person gave stay.
    """
    from grader.courses import regrade as regrading
    from grader.courses.batch import lab_setup
    from grader.courses.recorded import recorded

    try:
        root, slug = open_lab(course, lab)
        version = lab_setup(root, slug).lab_version
        before = {result.lab_version for result in recorded(root, slug).results.values()}
        if before == {version}:
            console.print("The checks are those of the last grading.")
        with Progress(TextColumn("{task.completed}/{task.total}"), BarColumn(), TimeRemainingColumn(), console=console,
                      transient=True) as progress:  # fmt: skip
            from grader.courses.grading import students

            task = progress.add_task("", total=len(students(root, slug, student)))

            def tick(_: Result) -> None:
                progress.advance(task)

            changes = regrading.regrade(root, slug, dry_run, tick, wanted=student, workers=workers,
                                        executor=executor, insecure=insecure)  # fmt: skip
    except CourseError as error:
        _stop(error)
    table = Table("student", "points", "in the gradebook", "checks", title=f"{slug}: what changed")
    for change in changes:
        if change.changed:
            checks = "; ".join(f"{name}: {before} → {after}" for name, before, after in change.checks)
            totals = "" if dry_run else f"{_points(change.old_total)} → {_points(change.new_total)}"
            points = f"{_points(change.old_points)} → {_points(change.new_points)}"
            table.add_row(*map(escape, (shown_line(change.student), points, totals, checks)))
    if table.row_count:
        console.print(table)
        for name, (gained, lost) in regrading.check_counts(changes).items():
            console.print(f"{name}: gained by {how_many(gained)}, lost by {lost}", markup=False)
    said = "Nothing was recorded." if dry_run else f"Recorded; the old results are in results/{slug}/history/."
    console.print(f"{len(changes)} graded again, {table.row_count} changed. {said}", markup=False)


def _points(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


@app.command(epilog='Example: inferlab grade points 02 ada check_x 1.5 --comment "Right idea."')
def points(
    lab: LabArgument,
    student: Annotated[str | None, typer.Argument(help="The student's id.")] = None,
    check: Annotated[str | None, typer.Argument(help="The check, or an answer that a person grades.")] = None,
    value: Annotated[
        str, typer.Argument(metavar="[POINTS]", help="A number, or auto: the grader's points count again.")
    ] = "",
    comment: Annotated[str | None, typer.Option(help="The student reads it in the feedback.")] = None,
    table: Annotated[
        Path | None, typer.Option("--csv", help="Many at once: a file with the columns student,check,points,comment.")
    ] = None,
    course: CourseOption = Path(),
) -> None:
    """Give points and comments by hand, as in the formgrader: they stay, also when the lab is graded again."""
    from grader.courses.by_hand import Given, give, points_in, read_points
    from grader.courses.late import settle

    try:
        root, slug = open_lab(course, lab)
        if (table is None) == (student is None or check is None):
            raise CourseError("say either STUDENT CHECK POINTS, or --csv FILE")
        given = read_points(table) if table else [Given(student or "", check or "", points_in(value), comment)]
        said = give(root, slug, given)
        settle(root, slug)
    except (CourseError, OSError) as error:
        _stop(error)
    for line in said:
        console.print(shown_line(line), markup=False, highlight=False, soft_wrap=True)
    console.print(f"{len(said)} written. Next: inferlab grade feedback {slug}", markup=False)


@app.command(epilog='Example: inferlab grade export 02 --format canvas --column "Lab 02 (1234)" -o canvas.csv')
def export(
    lab: LabArgument,
    form: Annotated[str, typer.Option("--format", help="csv, canvas, moodle or gradescope.")] = "csv",
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="File; for gradescope a folder. Printed if not given.")
    ] = None,
    anonymous: Annotated[
        bool, typer.Option("--anonymous", help="Pseudonyms in place of ids; no names, no text of students.")
    ] = False,
    column: Annotated[
        str | None, typer.Option(help="Canvas: the assignment's column, as Canvas's own export names it.")
    ] = None,
    course: CourseOption = Path(),
) -> None:
    """Write the grades for another system. Manual changes and late penalties are in them."""
    from grader.courses.recorded import recorded
    from grader.courses.scores import scores
    from grader.reports import export as exports

    try:
        root, slug = open_lab(course, lab)
        if form not in exports.FORMATS:
            raise CourseError(f"there is no format {form!r}; formats: {', '.join(exports.FORMATS)}")
        people, read = scores(root, slug), recorded(root, slug)
        graded, damaged = read.results, read.damaged
        if anonymous:
            people, graded = exports.anonymised(root, people, graded)
            damaged = tuple(replace(one, student=exports.pseudonym(root, one.student)) for one in damaged)
        if form == "gradescope":
            files = {f"{person.student}/results.json": exports.gradescope_json(person, graded[person.student])
                     for person in people if person.student in graded}  # fmt: skip
        else:
            text = {"csv": lambda: exports.gradebook_csv(slug, people, graded, damaged),
                    "canvas": lambda: exports.canvas_csv(column or slug, people),
                    "moodle": lambda: exports.moodle_csv(people, graded)}[form]()  # fmt: skip
            files = {"": text}
        _write(files, output, form)
    except (CourseError, OSError) as error:
        _stop(error)
    for person in people:
        for one in person.stale:
            typer.echo(f"{person.student}: points by hand from before the last grading: {one}", err=True)
    if any(person.stale for person in people):
        typer.echo(f"They are in what was written. To drop or keep them: {STALE.format(slug)}", err=True)
    missing = sum(person.total is None for person in people)
    typer.echo(f"{len(people)} students, {missing} of them without a grade.", err=True)
    stop_for_damaged(read.damaged, "their points, which are the gradebook's, are written, and nothing that checks said")


def _write(files: dict[str, str], output: Path | None, form: str) -> None:
    if form == "gradescope" and output is None:
        raise CourseError("gradescope takes one results.json per student: name a folder with -o")
    for name, text in files.items():
        if output is None:
            typer.echo(text, nl=False)
            continue
        path = output / name if name else output
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode("utf-8"))


@app.command("book", epilog="Example: inferlab grade book --best --csv grades.csv")
def book_command(
    best: Annotated[
        bool, typer.Option("--best/--latest", help="Count each student's best attempt at a lab, or the latest.")
    ] = False,
    table: Annotated[Path | None, typer.Option("--csv", help="Write it to a file.")] = None,
    course: CourseOption = Path(),
) -> None:
    """The gradebook over all labs: a row for each student, with late penalties and points by hand."""
    from grader.reports.book import book, book_csv

    try:
        made = book(open_course(course), best)
        if table:
            table.write_bytes(book_csv(made).encode("utf-8"))
    except (CourseError, OSError) as error:
        _stop(error)
    most = sum(made.maxima.values())
    shown_table = Table("student", *map(escape, made.maxima), "total", title=f"Of {most:g} points")
    for row in made.rows:
        cells = [_points(row.points[slug]) for slug in made.maxima]
        shown_table.add_row(escape(shown_line(row.student)), *cells, _points(row.total))
    console.print(shown_table)
    if table:
        console.print(f"Written: {table}", markup=False)
    listed(f"Points by hand from before the last grading, which count; to drop or keep them: {STALE.format('LAB')}",
           made.stale)  # fmt: skip
    listed("Labs that cannot be read; their points are missing", made.problems)
    stop_for_damaged(made.damaged, "the points above are the gradebook's" + ", without these attempts" * best)
    if made.problems:
        _stop(f"{len(made.problems)} of {len(made.maxima)} labs cannot be read: see above")


@app.command(epilog="Example: inferlab grade forget --older-than 365")
def forget(
    student: Annotated[list[str] | None, typer.Option(help="A student's id; may be repeated.")] = None,
    older_than: Annotated[
        int | None, typer.Option(help="Students who handed nothing in for this many days.", min=0)
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Really delete. Without it, only say what would go.")] = False,
    course: CourseOption = Path(),
) -> None:
    """Delete what the course keeps of students: submissions, results, feedback, rows of the gradebook.

    Backups and files that you exported are yours to delete.
    """
    from grader.courses import forget as forgetting

    try:
        root = open_course(course)
        if not student and older_than is None:
            raise CourseError("say whom: --student ID or --older-than DAYS")
        chosen = forgetting.to_forget(forgetting.kept(root), student or [], older_than, datetime.now(UTC))
        for one in chosen:
            when = f"{one.last:%Y-%m-%d}" if one.last else "no date"
            rows = f"gradebook: {', '.join(one.labs) or 'no lab'}" if one.in_gradebook else "not in the gradebook"
            paths = ", ".join(path.relative_to(root).as_posix() for path in one.paths)
            said = shown_line(f"{one.student} ({when}): {paths or 'no files'}; {rows}", 2000)
            console.print(said, markup=False, highlight=False)
        if yes:
            forgetting.forget(root, chosen)
    except (CourseError, OSError) as error:
        _stop(error)
    said = "deleted" if yes else "would be deleted; add --yes to delete them"
    console.print(f"{how_many(len(chosen))} {said}.")
