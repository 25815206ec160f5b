"""A gradebook over all labs of a course: a row for each student, a column for each lab, and the sum."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from grader.course import CourseError
from grader.courses.attempts import best_earlier
from grader.courses.recorded import Damaged
from grader.reports.class_labs import class_labs
from grader.reports.export import csv_text, number


@dataclass(frozen=True)
class Row:
    """One student. points: by lab, after late penalties, None where nothing counts yet."""

    student: str
    name: str
    points: dict[str, float | None]

    @property
    def total(self) -> float:
        return sum(points or 0.0 for points in self.points.values())


@dataclass
class Book:
    """A gradebook. maxima: the points of each released lab; rows: students, sorted by id; problems: labs that cannot be
    read, a line each, whose columns are empty; damaged: results and earlier attempts that cannot be read; stale: points
    by hand from before the last grading, which count, a line each.
    """

    maxima: dict[str, float] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    damaged: list[Damaged] = field(default_factory=list)
    stale: list[str] = field(default_factory=list)


def book(root: Path, best: bool = False) -> Book:
    """The gradebook over all labs. best: of all attempts, not the latest one.

    Raises CourseError where no lab at all can be read.
    """
    labs, made = class_labs(root), Book()
    if labs and all(lab.problem for lab in labs):
        raise CourseError(labs[0].problem)
    people: dict[str, Row] = {}
    for lab in labs:
        made.maxima[lab.slug] = lab.points
        made.problems += [f"{lab.slug}: {lab.problem}"] if lab.problem else []
        made.damaged += lab.recorded.damaged
        for score in lab.scores.values():
            row = people.setdefault(
                score.student, Row(score.student, score.name, dict.fromkeys(one.slug for one in labs))
            )
            row.points[lab.slug] = score.total
            made.stale += [f"{lab.slug}: {score.student}: {one}" for one in score.stale]
            if best and score.total is not None:  # with the penalty of the latest attempt, and never less than it has
                earlier, damaged = best_earlier(root, lab.slug, score.student)
                row.points[lab.slug] = max(score.total, earlier - score.late_penalty)
                made.damaged += damaged
    made.rows = [people[student] for student in sorted(people)]
    return made


def book_csv(made: Book) -> str:
    """The gradebook as CSV; the first row after the head holds what there is to earn."""
    head = ["student", "name", *made.maxima, "total"]
    most = ["", "points possible", *map(number, made.maxima.values()), number(sum(made.maxima.values()))]
    people = [[row.student, row.name, *map(number, row.points.values()), number(row.total)] for row in made.rows]
    return csv_text([head, most, *people])
