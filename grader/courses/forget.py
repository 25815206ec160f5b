"""Deletes what a course keeps of students: files, results and rows of the gradebook. Says what before it does it."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from grader.course import CourseError, course_lock
from grader.courses.late import gradebook, read_policy, write_policy
from grader.submissions.receipt import write_safely
from grader.submissions.roster import load_roster, save_roster

FOLDERS = ("received", "submitted", "autograded", "feedback")


@dataclass(frozen=True)
class Kept:
    """What the course keeps of one student. last: when something was last handed in or recorded."""

    student: str
    paths: tuple[Path, ...]
    labs: tuple[str, ...]  # in the gradebook
    in_gradebook: bool
    last: datetime | None


def kept(root: Path) -> list[Kept]:
    """What the course keeps, by student."""
    names: dict[str, list[Path]] = {}
    for folder in FOLDERS:
        for path in sorted((root / folder).glob("*")):
            if path.is_dir() and not path.is_symlink():
                names.setdefault(path.name, []).append(path)
    for path in sorted((root / "results").rglob("*.json")):
        names.setdefault(path.stem, []).append(path)
    rows: dict[str, tuple[tuple[str, ...], list[datetime]]] = {}
    roster = load_roster(root)
    listed = roster.students.keys() | roster.others.keys()
    with gradebook(root, "") as book:
        for student in book.students:
            labs = tuple(sorted(submission.name for submission in student.submissions))
            stamps = [s.timestamp.replace(tzinfo=UTC) for s in student.submissions if s.timestamp]
            rows[student.id] = labs, stamps
    found = []
    for name in sorted({*names, *rows, *listed}):
        labs, stamps = rows.get(name, ((), []))
        paths = names.get(name, [])
        # When it came in; grading again writes results and must not make old data young.
        moments = stamps + [_changed(path) for path in paths if path.parent.name == "received"]
        moments = moments or [_changed(path) for path in paths]
        found.append(Kept(name, tuple(paths), labs, name in rows, max(moments, default=None)))
    return found


def to_forget(everything: Sequence[Kept], students: Iterable[str], older_than: int | None, now: datetime) -> list[Kept]:
    """Those named and those who handed nothing in for `older_than` days. Raises CourseError for an unknown name.

    A student of whom no date is known, because nothing was handed in, is kept unless named.
    """
    wanted, known = set(students), {one.student for one in everything}
    if wanted - known:
        raise CourseError(f"nothing is kept of {', '.join(sorted(wanted - known))}")
    if older_than is not None:
        limit = now - timedelta(days=older_than)
        wanted |= {one.student for one in everything if one.last is not None and one.last < limit}
    return [one for one in everything if one.student in wanted]


def forget(root: Path, chosen: Sequence[Kept]) -> None:
    """Deletes what is kept of these students: first the files, then the rows, so that what a kill leaves is found."""
    with course_lock(root):
        _forget(root, chosen)


def _forget(root: Path, chosen: Sequence[Kept]) -> None:
    gone = {one.student for one in chosen}
    for one in chosen:
        for path in one.paths:
            if root.resolve() not in path.resolve().parents:
                raise CourseError(f"{path} is not inside the course")
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    with gradebook(root, "") as book:
        for one in chosen:
            if one.in_gradebook:
                book.remove_student(one.student)
        if book.engine.dialect.name == "sqlite":  # which keeps deleted rows in its file until it is packed
            with book.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
                connection.exec_driver_sql("VACUUM")
    _leave_out(root, gone)


def _leave_out(root: Path, gone: set[str]) -> None:
    """Take students out of the files that hold several: the roster, the journals of recordings, the late policy."""
    roster = load_roster(root)
    if gone & (roster.students.keys() | roster.others.keys()):
        for student in gone:
            roster.students.pop(student, None)
            roster.others.pop(student, None)
        save_roster(root, roster)
    for path in (root / "results").glob("*/recorded.log"):
        lines = path.read_text("utf-8", "replace").splitlines(keepends=True)
        left = "".join(line for line in lines if line.split(" ")[0] not in gone)
        if len(left) < sum(map(len, lines)):
            write_safely(root, path, left)
    policy = read_policy(root)
    tables: list[dict[str, dict[str, Any]]] = [policy.extensions, policy.file_times]
    if any(gone.intersection(given or {}) for table in tables for given in table.values()):
        for table in tables:
            for lab, given in table.items():
                table[lab] = {student: value for student, value in (given or {}).items() if student not in gone}
        write_policy(root, policy)


def _changed(path: Path) -> datetime:
    newest = max((p.lstat().st_mtime for p in [path, *path.rglob("*")]), default=0.0)
    return datetime.fromtimestamp(newest, UTC)
