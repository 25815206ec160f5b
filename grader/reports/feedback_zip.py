"""All feedback pages of a lab in one zip, named so that the LMS a submission came from gives each to its student.

- Canvas ("Upload Submissions" of an assignment): app/models/abstract_assignment.rb of instructure/canvas-lms,
  `infer_comment_context_from_filename`, and lib/zip_extractor.rb, as of commit 028f76bb. Folders are taken off. Of the
  parts between `_` the first two numbers are the user and the file that was handed in, which must be of that user's
  latest attempt; for an anonymous assignment the parts are anon, the person's code, the file. The last part may not
  begin with "link". Canvas shows the page under the name of the file that was handed in.
- Moodle ("Upload multiple feedback files in a zip"): mod/assign/feedback/file/importziplib.php of moodle/moodle 4.1.2:
  five parts between `_`, the second the participant's number, then assignsubmission and file, then the name that is
  shown. The first part is for people.

A student's own name is not in a file's name: it may hold anything, also such numbers.
"""

from __future__ import annotations

import re
import zipfile
from collections import Counter
from collections.abc import Sequence
from itertools import chain, count
from pathlib import Path, PurePosixPath

from grader.course import CourseError
from grader.courses.scores import known_ids
from grader.submissions.history import DamagedReceipt, Version, read_history
from grader.submissions.lms import moodle_participant
from grader.submissions.roster import Roster, load_roster


def write_feedback_zip(
    root: Path, slug: str, pages: Sequence[Path], target: Path, lms: str = ""
) -> tuple[str, list[str]]:
    """Pack `pages`, each in feedback/STUDENT/LAB/. Returns the form, canvas, moodle or folders, and the students left
    out: their submission did not come from that LMS, or its name does not say whose it is, or says it of two students,
    who would read each other's page. lms: canvas or moodle, where submissions came from both. Raises CourseError.
    """
    roster = load_roster(root)
    students = {page: page.relative_to(root / "feedback").parts[0] for page in pages}
    histories = {student: _history(root, slug, student) for student in students.values()}
    number = Counter(form for one in histories.values() if (form := _form(one)) in ("canvas", "moodle"))
    if lms and lms not in number:
        raise CourseError(
            f"nobody whose page there is handed in by {lms}; expected {' or '.join(number) or 'no --lms'}"
        )
    if len(number) > 1 and not lms:
        raise CourseError(
            f"{slug} was collected from Canvas ({number['canvas']}) and from Moodle ({number['moodle']}), and one zip "
            "goes back to one of them: --lms canvas, then --lms moodle with another --zip"
        )
    form = lms or next(iter(number), "folders")
    named = {student: _named(root, slug, student, form, roster, one) for student, one in histories.items()}
    twice = {address for address, times in Counter(one for one, _ in named.values()).items() if times > 1}
    left_out, names = [], set[str]()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, strict_timestamps=False) as packed:
        for page, student in students.items():
            address, stem = named[student]
            if not stem or address in twice:
                left_out += [student] if student not in left_out else []
                continue
            beginnings = chain([stem], (f"{stem}-{number}" for number in count(2)))
            name = next(name for one in beginnings if (name := f"{one}.html") not in names)
            names.add(name)
            packed.write(page, name)
    return form, left_out


def _form(history: Sequence[Version]) -> str:
    return next((version.form for version in reversed(history)), "")


def _history(root: Path, slug: str, student: str) -> list[Version]:
    """The history; empty where it cannot be read, since then no name can say to the LMS whose a page is."""
    try:
        return read_history(root, slug, student)
    except DamagedReceipt:
        return []


def _named(
    root: Path, slug: str, student: str, form: str, roster: Roster, history: Sequence[Version]
) -> tuple[str, str]:
    """(what tells the LMS whose a page is, the page's name without ending); empty where the LMS could not tell."""
    if form == "folders":
        return student, f"{student}/{slug}"
    if not history or history[-1].form != form:
        return "", ""
    path, lab = PurePosixPath(history[-1].path), f"{slug.replace('_', '-')}-feedback"  # one part, of any words
    letters = re.sub(r"[^A-Za-z]", "", student)[:50]
    letters = letters if letters and letters.casefold() not in ("anon", "late", "link") else "student"
    if form == "moodle":  # never the roster's number, which may be another assignment's
        number = moodle_participant(path)
        return number, f"{letters}_{number}_assignsubmission_file_{lab}" if number else ""
    if anonymous := re.match(r"(?:LATE_)?anon_([A-Za-z0-9]+)_([0-9]+)_", path.parts[0]):
        return anonymous[1], f"anon_{anonymous[1]}_{anonymous[2]}_{lab}"
    user = known_ids(root, slug, student, roster).get("canvas_id", "")
    handed = re.search(rf"(?:^|_){re.escape(user)}_([0-9]+)_", path.parts[0]) if user else None
    return user, f"{letters}_{user}_{handed[1]}_{lab}" if handed else ""
