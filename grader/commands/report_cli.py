"""`inferlab grade report`: what an instructor wants to know about a class."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from grader.commands.common import (
    STALE,
    CourseOption,
    LabArgument,
    console,
    how_many,
    listed,
    open_lab,
    some,
    stop_for_damaged,
)
from grader.course import CourseError
from grader.results.shown_text import shown_line
from grader.saying import stop as _stop

if TYPE_CHECKING:
    from grader.reports.report import Report

PATTERNS = 30  # that are printed


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
        root, slug = open_lab(course, lab)
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
    stop_for_damaged(found.damaged)


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
    from grader.courses.recorded import state
    from grader.reports.report import NO_PROOF
    from grader.reports.similarity import MAX_CODE

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
    together = [
        f"{how_many(len(pattern.students))}: {' or: '.join(pattern.faults) or 'no known mistake'} "
        f"({', '.join(pattern.checks)}; {some(pattern.students)})"
        for pattern in found.patterns[:PATTERNS]
    ]
    if (left := len(found.patterns) - PATTERNS) > 0:
        together.append(f"and {left} more: --html or --json FILE has all")
    listed("Failed together, with the known mistakes that do exactly this", together)
    listed("Not graded in the ordinary way", [": ".join(part for part in row if part) for row in found.trouble])
    listed("Flags, for you to look at; students do not see them", [f"{who}: {flag}" for who, flag in found.flags])
    listed(f"Points by hand from before the last grading; to drop or keep them: {STALE.format(found.lab)}", found.stale)
    listed("Slow", [f"{student}: {seconds:.1f} s" for student, seconds in found.slow[:10]])
    listed("Late", [one.line for one in found.late])
    listed("Without a time of handing in; not penalised", list(found.without_time))
    if found.similar and (found.similar.pairs or found.similar.known):
        alike = [f"{len(cluster)} alike: {some(cluster)}" for cluster in found.similar.clusters[:20]]
        alike += [f"{pair.left} and {pair.right}: {pair.share:.0%} in common" for pair in found.similar.known[:20]]
        listed(f"Similar. {NO_PROOF}", alike)
    if found.similar:
        title = f"Only the first {MAX_CODE} characters of their code were compared; look at the rest yourself"
        listed(title, list(found.similar.too_long))
    table = Table("student", "points", "state", "seconds", title="Submissions")
    for score, result in found.rows:
        points = "not graded" if score.total is None else f"{score.total:.4g} of {score.max_score:g}"
        table.add_row(*map(escape, (shown_line(score.student), points, state(score.student, result, found.damaged),
                                    f"{result.seconds:.1f}" if result else "")))  # fmt: skip
    console.print(table)
