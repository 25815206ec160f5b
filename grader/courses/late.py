"""Due dates, extensions, and what a late submission costs: `late.yaml` in the course folder.

A due date is a wall-clock time in a named zone. A day late is a day on that clock, 23 or 25 hours long where the clocks
change; so an extension of two days ends at the same time of day. Exactly at the due date is in time. A submission
without a time is never penalised, and listed. A time that is only a file's own, which unpacking and copying change,
costs nothing until the instructor has seen it and said that it holds.
"""

from __future__ import annotations

import textwrap
import zoneinfo
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from grader.course import CourseError, course_lock
from grader.courses.course import nbgrader_config
from grader.labs.release import course_directory
from grader.submissions.history import DamagedReceipt, read_history
from grader.submissions.receipt import is_doubtful
from grader.submissions.receipt import set_time as set_time_received
from grader.submissions.roster import load_roster

FORM = "YYYY-MM-DD HH:MM ZONE, such as 2027-03-01 23:59 Europe/Berlin"
HEADER = """\
# Due dates, extensions in days, and the cost of being late, of this course. Written by `inferlab grade due`, `extend`
# and `late`; you may edit it, and `inferlab grade late LAB` applies it to what is graded already. per_day and maximum
# are fractions of a lab's points; grace_minutes are free at the due date and at the end of every late day. file_times
# are times of files that were confirmed with `late LAB --file-times`, by lab and student.
"""


@dataclass
class Policy:
    """What `late.yaml` says. due: by lab, as FORM; extensions: whole days by lab and student; file_times: times of
    files that hold, by lab and student.
    """

    grace_minutes: float = 0.0
    per_day: float = 0.0
    maximum: float = 1.0
    due: dict[str, str] = field(default_factory=dict)
    extensions: dict[str, dict[str, int]] = field(default_factory=dict)
    file_times: dict[str, dict[str, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, low, high in (("grace_minutes", 0, 1e6), ("per_day", 0, 1), ("maximum", 0, 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
                raise CourseError(f"late.yaml: {name} is {value!r}, expected a number from {low:g} to {high:g}")
        if not all(isinstance(table, dict) for table in (self.due, self.extensions, self.file_times)):
            raise CourseError("late.yaml: due, extensions and file_times are tables, by lab")
        for lab, given in self.extensions.items():
            for student, days in (given or {}).items():
                if isinstance(days, bool) or not isinstance(days, int) or not 0 < days <= 365:
                    raise CourseError(
                        f"late.yaml: the extension of {student} for {lab} is {days!r}, expected 1 to 365 days"
                    )

    def fraction(self, days: int) -> float:
        """The fraction of a lab's points that `days` late cost."""
        return min(self.maximum, self.per_day * days)


@dataclass(frozen=True)
class Late:
    """One submission against its due date. due: with the extension, None without a due date; submitted: None where
    unknown; days: 0 is in time; penalty: points; unconfirmed: the time is a file's own, or has no zone, and is not
    confirmed, so nothing is taken off; rests_on: what the time rests on; in_time: the LMS says so of the same bytes, by
    its own due date.
    """

    student: str
    due: datetime | None
    submitted: datetime | None
    days: int
    penalty: float
    unconfirmed: bool = False
    rests_on: str = "the file's own time"
    in_time: bool = False

    @property
    def line(self) -> str:
        """A line about it for a list."""
        days = f"{self.student}: {self.days} day{'' if self.days == 1 else 's'}"
        if self.unconfirmed:
            lms = ", but in time, says the LMS" if self.in_time else ""
            when = f"{self.submitted:%Y-%m-%d %H:%M} UTC"
            return f"{days}, by {self.rests_on}, {when}{lms}; nothing off until confirmed"
        return f"{days}, {self.penalty:g} points off"


def parse_when(text: str) -> datetime:
    """The due date of a text, see FORM. Raises CourseError, also for a time that the change of clocks leaves out.

    A time that occurs twice means the later one, in the learner's favour.
    """
    clock, _, zone = text.strip().rpartition(" ")
    try:
        naive = datetime.strptime(clock.replace("T", " "), "%Y-%m-%d %H:%M" + (":%S" if clock.count(":") == 2 else ""))
    except ValueError:
        raise CourseError(f"{text!r} is not a due date; expected {FORM}") from None
    local = naive.replace(tzinfo=zone_named(zone, f"; expected {FORM}"), fold=1)
    if local.astimezone(UTC).astimezone(local.tzinfo).replace(tzinfo=None) != naive:
        raise CourseError(f"{clock} does not exist in {zone}: the clocks jump over it; choose another time")
    return local


def zone_named(name: str, expected: str = ", such as Europe/Berlin or UTC") -> zoneinfo.ZoneInfo:
    """A time zone. Raises CourseError."""
    try:
        return zoneinfo.ZoneInfo(name)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
        raise CourseError(f"{name!r} is not a time zone this machine knows{expected}. If no zone is known, "
                          "pip install tzdata") from None  # fmt: skip


def add_days(due: datetime, days: int) -> datetime:
    """The same time of day `days` later on the clock of the due date's zone; in a gap or overlap the later instant."""
    moved = (due.replace(tzinfo=None) + timedelta(days=days)).replace(tzinfo=due.tzinfo)
    return max(moved.replace(fold=0), moved.replace(fold=1), key=lambda moment: moment.astimezone(UTC))


def days_late(due: datetime, submitted: datetime) -> int:
    """Days begun after the due date: 0 up to and at it, 1 up to and at the same time on the next day, and so on."""
    days = max(0, (submitted - due).days - 1)  # a few steps short of the answer, whatever the clocks did
    while submitted.astimezone(UTC) > add_days(due, days).astimezone(UTC):
        days += 1
    return days


def read_policy(root: Path) -> Policy:
    """The course's policy; without a file nothing is due and nothing costs. Raises CourseError."""
    path = root / "late.yaml"
    if not path.exists():
        return Policy()
    try:
        data = yaml.safe_load(path.read_text("utf-8")) or {}
        policy = Policy(**data)
    except (yaml.YAMLError, TypeError) as error:
        raise CourseError(f"late.yaml cannot be read: {error}") from None
    for text in policy.due.values():
        parse_when(str(text))
    return policy


def write_policy(root: Path, policy: Policy) -> None:
    path = root / "late.yaml"
    whole = path.with_suffix(".yaml.new")
    whole.write_text(HEADER + yaml.safe_dump(asdict(policy), sort_keys=False), "utf-8")
    whole.replace(path)


def set_due(root: Path, slug: str, when: str) -> datetime | None:
    """Set the due date of a released lab (`never`: none), here and in the gradebook. Raises CourseError."""
    due = None if when == "never" else parse_when(when)
    policy = read_policy(root)
    policy.due.pop(slug, None)
    if due is not None:
        policy.due[slug] = when.strip()
    write_policy(root, policy)
    with gradebook(root, slug) as book:
        book.update_or_create_assignment(slug, duedate=due and _naive(due))
    settle(root, slug)
    return due


def extend(root: Path, slug: str, student: str, days: int) -> datetime:
    """Give a student `days` more in all for a lab; 0 takes the extension back. Returns the student's due date.

    Raises CourseError.
    """
    policy = read_policy(root)
    if slug not in policy.due:
        raise CourseError(f"{slug} has no due date; first: inferlab grade due {slug} WHEN")
    given = dict(policy.extensions.get(slug) or {})
    if given.pop(student, None) is None:
        must_be_known(root, student)
    if days:
        given[student] = days
    extended = Policy(**{**asdict(policy), "extensions": {**policy.extensions, slug: given}})
    write_policy(root, extended)
    settle(root, slug)
    return add_days(parse_when(policy.due[slug]), days)


def must_be_known(root: Path, student: str) -> None:
    """Raises CourseError, with whom may be meant, for a student whom neither the roster nor a submission knows."""
    roster = load_roster(root)
    handed_in = {path.name for top in ("received", "submitted") for path in (root / top).glob("[!.]*") if path.is_dir()}
    known = handed_in | roster.students.keys() | roster.others.keys()
    if student in known:
        return
    names = {one: one for one in known}
    names |= {name: one.id for one in roster.students.values() for name in (one.name, one.last_name, one.email) if name}
    folded = {name.casefold(): one for name, one in names.items()}
    found = roster.find([(kind, student) for kind in ("id", "login", "email", "name")])
    close = get_close_matches(student.casefold()[:100], folded, cutoff=0.7)
    near = [found.id] if found else [folded[name] for name in close]
    hint = f"; did you mean {' or '.join(dict.fromkeys(near))}?" if near else ""
    raise CourseError(f"{student} is neither in the roster nor has handed in anything{hint}")


def set_time(root: Path, slug: str, student: str, when: str) -> datetime | None:
    """Say when a student handed in what counts, as FORM, or that it is `unknown`. Raises CourseError."""
    moment = None if when == "unknown" else parse_when(when)
    must_be_known(root, student)
    try:
        with course_lock(root):
            set_time_received(root, slug, student, moment)
    except LookupError:
        raise CourseError(f"{student} has handed in nothing for {slug}") from None
    with gradebook(root, slug) as book:
        for submission in submissions_of(book, assignment_of(book, slug)):
            if submission.student_id == student:
                submission.timestamp = moment and _naive(moment)
        book.db.commit()
    settle(root, slug)
    return moment


def confirm_file_times(root: Path, slug: str, found: Iterable[Late]) -> None:
    """Confirms the times that are only a file's own: they count from now on, also for what being late costs."""
    policy = read_policy(root)
    times = {one.student: one.submitted.isoformat() for one in found if one.unconfirmed and one.submitted}
    policy.file_times[slug] = dict(policy.file_times.get(slug) or {}) | times
    write_policy(root, policy)


def settle(root: Path, slug: str) -> list[Late]:
    """Bring the gradebook's due date, extensions and penalties of a lab in line with the policy and with the scores as
    they are now; doing it again changes nothing. Raises CourseError, also where one who was late has damaged receipts,
    which say whether that costs points: then nothing is changed.
    """
    policy, found = read_policy(root), []
    damaged: list[DamagedReceipt] = []
    with gradebook(root, slug) as book:
        assignment = assignment_of(book, slug)
        if slug in policy.due:
            assignment.duedate = _naive(parse_when(policy.due[slug]))
        for submission in submissions_of(book, assignment):
            try:
                late = lateness(policy, slug, submission, root)
            except DamagedReceipt as error:
                damaged.append(error)
                continue
            if slug in policy.due:
                due = parse_when(policy.due[slug])
                days = (policy.extensions.get(slug) or {}).get(submission.student_id, 0)
                longer = add_days(due, days).astimezone(UTC) - due.astimezone(UTC)
                submission.extension = longer if days else None
            for notebook in submission.notebooks:
                notebook.late_submission_penalty = late.penalty or None
            found.append(late)
        if damaged:
            book.db.rollback()
            raise CourseError("\n".join(f"{one} (it says whether being late costs points)" for one in damaged))
        if book.db.dirty:
            book.db.commit()
    return sorted(found, key=lambda late: late.student)


def without_time(root: Path, slug: str, found: Iterable[Late]) -> list[str]:
    """Students whose submission has no time, in a line for each thing that the LMS said of them, those it called late
    first: a zip of Canvas or Moodle holds no times.
    """
    lines: list[str] = []
    said: dict[bool | None, list[str]] = {True: [], None: [], False: []}
    for one in found:
        if one.submitted is None:
            try:
                history = read_history(root, slug, one.student)
            except DamagedReceipt as error:
                lines.append(str(error))
                continue
            said[history[-1].late if history else None].append(one.student)
    words = {True: "late, says the LMS", None: "the LMS says nothing", False: "in time, says the LMS"}
    grouped = [f"{words[late]} ({len(who)}): {', '.join(who)}" for late, who in said.items() if who]
    return [part for line in grouped for part in textwrap.wrap(line, 300, break_on_hyphens=False)] + lines


def assignment_of(book: Any, slug: str) -> Any:
    """A lab in nbgrader's gradebook. Raises CourseError."""
    from nbgrader.api import MissingEntry

    try:
        return book.find_assignment(slug)
    except MissingEntry:
        raise CourseError(f"{slug} is not in the gradebook; first: inferlab grade release {slug}") from None


def submissions_of(book: Any, assignment: Any) -> list[Any]:
    """All nbgrader's submissions of an assignment, with their parts, in one query for each table: followed one by one,
    the relations and sums of a large class take thousands.
    """
    from nbgrader.api import Grade, SubmittedAssignment, SubmittedNotebook
    from sqlalchemy.orm import selectinload, undefer

    parts = selectinload(SubmittedAssignment.notebooks)
    options = [
        undefer(SubmittedAssignment.score),
        undefer(SubmittedAssignment.max_score),
        undefer(SubmittedAssignment.needs_manual_grade),
        undefer(SubmittedAssignment.late_submission_penalty),
        parts.selectinload(SubmittedNotebook.grades).undefer(Grade.score),
        parts.selectinload(SubmittedNotebook.comments),
    ]
    return list(book.db.query(SubmittedAssignment).filter_by(assignment_id=assignment.id).options(*options))


def lateness(policy: Policy, slug: str, submission: Any, root: Path) -> Late:
    """nbgrader's SubmittedAssignment against its due date: the policy's, or one set in the formgrader (in UTC).

    Raises DamagedReceipt where it depends on receipts that cannot be read.
    """
    due: datetime | None = None
    if slug in policy.due:
        days = (policy.extensions.get(slug) or {}).get(submission.student_id, 0)
        due = add_days(parse_when(policy.due[slug]), days)
    elif submission.duedate is not None:
        due = submission.duedate.replace(tzinfo=UTC)
    submitted = submission.timestamp and submission.timestamp.replace(tzinfo=UTC)
    if due is None or submitted is None:
        return Late(submission.student_id, due, submitted, 0, 0.0)
    late = days_late(due, submitted - timedelta(minutes=policy.grace_minutes))
    if late and (policy.file_times.get(slug) or {}).get(submission.student_id) != submitted.isoformat():
        history = read_history(root, slug, submission.student_id)
        if history and is_doubtful(history[-1].time_from):
            said, in_time = history[-1].time_from, history[-1].late is False
            return Late(
                submission.student_id, due, submitted, late, 0.0, unconfirmed=True, rests_on=said, in_time=in_time
            )
    points = policy.fraction(late) * float(submission.max_score or 0.0)
    return Late(submission.student_id, due, submitted, late, round(min(points, float(submission.score or 0.0)), 6))


@contextmanager
def gradebook(root: Path, slug: str) -> Iterator[Any]:
    """nbgrader's gradebook of the course. Raises CourseError where it cannot be used, such as while a run writes."""
    from nbgrader.api import Gradebook
    from sqlalchemy.exc import SQLAlchemyError

    try:
        with Gradebook(course_directory(nbgrader_config(root), slug).db_url) as book:
            yield book
    except SQLAlchemyError as error:
        said = str(getattr(error, "orig", None) or error).split("\n")[0]
        raise CourseError(
            f"the gradebook cannot be used: {said}. If a run is going on, wait until it has ended"
        ) from error


def _naive(moment: datetime) -> datetime:
    return moment.astimezone(UTC).replace(tzinfo=None)  # as nbgrader keeps it
