"""`inferlab grade feedback|report|regrade|due|extend|late|export|forget`: what comes after grading."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from grader.course import CourseError, open_course
from grader.results.shown_text import shown_line
from grader.saying import stop as _stop

if TYPE_CHECKING:
    from grader.courses.late import Late
    from grader.reports.report import Report
    from grader.results.result import Result

app = typer.Typer(no_args_is_help=True)
console = Console()

LabArgument = Annotated[str, typer.Argument(help="Number or folder of the lab, such as 02.")]
CourseOption = Annotated[Path, typer.Option("--course", help="The course folder.")]


@app.command(epilog="Example: inferlab grade feedback 02")
def feedback(lab: LabArgument, course: CourseOption = Path()) -> None:
    """Write one page per student, with scores and comments as the gradebook has them now."""
    from grader.courses import grading
    from grader.courses.late import settle

    try:
        root, slug = _open(course, lab)
        settle(root, slug)
        pages = grading.feedback(root, slug)
    except CourseError as error:
        _stop(error)
    if not pages:
        _stop(f"nothing is graded yet; first: inferlab grade run {slug}")
    console.print(f"{len(pages)} pages in feedback/, for example {pages[0].relative_to(root)}", markup=False)


@app.command(epilog="Example: inferlab grade report 02 --html report.html")
def report(
    lab: LabArgument,
    course: CourseOption = Path(),
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the report as JSON.")] = None,
    html_file: Annotated[Path | None, typer.Option("--html", help="Write the report as one page.")] = None,
    against: Annotated[
        list[Path] | None,
        typer.Option(help="Compare with these too: a notebook or .py file, or a folder of them. May be repeated."),
    ] = None,
) -> None:
    """Distribution, hard checks, likely misconceptions, similar submissions, and what a person should look at."""
    from grader.reports.report import make_report
    from grader.reports.report_page import report_json, report_page

    try:
        root, slug = _open(course, lab)
        found = make_report(root, slug, _known(against or []))
        if json_file:
            json_file.write_text(report_json(found), "utf-8")
        if html_file:
            html_file.write_text(report_page(found), "utf-8")
    except (CourseError, OSError) as error:
        _stop(error)
    _print_report(found)
    for path in (json_file, html_file):
        if path:
            console.print(f"Written: {path}", markup=False)


def _known(paths: list[Path]) -> dict[str, list[str]]:
    files = [f for p in paths for f in ([p] if p.is_file() else sorted([*p.rglob("*.ipynb"), *p.rglob("*.py")]))]
    if paths and not files:
        raise CourseError(f"no notebook and no .py file in {', '.join(map(str, paths))}")
    known = {}
    for path in files:
        text = path.read_text("utf-8", errors="replace")
        try:
            cells = json.loads(text)["cells"] if path.suffix == ".ipynb" else [{"cell_type": "code", "source": text}]
            known[str(path)] = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
        except (ValueError, KeyError, TypeError) as error:
            raise CourseError(f"{path} is not a notebook ({type(error).__name__})") from error
    return known


def _print_report(found: Report) -> None:
    from grader.reports.report import NO_PROOF

    graded = len(found.totals)
    console.print(
        f"{found.lab}: {graded} graded of {found.students} students, {len(found.not_handed_in)} handed nothing in, "
        f"{len(found.not_graded)} not graded yet, {len(found.waiting)} wait for a person"
    )
    if graded:
        least, lower, middle, upper, most = found.quartiles
        console.print(
            f"Of {found.points:g} points: least {least:.4g}, quartiles {lower:.4g}, {middle:.4g}, {upper:.4g}, "
            f"largest {most:.4g}, mean {found.mean:.4g}"
        )
        width = max(found.histogram)
        for number, count in enumerate(found.histogram):
            bar = "█" * round(40 * count / width) or ("▏" if count else "")
            console.print(f"{number * 10:>3}-{number * 10 + 10:<3} % {bar} {count}", highlight=False)
    checks = Table("check", "passed", "failed", "not tried", "median s", "likely cause", title="Checks")
    for check in found.checks:
        likely = "; ".join(f"{count}x {fault}" for fault, count in check.likely[:2])
        checks.add_row(*map(escape, (shown_line(check.grade_id), f"{check.passed} of {graded}", str(check.failed),
                                     str(check.untried), f"{check.seconds:.2f}", shown_line(likely))))  # fmt: skip
    console.print(checks)
    _list("Failed together, with the known mistakes that do exactly this", [
        f"{_count(len(pattern.students))}: {' or: '.join(pattern.faults) or 'no known mistake'} "
        f"({', '.join(pattern.checks)}; {_some(pattern.students)})" for pattern in found.patterns[:10]])  # fmt: skip
    _list("Not graded in the ordinary way", [": ".join(part for part in row if part) for row in found.trouble])
    _list("Flags, for you to look at; students do not see them", [f"{who}: {flag}" for who, flag in found.flags])
    _list("Slow", [f"{student}: {seconds:.1f} s" for student, seconds in found.slow[:10]])
    _list("Late", [_late_line(one) for one in found.late])
    _list("Without a time of handing in; not penalised", list(found.without_time))
    if found.similar and (found.similar.pairs or found.similar.known):
        alike = [f"{len(cluster)} alike: {_some(cluster)}" for cluster in found.similar.clusters[:20]]
        alike += [f"{pair.left} and {pair.right}: {pair.share:.0%} in common" for pair in found.similar.known[:20]]
        _list(f"Similar. {NO_PROOF}", alike)
    table = Table("student", "points", "state", "seconds", title="Submissions")
    for score, result in found.rows:
        points = "not graded" if score.total is None else f"{score.total:.4g} of {score.max_score:g}"
        table.add_row(*map(escape, (shown_line(score.student), points, result.status if result else "",
                                    f"{result.seconds:.1f}" if result else "")))  # fmt: skip
    console.print(table)


def _list(title: str, lines: list[str]) -> None:
    if lines:
        console.print(f"\n{title.rstrip('.')}:", markup=False)
    for line in lines:
        console.print(f"  {shown_line(line, 500)}", markup=False, highlight=False, soft_wrap=True)


def _count(students: int) -> str:
    return f"{students} student{'' if students == 1 else 's'}"


def _some(names: tuple[str, ...], most: int = 6) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


@app.command(epilog="Example: inferlab grade regrade 02 --dry-run")
def regrade(
    lab: LabArgument,
    course: CourseOption = Path(),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would change and record nothing.")] = False,
    workers: Annotated[int | None, typer.Option(help="As for `run`.", min=1)] = None,
    executor: Annotated[str, typer.Option(help="As for `run`.")] = "",
    insecure: Annotated[bool, typer.Option("--insecure", help="As for `run`.")] = False,
) -> None:
    """After a test was fixed and the lab released again: grade all again, and show old against new.

    The old results stay in results/LAB/history/; points that a person gave stay.
    """
    from grader.courses import regrade as regrading
    from grader.courses.batch import lab_setup
    from grader.courses.scores import results

    try:
        root, slug = _open(course, lab)
        version = lab_setup(root, slug).lab_version
        before = {result.lab_version for result in results(root, slug).values()}
        if before == {version}:
            console.print("The checks are those of the last grading.")
        with Progress(TextColumn("{task.completed}/{task.total}"), BarColumn(), TimeRemainingColumn(), console=console,
                      transient=True) as progress:  # fmt: skip
            from grader.courses.grading import students

            task = progress.add_task("", total=len(students(root, slug)))

            def tick(_: Result) -> None:
                progress.advance(task)

            changes = regrading.regrade(root, slug, dry_run, tick, workers=workers, executor=executor,
                                        insecure=insecure)  # fmt: skip
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
            console.print(f"{name}: gained by {_count(gained)}, lost by {lost}", markup=False)
    said = "Nothing was recorded." if dry_run else f"Recorded; the old results are in results/{slug}/history/."
    console.print(f"{len(changes)} graded again, {table.row_count} changed. {said}", markup=False)


def _points(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


@app.command(epilog='Example: inferlab grade due 02 "2027-03-01 23:59 Europe/Berlin"')
def due(
    lab: LabArgument,
    when: Annotated[str, typer.Argument(help="YYYY-MM-DD HH:MM ZONE, or never.")],
    course: CourseOption = Path(),
) -> None:
    """Set when a lab is due. What being late costs: inferlab grade late."""
    from grader.courses.late import set_due

    try:
        root, slug = _open(course, lab)
        moment = set_due(root, slug, when)
    except CourseError as error:
        _stop(error)
    if moment is None:
        console.print(f"{slug} is never due.")
        return
    console.print(
        f"{slug} is due {moment:%A, %Y-%m-%d %H:%M %Z}, which is {moment.astimezone(UTC):%Y-%m-%d %H:%M} UTC."
    )


@app.command(epilog="Example: inferlab grade extend alice 02 3")
def extend(
    student: Annotated[str, typer.Argument(help="The student's id.")],
    lab: LabArgument,
    days: Annotated[int, typer.Argument(help="Days in all; 0 takes an extension back.", min=0, max=365)],
    course: CourseOption = Path(),
) -> None:
    """Give a student more time for a lab. Works before and after grading."""
    from grader.courses.late import extend as extend_student

    try:
        root, slug = _open(course, lab)
        moment = extend_student(root, slug, student, days)
    except CourseError as error:
        _stop(error)
    console.print(f"{slug} is due for {shown_line(student)} {moment:%A, %Y-%m-%d %H:%M %Z}.", markup=False)


@app.command(epilog="Example: inferlab grade late 02 --grace-minutes 15 --per-day 0.1 --maximum 0.5")
def late(
    lab: LabArgument,
    course: CourseOption = Path(),
    grace_minutes: Annotated[float | None, typer.Option(help="Minutes that cost nothing.")] = None,
    per_day: Annotated[float | None, typer.Option(help="Fraction of the lab's points for each day begun.")] = None,
    maximum: Annotated[float | None, typer.Option(help="Largest fraction taken off.")] = None,
) -> None:
    """Say who was late and what it costs, after setting the course's policy where options are given."""
    from dataclasses import asdict

    from grader.courses.late import Policy, read_policy, settle, without_time, write_policy

    try:
        root, slug = _open(course, lab)
        policy = old = read_policy(root)
        for name, value in (("grace_minutes", grace_minutes), ("per_day", per_day), ("maximum", maximum)):
            if value is not None:
                policy = Policy(**{**asdict(policy), name: value})
        if policy != old:
            write_policy(root, policy)
        found = settle(root, slug)
    except CourseError as error:
        _stop(error)
    console.print(f"Due: {policy.due.get(slug, 'never')}. A day costs {policy.per_day:.0%} of the points, at most "
                  f"{policy.maximum:.0%}; {policy.grace_minutes:g} minutes of grace.", markup=False)  # fmt: skip
    _list("Late", [_late_line(one) for one in found if one.days])
    _list("Without a time of handing in; not penalised", without_time(root, slug, found))


def _late_line(one: Late) -> str:
    return f"{one.student}: {one.days} day{'' if one.days == 1 else 's'}, {one.penalty:g} points off"


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
    from grader.courses.scores import results, scores
    from grader.reports import export as exports

    try:
        root, slug = _open(course, lab)
        if form not in exports.FORMATS:
            raise CourseError(f"there is no format {form!r}; formats: {', '.join(exports.FORMATS)}")
        people, graded = scores(root, slug), results(root, slug)
        if anonymous:
            people, graded = exports.anonymised(root, people, graded)
        if form == "gradescope":
            files = {f"{person.student}/results.json": exports.gradescope_json(person, graded[person.student])
                     for person in people if person.student in graded}  # fmt: skip
        else:
            text = {"csv": lambda: exports.gradebook_csv(slug, people, graded),
                    "canvas": lambda: exports.canvas_csv(column or slug, people),
                    "moodle": lambda: exports.moodle_csv(people, graded)}[form]()  # fmt: skip
            files = {"": text}
        _write(files, output, form)
    except (CourseError, OSError) as error:
        _stop(error)
    missing = sum(person.total is None for person in people)
    typer.echo(f"{len(people)} students, {missing} of them without a grade.", err=True)


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
    console.print(f"{_count(len(chosen))} {said}.")


def _open(course: Path, lab: str) -> tuple[Path, str]:
    from grader.courses.grading import lab_slug

    root = open_course(course)
    return root, lab_slug(root, lab)
