"""All feedback pages of a lab in one zip, named so that the LMS a submission came from gives each to its student.

- Canvas: app/models/abstract_assignment.rb of instructure/canvas-lms, `infer_comment_context_from_filename` ("Upload
  Submissions" in the gradebook's menu of an assignment): the first two numbers between `_` are the user and the file
  that was handed in, and the file must be that user's.
- Moodle: mod/assign/feedback/file/importziplib.php of moodle/moodle ("Upload multiple feedback files in a zip"): five
  parts between `_`, the second the participant's number, then assignsubmission and file, then the name that is shown.

A student's own name is not in a file's name: it may hold anything, also such numbers.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from grader.course import CourseError
from grader.courses.scores import known_ids
from grader.submissions.history import DamagedReceipt, Version, read_history
from grader.submissions.roster import Roster, load_roster


def write_feedback_zip(root: Path, slug: str, pages: Sequence[Path], target: Path) -> tuple[str, list[str]]:
    """Pack `pages`, each in feedback/STUDENT/LAB/. Returns the form, canvas, moodle or folders, and the students left
    out, whose submission did not come from that LMS. Raises CourseError.
    """
    roster = load_roster(root)
    students = {page: page.relative_to(root / "feedback").parts[0] for page in pages}
    forms = {form for student in students.values() if (form := _form(root, slug, student)) in ("canvas", "moodle")}
    if len(forms) > 1:
        raise CourseError(f"{slug} was collected from Canvas and from Moodle: one zip cannot go back to both")
    form = forms.pop() if forms else "folders"
    left_out = []
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as packed:
        for page, student in students.items():
            name = _name(root, slug, student, form, roster)
            if name:
                packed.write(page, name)
            else:
                left_out.append(student)
    return form, left_out


def _form(root: Path, slug: str, student: str) -> str:
    return next((version.form for version in reversed(_history(root, slug, student))), "")


def _history(root: Path, slug: str, student: str) -> list[Version]:
    """Empty where it cannot be read: then no name can say to the LMS whose a page is."""
    try:
        return read_history(root, slug, student)
    except DamagedReceipt:
        return []


def _name(root: Path, slug: str, student: str, form: str, roster: Roster) -> str:
    """What the page is called in the zip; empty where the LMS could not tell whose it is."""
    if form == "folders":
        return f"{student}/{slug}.html"
    ids = known_ids(root, slug, student, roster)
    letters = re.sub(r"[^A-Za-z]", "", student) or "student"
    history = _history(root, slug, student)
    if not history or history[-1].form != form:
        return ""
    if form == "moodle":
        number = ids.get("participant", "")
        return f"{letters}_{number}_assignsubmission_file_{slug}_feedback.html" if number else ""
    user = ids.get("canvas_id", "")
    handed = re.search(rf"(?:^|_){re.escape(user)}_(\d+)_", PurePosixPath(history[-1].path).parts[0]) if user else None
    return f"{letters}_{user}_{handed[1]}_{slug}-feedback.html" if handed else ""
