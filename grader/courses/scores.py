"""What the gradebook says about a lab: scores with manual changes and late penalties, for every student of the course.

Reports and exports read scores here and nowhere else; `results/` holds what the grader saw, the gradebook what counts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath

from grader.courses.by_hand import Stale, given_by_hand, stale_of
from grader.submissions.history import DamagedReceipt, read_history
from grader.submissions.lms import moodle_participant
from grader.submissions.roster import Roster, load_roster


@dataclass(frozen=True)
class Score:
    """One student and one lab. score: before the late penalty; None where nothing was handed in or graded yet."""

    student: str
    first_name: str
    last_name: str
    email: str
    max_score: float
    ids: dict[str, str] = field(default_factory=dict)  # the student's ids in an LMS, by kind, as in roster.py
    score: float | None = None
    late_penalty: float = 0.0
    submitted: datetime | None = None
    waits: bool = False  # a person has to grade or look
    cells: dict[str, float] = field(default_factory=dict)  # points by grade_id, as they count
    comments: tuple[str, ...] = ()  # an instructor's
    by_hand: frozenset[str] = frozenset()  # the cells whose points a person gave
    stale: tuple[Stale, ...] = ()  # points by hand from before the submission was graded again

    @property
    def total(self) -> float | None:
        return None if self.score is None else max(0.0, self.score - self.late_penalty)

    @property
    def name(self) -> str:
        return " ".join(part for part in (self.first_name, self.last_name) if part)


def scores(root: Path, slug: str) -> list[Score]:
    """All students of the gradebook, sorted by id, with what counts for the lab. Raises CourseError."""
    from grader.courses.late import assignment_of, gradebook, settle, submissions_of

    settle(root, slug)  # a score changed by hand changes what being late costs
    roster = load_roster(root)
    with gradebook(root, slug) as book:
        assignment = assignment_of(book, slug)
        maximum = float(assignment.max_score or 0.0)
        handed_in = {submission.student_id: submission for submission in submissions_of(book, assignment)}
        found = []
        for student in book.students:
            person = (student.id, student.first_name or "", student.last_name or "", student.email or "", maximum,
                      known_ids(root, slug, student.id, roster))  # fmt: skip
            submission = handed_in.get(student.id)
            if submission is None or not result_exists(root, slug, student.id):
                found.append(Score(*person))
                continue
            stamp, parts = submission.timestamp, list(submission.notebooks)
            found.append(
                Score(
                    *person,
                    score=float(submission.score or 0.0),
                    late_penalty=float(submission.late_submission_penalty or 0.0),
                    submitted=stamp.replace(tzinfo=UTC) if stamp else None,
                    waits=bool(submission.needs_manual_grade),
                    cells={grade.name: float(grade.score or 0.0) for part in parts for grade in part.grades},
                    by_hand=frozenset(g.name for part in parts for g in part.grades if given_by_hand(g)),
                    stale=tuple(one for part in parts for one in stale_of(part.grades)),
                    comments=tuple(c.manual_comment for part in parts for c in part.comments if c.manual_comment),
                )
            )
    return sorted(found, key=lambda score: score.student)


def known_ids(root: Path, slug: str, student: str, roster: Roster) -> dict[str, str]:
    """The ids of a student in an LMS, by kind: the roster's, and those from the names in a download.

    `participant` is one number: Moodle's for this lab, from the download, or the roster's where it has only one; none
    where the receipts are damaged, since it may be another lab's.
    """
    entry = roster.students.get(student)
    ids = dict(entry.ids) if entry else {}
    if len(ids.get("participant", "").split()) > 1:
        ids.pop("participant")
    form, _, number = roster.others.get(student, "").partition(":")
    if form == "canvas" and number.isdigit():
        ids.setdefault("canvas_id", number)
    try:
        history = read_history(root, slug, student)
    except DamagedReceipt:
        ids.pop("participant", None)
        return ids
    for version in history[-1:]:
        if version.form == "moodle" and (number := moodle_participant(PurePosixPath(version.path))):
            ids["participant"] = number
    return ids


def result_exists(root: Path, slug: str, student: str) -> bool:
    return (root / "results" / slug / f"{student}.json").exists()
