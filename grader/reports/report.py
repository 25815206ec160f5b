"""The report on a lab for its instructor: scores, hard checks, likely misconceptions, and what to look at.

Scores are the gradebook's, with manual changes and late penalties; the rest is in `results/` and `submitted/`. The
report is data; `report_cli.py` prints it, `report_page` makes one HTML page of it, and `--json` writes it as it is.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from grader.courses.late import Late, settle, without_time
from grader.courses.misconceptions import (
    Misconception,
    explanations,
    failed_checks,
    failed_on_property,
    read_misconceptions,
)
from grader.courses.recorded import Damaged, recorded
from grader.courses.scores import Score, scores
from grader.labs.lab import Lab, load_lab
from grader.reports.similarity import Similar, similar
from grader.results.result import NO_CELLS, Result
from grader.results.shown_text import shown_line

BINS = 10
SLOW = 3.0  # times the median
MANY = "one of {} known mistakes, under 'Failed together'"
NO_PROOF = (
    "Similarity is a reason to look, not a proof: short functions have few ways to be written, and students may "
    "share a source that they were allowed to use."
)


@dataclass(frozen=True)
class CheckRow:
    """One check over all graded submissions. seconds: median; likely: (fault, students) of the misconceptions that
    explain failures of it, the most frequent first; where several fit, their number, and no one of them is named.
    """

    grade_id: str
    property: str
    points: float
    passed: int
    failed: int
    untried: int
    seconds: float
    likely: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Pattern:
    """Checks that several students failed together. faults: the known misconceptions that do exactly this; where there
    is more than one, the checks cannot tell them apart. explained: the checks that they explain, without those that
    ended in a time-out, a crash or an exception.
    """

    checks: tuple[str, ...]
    faults: tuple[str, ...]
    students: tuple[str, ...]
    explained: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """A lab's report. quartiles: least, lower quartile, median, upper quartile, largest; histogram: students by tenths
    of the points; trouble: (student, status, reason); slow: (student, seconds); flags: (student, flag);
    stale: points by hand from before the last grading, a line each; damaged: whose result cannot be read; their points
    are in the totals, what the grader saw is nowhere.
    """

    lab: str
    made: str
    points: float
    students: int
    not_handed_in: tuple[str, ...]
    not_graded: tuple[str, ...]
    waiting: tuple[str, ...]
    totals: tuple[float, ...]
    mean: float
    quartiles: tuple[float, ...]
    histogram: tuple[int, ...]
    checks: tuple[CheckRow, ...]
    patterns: tuple[Pattern, ...]
    trouble: tuple[tuple[str, str, str], ...]
    slow: tuple[tuple[str, float], ...]
    flags: tuple[tuple[str, str], ...]
    late: tuple[Late, ...]
    without_time: tuple[str, ...]
    stale: tuple[str, ...]
    damaged: tuple[Damaged, ...]
    similar: Similar | None
    rows: tuple[tuple[Score, Result | None], ...] = field(default=())


def make_report(root: Path, slug: str, known: dict[str, list[str]] | None = None) -> Report:
    """The report of a lab of the course. known: more solutions to compare with, as cells by name.

    Raises CourseError.
    """
    read, people, lateness = recorded(root, slug), scores(root, slug), settle(root, slug)
    graded, damaged = read.results, {one.student for one in read.damaged}
    handed_in = {path.parent.name for path in (root / "submitted").glob(f"*/{slug}") if path.is_dir()}
    table = read_misconceptions(root, slug)
    patterns = _patterns(graded, table)
    totals = sorted(person.total for person in people if person.total is not None)
    points = max((person.max_score for person in people), default=0.0)
    seconds = statistics.median([result.seconds for result in graded.values()] or [0.0])
    return Report(
        lab=slug,
        made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        points=points,
        students=len(people),
        not_handed_in=tuple(person.student for person in people if person.student not in handed_in),
        not_graded=tuple(sorted(handed_in - set(graded) - damaged)),
        waiting=tuple(person.student for person in people if person.waits),
        totals=tuple(totals),
        mean=statistics.fmean(totals) if totals else 0.0,
        quartiles=quartiles(totals),
        histogram=histogram(totals, points),
        checks=_check_rows(list(graded.values()), patterns),
        patterns=patterns,
        trouble=tuple(
            (student, result.status, shown_line(result.reason or NO_CELLS))
            for student, result in graded.items()
            if result.status not in ("passed", "failed") or (NO_CELLS in result.notes and not result.earned)
        ),
        slow=tuple(
            sorted(
                ((s, round(r.seconds, 2)) for s, r in graded.items() if r.seconds > max(1.0, SLOW * seconds)),
                key=lambda item: -item[1],
            )
        ),
        flags=tuple((student, shown_line(flag)) for student, result in graded.items() for flag in result.flags),
        late=tuple(one for one in lateness if one.days),
        without_time=tuple(without_time(root, slug, (one for one in lateness if one.due is not None))),
        stale=tuple(f"{person.student}: {one}" for person in people for one in person.stale),
        damaged=read.damaged,
        similar=compare(root, slug, sorted(handed_in & (set(graded) | damaged)), known or {}),
        rows=tuple((person, graded.get(person.student)) for person in people if person.student in handed_in),
    )


def quartiles(totals: Sequence[float]) -> tuple[float, ...]:
    """Least, lower quartile, median, upper quartile, largest (linear between values); empty without values."""
    if not totals:
        return ()
    inner = statistics.quantiles(totals, n=4, method="inclusive") if len(totals) > 1 else [totals[0]] * 3
    return (min(totals), *inner, max(totals))


def histogram(totals: Sequence[float], points: float) -> tuple[int, ...]:
    """How many in each tenth of the points; the last one includes full marks and more."""
    bins = [0] * BINS
    for total in totals:
        bins[min(BINS - 1, int(total / points * BINS + 1e-9)) if points else 0] += 1
    return tuple(bins)


def _patterns(graded: dict[str, Result], table: Sequence[Misconception]) -> tuple[Pattern, ...]:
    """Groups of students with the same explanation, or, where none is known, the same failed checks."""
    groups: dict[tuple[tuple[str, ...], ...], list[str]] = defaultdict(list)
    for student, result in graded.items():
        tried, _ = failed_checks(result)
        if tried and result.status not in ("refused", "machinery"):
            found = explanations(result, table)
            explained = tuple(sorted(failed_on_property(result)))
            groups[tuple(sorted(tried)), tuple(one.fault for one in found), explained].append(student)
    found_patterns = (
        Pattern(checks, faults, tuple(students), explained) for (checks, faults, explained), students in groups.items()
    )
    return tuple(sorted(found_patterns, key=lambda pattern: (-len(pattern.students), pattern.checks)))


def _check_rows(graded: Sequence[Result], patterns: Sequence[Pattern]) -> tuple[CheckRow, ...]:
    by_id: dict[str, list[Any]] = defaultdict(list)
    for result in graded:
        for check in result.checks:
            by_id[check.grade_id].append((check, check.grade_id in failed_checks(result)[0]))
    rows = []
    for grade_id, seen in by_id.items():
        likely: dict[str, int] = defaultdict(int)
        for pattern in patterns:
            if grade_id in pattern.explained and pattern.faults:
                fault = pattern.faults[0] if len(pattern.faults) == 1 else MANY.format(len(pattern.faults))
                likely[fault] += len(pattern.students)
        check, passed = seen[-1][0], sum(one.status == "passed" for one, _ in seen)
        failed = sum(tried for _, tried in seen)
        middle = statistics.median(one.seconds for one, _ in seen)
        ranked = tuple(sorted(likely.items(), key=lambda item: (-item[1], item[0])))
        rows.append(
            CheckRow(
                grade_id, check.property, check.points, passed, failed, len(seen) - passed - failed, middle, ranked
            )
        )
    return tuple(rows)


def compare(root: Path, slug: str, students: Sequence[str], known: dict[str, list[str]]) -> Similar | None:
    """Similarity of what was handed in, also to the course's solution, the public one and `known`."""
    release = next((root / "labs" / slug).glob("*.ipynb"), None)
    if release is None or not students:
        return None
    name = release.name
    lab = load_lab(release)
    cells = {}
    for student in students:
        try:
            cells[student] = written_cells(root / "submitted" / student / slug / name, lab)
        except (OSError, ValueError, KeyError, TypeError):  # a damaged file of one student
            cells[student] = []  # which the report names among those not compared
    stub = [cell.source for cell in lab.cells if cell.kind != "text"]
    return similar(cells, stub, {**_solutions(root, slug, name, lab), **known})


def written_cells(notebook: Path, lab: Lab) -> list[str]:
    """The sources of the solution cells and of added code cells of a submitted or solution notebook."""
    ours = {cell.grade_id for cell in lab.cells if cell.kind != "solution"}
    found = []
    for cell in json.loads(notebook.read_text("utf-8"))["cells"]:
        grade_id = (cell["metadata"].get("nbgrader") or {}).get("grade_id")
        if cell["cell_type"] == "code" and grade_id not in ours:
            found.append("".join(cell["source"]))
    return found


def _solutions(root: Path, slug: str, name: str, lab: Lab) -> dict[str, list[str]]:
    from grader.study.workspace import data_root

    places = {"this course's solution": root / "solutions" / slug / name,
              "the public solution": data_root() / "solutions" / slug / name}  # fmt: skip
    found = {title: written_cells(path, lab) for title, path in places.items() if path.is_file()}
    if len(set(map(tuple, found.values()))) < len(found):
        found.pop("the public solution")  # the course hands out the public lab
    return found
