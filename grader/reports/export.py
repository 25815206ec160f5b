"""Grades in the forms that other systems read: plain CSV, Canvas, Moodle, Gradescope; also without names.

Everything comes from the gradebook: manual changes and late penalties are in it. Sources of the forms:
- Canvas: lib/gradebook_importer.rb of instructure/canvas-lms. The header begins with Student, ID, SIS User ID,
  SIS Login ID, Section; a student is found by ID, else by SIS User ID, else by SIS Login ID, else by name; the row
  whose first cell contains "Points Possible" sets a new assignment's points; a column named "Title (1234)" goes to
  assignment 1234, another name makes a new one.
- Moodle: mod/assign/feedback/offline of moodle/moodle, the grading worksheet of an assignment. It needs Identifier
  ("Participant 123"), Grade, and Last modified (grade), and takes Feedback comments (HTML) where that is on. For
  students without an identifier, the course's own grade import (docs.moodle.org/en/Grade_import) maps Email address or
  ID number.
- Gradescope: results.json of gradescope-autograders.readthedocs.io/en/latest/specs/.
"""

from __future__ import annotations

import csv
import html
import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from grader.course import CourseError, course_secret
from grader.courses.recorded import Damaged, state
from grader.courses.scores import Score
from grader.results.feedback import ACCEPTED, WRONG_FILE
from grader.results.result import NO_CELLS, WORDS, CheckResult, Result
from grader.results.shown_text import shown, shown_line

FORMATS = ("csv", "canvas", "moodle", "gradescope")
_STARTS = r"=+\-@|%＝＋－＠"  # of a formula
_WITHIN = re.compile(rf"([;\t\r\n][\s\"';]*+)([{_STARTS}]?)")  # matches whatever follows, so that it is linear
_WORDS = 10  # characters of a pseudonym: 50 bits, so that no two students of a class share one


def anonymised(
    root: Path, people: Sequence[Score], graded: Mapping[str, Result]
) -> tuple[list[Score], dict[str, Result]]:
    """The scores and results under pseudonyms, without names, times of day, or text that a student or an
    instructor wrote. A student has the same pseudonym in every lab of the course, and another one in another course.
    """
    names = {person.student: pseudonym(root, person.student) for person in people}
    if len(set(names.values())) < len(names):
        raise CourseError("two students would get the same pseudonym; nothing was written")
    hidden = [replace(person, student=names[person.student], first_name="", last_name="", email="", ids={},
                      submitted=None, comments=()) for person in people]  # fmt: skip
    silent = {
        names[student]: replace(result, student=names[student], notes=[], flags=[], printed="", received="", secret="",
                                checks=[replace(check, message="", seen="") for check in result.checks])
        for student, result in graded.items() if student in names
    }  # fmt: skip
    return sorted(hidden, key=lambda person: person.student), silent


def pseudonym(root: Path, student: str) -> str:
    """A student's name in anonymous exports of this course; it cannot be computed without the course's secret."""
    import base64
    import hmac

    digest = hmac.digest(course_secret(root, "pseudonyms"), student.encode(), "sha256")
    return "student-" + base64.b32encode(digest).decode().lower()[:_WORDS]


def gradebook_csv(
    slug: str, people: Sequence[Score], graded: Mapping[str, Result], damaged: Sequence[Damaged] = ()
) -> str:
    """One row per student: identity, points and penalty, state, and points per check."""
    checks = list(dict.fromkeys(name for person in people for name in person.cells))
    head = ["student", "first_name", "last_name", "email", "lab", "submitted_utc", "score", "late_penalty", "total",
            "max_score", "status", "waits_for_person", *checks]  # fmt: skip
    rows = []
    for person in people:
        status = state(person.student, graded.get(person.student), damaged)
        stamp = person.submitted.strftime("%Y-%m-%d %H:%M:%S") if person.submitted else ""
        rows.append([person.student, person.first_name, person.last_name, person.email, slug, stamp,
                     number(person.score), number(person.late_penalty), number(person.total),
                     number(person.max_score), status, "yes" if person.waits else "no",
                     *(number(person.cells.get(name)) for name in checks)])  # fmt: skip
    return csv_text([head, *rows])


def canvas_csv(column: str, people: Sequence[Score]) -> str:
    """The CSV for Canvas's Gradebook > Import. column: the assignment's header, best copied from Canvas's own export,
    with its number in brackets. Where the roster has no SIS User ID or SIS Login ID, the student's id stands there.
    Students who handed nothing in have an empty cell, which changes nothing there.
    """
    points = max((person.max_score for person in people), default=0.0)
    rows: list[list[str]] = [
        ["Student", "ID", "SIS User ID", "SIS Login ID", "Section", column],
        ["    Points Possible", "", "", "", "", number(points)],
    ]
    for person in people:
        name = f"{person.last_name}, {person.first_name}" if person.last_name and person.first_name else person.name
        ids = person.ids
        rows.append([name or person.student, ids.get("canvas_id", ""), ids.get("sis_user_id") or person.student,
                     ids.get("login") or person.student, ids.get("section", ""), number(person.total)])  # fmt: skip
    return csv_text(rows)


def moodle_csv(people: Sequence[Score], graded: Mapping[str, Result]) -> str:
    """Moodle's CSV: an assignment's "Upload grading worksheet", or the course's grade import by email or ID number."""
    rows = [["Identifier", "Full name", "ID number", "Email address", "Status", "Grade", "Maximum Grade",
             "Last modified (grade)", "Feedback comments"]]  # fmt: skip
    for person in people:
        result = graded.get(person.student)
        participant = person.ids.get("participant", "")
        rows.append([f"Participant {participant}" if participant else "", person.name,
                     person.ids.get("id_number") or person.student, person.email,
                     "Submitted for grading" if person.score is not None else "No submission", number(person.total),
                     number(person.max_score), "-", _moodle_feedback(person, result)])  # fmt: skip
    return csv_text(rows, ours="Feedback comments")


def _moodle_feedback(person: Score, result: Result | None) -> str:
    """Short HTML of the grader's own words, and an instructor's comments; nothing that the learner's code wrote."""
    if result is None:
        return ""
    lines = [f"{sum(check.status == 'passed' for check in result.checks)} of {len(result.checks)} checks passed."]
    lines += reasons_of(result)
    for check in () if result.status == "refused" else result.checks:
        if accepted(person, check):
            lines.append(f"{check.grade_id}: {ACCEPTED}.")
        elif check.status != "passed":
            hint = f" Hint: {check.hint}" if check.hint else ""
            lines.append(f"{check.grade_id}: {check.status}. {check.property}{hint}")
    if person.late_penalty:
        lines.append(f"Late: {number(person.late_penalty)} points taken off.")
    lines += [f"Comment: {comment}" for comment in person.comments]
    return "<br>".join(html.escape(shown_line(line, 1000)) for line in lines)


def reasons_of(result: Result) -> list[str]:
    """Why nothing of a submission was graded, in the grader's own words."""
    if result.status == "refused":
        return [f"Nothing was graded: {WORDS['refused']}: {result.reason}"]
    return [f"Nothing was graded: {WRONG_FILE}."] if NO_CELLS in result.notes and not result.earned else []


def accepted(person: Score, check: CheckResult) -> bool:
    """Whether a person gave full points for a check that did not pass."""
    given = check.grade_id in person.by_hand and person.cells.get(check.grade_id, 0.0) >= check.points > 0
    return given and check.status != "passed"


def gradescope_json(person: Score, result: Result) -> str:
    """The results.json of one student, as an autograder writes it. What a check says is shown after the due date."""
    late = f"Late: {number(person.late_penalty)} points taken off." if person.late_penalty else ""
    tests = [_gradescope_test(number, check, person) for number, check in enumerate(result.checks, 1)]
    checks = {check.grade_id for check in result.checks}
    tests += [
        {"name": f"{name} (by hand)", "score": points, "max_score": points, "visibility": "after_due_date"}
        for name, points in person.cells.items()
        if name not in checks
    ]
    data: dict[str, Any] = {
        "score": person.total if person.total is not None else 0.0,
        "execution_time": round(result.seconds, 2),
        "output": " ".join([f"{result.lab}: {result.status}.", late]).strip(),
        "output_format": "text",
        "test_output_format": "text",
        "test_name_format": "text",
        "visibility": "after_due_date",
        "stdout_visibility": "hidden",
        "tests": tests,
    }
    return json.dumps(data, indent=1, ensure_ascii=False) + "\n"


def _gradescope_test(number: int, check: CheckResult, person: Score) -> dict[str, Any]:
    done = accepted(person, check)
    said = [ACCEPTED if done else check.status, check.message, check.seen and f"What was measured:\n{check.seen}"]
    if check.status != "passed" and check.hint and not done:
        said.append(f"Hint: {check.hint}")
    return {
        "number": str(number),
        "name": f"{check.grade_id}: {shown_line(check.property, 1000)}",
        "score": person.cells.get(check.grade_id, check.earned),
        "max_score": check.points,
        "status": "passed" if done or check.status == "passed" else "failed",
        "output": shown("\n\n".join(text for text in said if text)),
        "visibility": "after_due_date",
    }


def number(value: float | None) -> str:
    """A number of points as a cell; empty where there is none."""
    return "" if value is None else f"{value:.10g}"


def csv_text(rows: Iterable[Sequence[str]], ours: str = "") -> str:
    """Rows as CSV, with no cell that a spreadsheet takes for a formula. ours: the column in whose cells no student's
    text stands, so that what follows a semicolon there stays as it is.
    """
    file, table = io.StringIO(), list(rows)
    kept = table[0].index(ours) if ours else -1
    lines = [[_cell(cell, number == kept) for number, cell in enumerate(row)] for row in table]
    csv.writer(file, lineterminator="\r\n").writerows(lines)
    return file.getvalue()


def _cell(text: str, ours: bool) -> str:
    """A cell that no spreadsheet takes for a formula: OWASP's rule, a quote before = + - @, tab or line end; a plain
    number stays one. Where semicolons or tabs part cells, as in a German Excel, a cell begins within this one, too: CSV
    quotes help there only in the first of a line.
    """
    text = shown(text)
    if not ours:
        text = _WITHIN.sub(lambda found: f"{found[1]}'{found[2]}" if found[2] else found[1], text)
    if re.fullmatch(r"-?\d+(\.\d+)?", text) or text == "-" or not re.match(rf"\s*[{_STARTS}\t\r\n]", text):
        return text
    return "'" + text
