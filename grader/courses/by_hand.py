"""Points and comments that a person gives, by command or from a CSV file, where nbgrader's formgrader keeps its own.

Points by hand count in place of the grader's, also for a better submission that came later. Where a lab was graded
again since, nbgrader marks them as waiting for a person; here they are called stale, until one keeps or drops them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grader.course import CourseError
from grader.courses.late import gradebook
from grader.submissions.csv_file import column_name, csv_rows

AUTOMATIC = "auto"  # in place of points: the grader's count again
COLUMNS = ("student", "check", "points", "comment")


@dataclass(frozen=True)
class Stale:
    """Points by hand from before a cell was graded again. automatic: the grader's now, None where it gives none."""

    check: str
    by_hand: float
    automatic: float | None

    def __str__(self) -> str:
        now = "" if self.automatic is None else f", the grader gives {self.automatic:g} now"
        return f"{self.check}: {self.by_hand:g} by hand{now}"


@dataclass(frozen=True)
class Given:
    """What a person gives one cell of one student. points: None leaves them, AUTOMATIC takes those by hand back."""

    student: str
    check: str
    points: float | str | None = None
    comment: str | None = None


def given_by_hand(grade: Any) -> bool:
    """Whether a person has a part in the points of nbgrader's `grade`."""
    return grade.manual_score is not None or bool(grade.extra_credit)


def stale_of(grades: Iterable[Any]) -> tuple[Stale, ...]:
    """The points by hand that wait for a person, among one submission's grades in nbgrader's gradebook."""
    return tuple(
        Stale(grade.name, float(grade.manual_score), None if grade.auto_score is None else float(grade.auto_score))
        for grade in grades
        if grade.manual_score is not None and grade.needs_manual_grade
    )


def settle_stale(root: Path, slug: str, drop: bool, students: Sequence[str] | None = None) -> list[tuple[str, Stale]]:
    """Drop or keep all stale points of a lab (of some students). Returns them, by student. Raises CourseError."""
    done = []
    with gradebook(root, slug) as book:
        for submission in book.assignment_submissions(slug):
            if students is not None and submission.student.id not in students:
                continue
            for grade in (grade for part in submission.notebooks for grade in part.grades):
                for one in stale_of([grade]):
                    done.append((submission.student.id, one))
                    if drop:
                        grade.manual_score = None
                    grade.needs_manual_grade = grade.manual_score is None and grade.auto_score is None
        book.db.commit()
    return sorted(done, key=lambda item: item[0])


def read_points(path: Path) -> list[Given]:
    """The rows of a CSV file with the columns student, check, points, comment. Raises CourseError."""
    guessed: list[str] = []
    rows = list(csv_rows(path, COLUMNS, guessed))
    if guessed:
        raise CourseError(f"{path} is not UTF-8: save it as CSV UTF-8")
    names = list(map(column_name, rows[0][1])) if rows else []
    if not {"student", "check"} <= set(names) or not {"points", "comment"} & set(names):
        raise CourseError(f"{path}: expected the columns {', '.join(COLUMNS)} (one of the last two may be missing), "
                          f"found {', '.join(names) or 'none'}")  # fmt: skip
    found = []
    for number, row in rows[1:]:
        cells = dict.fromkeys(COLUMNS, "") | {name: cell.strip() for name, cell in zip(names, row, strict=False)}
        if any(cells[name] for name in COLUMNS):
            text = cells["points"]
            if re.fullmatch(r"\d+,\d\d?", text):  # in a cell of its own: a spreadsheet's decimal comma
                text = text.replace(",", ".")
            points = points_in(text, f"{path}, line {number}")
            found.append(Given(cells["student"], cells["check"], points, cells["comment"] or None))
    return found


def points_in(text: str, where: str = "POINTS") -> float | str | None:
    """A number, AUTOMATIC, or None for an empty text. Raises CourseError."""
    if text in ("", AUTOMATIC):
        return text or None
    try:
        points = float(text)
    except ValueError:
        points = -1.0
    if not 0 <= points < float("inf"):
        raise CourseError(f"{where}: expected points, a number from 0, or {AUTOMATIC!r}, found {text!r}")
    return points


def give(root: Path, slug: str, given: Sequence[Given]) -> list[str]:
    """Write all of it, or nothing. Returns a line for each. Raises CourseError."""
    from nbgrader.api import MissingEntry

    said: list[str] = []
    with gradebook(root, slug) as book:
        for one in given:
            try:
                submission = book.find_submission(slug, one.student)
            except MissingEntry:
                raise CourseError(f"{one.student!r} has handed in nothing that is graded in {slug}; nothing was "
                                  "written") from None  # fmt: skip
            said.append(f"{one.student}: {'; '.join(_give(submission, one))}")
        book.db.commit()
    return said


def _give(submission: Any, one: Given) -> list[str]:
    grades = {grade.name: grade for part in submission.notebooks for grade in part.grades}
    comments = {comment.name: comment for part in submission.notebooks for comment in part.comments}
    said = []
    if one.points is None and one.comment is None:
        raise CourseError(f"{one.student}, {one.check}: neither points nor a comment; nothing was written")
    if one.check not in grades and (one.points is not None or one.check not in comments):
        known = ", ".join(sorted(grades))
        raise CourseError(f"{one.student}: there is no check {one.check!r}; checks: {known}; nothing was written")
    if one.points is not None:
        grade = grades[one.check]
        if isinstance(one.points, float) and one.points > float(grade.max_score):
            raise CourseError(f"{one.student}, {one.check}: {one.points:g} points, and there are "
                              f"{float(grade.max_score):g}; nothing was written")  # fmt: skip
        grade.manual_score = None if one.points == AUTOMATIC else one.points
        grade.needs_manual_grade = grade.manual_score is None and grade.auto_score is None
        count = "the grader's points count again" if one.points == AUTOMATIC else f"{one.points:g} points"
        said.append(f"{one.check}: {count}")
    if one.comment is not None:
        place = one.check if one.check in comments else _answer_of(submission, one.check)
        if place not in comments:
            raise CourseError(f"{one.check} belongs to no cell that takes a comment; nothing was written")
        comments[place].manual_comment = one.comment
        said.append(f"comment at {place}")
    return said


def _answer_of(submission: Any, check: str) -> str:
    """The cell that a check is about, the last answer before it: nbgrader keeps comments at what a student writes."""
    answer = ""
    for part in submission.notebooks:
        solutions = {cell.name for cell in part.notebook.solution_cells}
        for cell in part.notebook.source_cells:
            answer = cell.name if cell.name in solutions else answer
            if cell.name == check:
                return answer
    return answer
