"""The history of what a student handed in for a lab: received/STUDENT/LAB/received.json. Written by `receipt.py`.

It decides which file counts and when that came, so that a damaged one is never taken for an empty one: it stops what is
to be done for its own student, with an error that names the command that repairs it.
"""

from __future__ import annotations

import json
import re
import shlex
import stat
from dataclasses import MISSING, dataclass, fields
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Any

from grader.course import CourseError

HISTORY = "received.json"
RECORD = "intake.json"
MAX_BYTES = 32 << 20


@dataclass
class Version:
    """One entry of the history; file is empty when nothing could be kept. number: Canvas' number of the file."""

    file: str
    sha256: str
    path: str
    problem: str
    form: str
    time: str
    time_from: str
    late: bool | None
    notes: list[str]
    collected: str
    number: int = 0


class DamagedReceipt(CourseError):
    """A student's receipts for a lab are damaged: what counts, or when it came, is unknown. Others are not affected.

    why: what is wrong with the file, and what was expected; repair: what to do where no copy of it is left.
    """

    def __init__(self, root: Path, lab_slug: str, student: str, path: Path, why: str, repair: str = ""):
        self.student = student
        repair = repair or f"inferlab grade repair {lab_slug} --student {shlex.quote(student)}"
        name = path.relative_to(root).as_posix()
        super().__init__(f"{student}: {name} is damaged ({why}); put it back from a copy, or: {repair}")


def read_history(root: Path, lab_slug: str, student: str) -> list[Version]:
    """What a student handed in for a lab, oldest first; the last one counts. Raises DamagedReceipt."""
    folder = root / "received" / student / lab_slug
    path = folder / HISTORY
    try:
        return _history(path)
    except FileNotFoundError:
        if (folder / RECORD).exists():  # which is only written after the history
            raise DamagedReceipt(root, lab_slug, student, path, f"missing, and {RECORD} beside it is there") from None
        return []
    except OSError as error:
        why = error.strerror or type(error).__name__
    except ValueError as error:
        why = str(error)
    raise DamagedReceipt(root, lab_slug, student, path, why)


def _history(path: Path) -> list[Version]:
    """The history in a file. Raises OSError, and ValueError for anything else than a whole history."""
    state = path.stat()
    if not stat.S_ISREG(state.st_mode):  # a pipe would keep a reader waiting
        raise ValueError("a folder, expected a file" if path.is_dir() else "not a file")
    if state.st_size > MAX_BYTES:
        raise ValueError(f"{state.st_size >> 20} MiB, expected at most {MAX_BYTES >> 20}")
    try:
        data = json.loads(path.read_bytes().decode("utf-8"))
    except UnicodeDecodeError:
        raise ValueError("not UTF-8, expected JSON") from None
    except (ValueError, RecursionError):
        raise ValueError(f"{'cut short, or not' if state.st_size else 'empty, expected'} JSON") from None
    if not isinstance(data, list) or not data:
        raise ValueError(f"expected a list of what was handed in, found {_found(data)}")
    return [_read_version(number, entry) for number, entry in enumerate(data, 1)]


def _read_version(number: int, entry: Any) -> Version:
    expected = {field.name: str(field.type) for field in fields(Version)}
    needed = {field.name for field in fields(Version) if field.default is MISSING}
    if not isinstance(entry, dict) or not needed <= set(entry) <= expected.keys():
        raise ValueError(f"entry {number} does not have the fields of something handed in: {', '.join(expected)}")
    for name, value in entry.items():
        declared = expected[name]
        fits = {"str": isinstance(value, str), "list[str]": texts(value), "int": type(value) is int,
                "bool | None": value is None or isinstance(value, bool)}[declared]  # fmt: skip
        if not fits:
            raise ValueError(f"{name} of entry {number} is {type(value).__name__}, expected {declared}")
    version = Version(**entry)
    if version.time and not _is_moment(version.time):
        raise ValueError(f"time of entry {number} is {version.time[:40]!r}, expected a date and time with a zone")
    if version.file != PurePosixPath(version.file).name and version.file:
        raise ValueError(f"file of entry {number} is {version.file[:80]!r}, expected a name")
    if not re.fullmatch("[0-9a-f]{64}", version.sha256):
        raise ValueError(f"sha256 of entry {number} is {version.sha256[:80]!r}, expected 64 hexadecimal digits")
    return version


def free_name(folder: Path, name: str) -> Path:
    """A path in the folder at which there is nothing yet: the name, or with a number behind it."""
    names = (name, *(f"{name}.{number}" for number in range(2, 1000)))
    return next(folder / one for one in names if not (folder / one).exists())


def _is_moment(text: str) -> bool:
    try:
        return datetime.fromisoformat(text).tzinfo is not None
    except ValueError:
        return False


def texts(value: Any) -> bool:
    """Whether it is a list of texts."""
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _found(data: Any) -> str:
    return "an empty list" if data == [] else type(data).__name__
