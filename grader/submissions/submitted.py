"""What lies in `submitted/`, for nbgrader: only what intake made of what counts.

What came there by another way, such as nbgrader's exchange, is taken in as `collect` takes it, and set aside.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

from grader.examination.notebook_file import Refused
from grader.submissions.choice import what_counts
from grader.submissions.handed_in import Entry, opened
from grader.submissions.history import RECORD, DamagedReceipt, free_name, read_history
from grader.submissions.lms import Download, Owner
from grader.submissions.receipt import (
    Handed,
    derive,
    keep,
    read_record,
    released,
    whole,
    write_safely,
    written_by_intake,
)

SECRET = "submission_secret.txt"  # nbgrader finds a student's feedback by it
_HEX = re.compile(rb"[0-9a-f]{1,256}")


def take_in(root: Path, lab_slug: str, student: str) -> None:
    """Make sure, before grading, that what lies in `submitted/` is intake's: finish what a kill interrupted, and take
    in what came by another way than `collect`, such as nbgrader's exchange. Raises DamagedReceipt.
    """
    folder, received = (root / top / student / lab_slug for top in ("submitted", "received"))
    name = next((root / "labs" / lab_slug).glob("*.ipynb")).name
    ours = {name, RECORD, "timestamp.txt", SECRET}
    # Only received/ counts, because intake alone writes there; a submission may bring an intake.json of its own.
    kept, history = read_record(received), read_history(root, lab_slug, student)
    there = list(folder.iterdir())
    if all(path.name in ours and path.is_file() and not path.is_symlink() for path in there):
        record = read_record(folder)
        done = whole(record) and record == kept and _holds(folder / name, record)
        if history and (record.get("pending") or (done and record.get("sha256") != history[-1].sha256)):
            _move_folder_away(received / RECORD)
            derive(root, lab_slug, student)
            return
        if done:
            return
    others = [path for path in there if path.name != RECORD]
    if (
        history
        and all(path.name in ours and path.is_file() and not path.is_symlink() for path in others)
        and (_holds(folder / name, kept) or written_by_intake(root, lab_slug, student, folder / name))
    ):  # nothing came: of the two records at least one is damaged, and both follow from the history
        for record_path in (folder / RECORD, received / RECORD):
            _move_folder_away(record_path)
        derive(root, lab_slug, student)
        return
    if (received / RECORD).exists() and not whole(kept):
        why = f"expected what intake wrote there, and {name} in submitted/ is not what it made of what counts"
        raise DamagedReceipt(root, lab_slug, student, received / RECORD, why)
    if not (folder / RECORD).is_dir():
        (folder / RECORD).unlink(missing_ok=True)
    _, _, lab = released(root, lab_slug)
    with opened(folder) as entries:
        owner = Owner(student, "", own=True)
        files = [
            (replace(owner, file=entry.name), entry) for entry in entries if entry.name not in ("timestamp.txt", SECRET)
        ]
        if files or not read_history(root, lab_slug, student):
            handed = what_counts(files, Download("", [], []), lab) if files else "nothing was handed in"
            if isinstance(handed, Handed):
                # nbgrader's timestamp.txt says when; it is a file of the student's
                handed = replace(handed, changed=None, time_from="the file timestamp.txt")
            keep(root, lab_slug, student, handed)
    _set_aside(root, lab_slug, student)
    derive(root, lab_slug, student)


def _move_folder_away(path: Path) -> None:
    """Moves a folder away from where a file is to be written, out of submitted/, which nbgrader copies."""
    if path.is_dir() and not path.is_symlink():
        _, student, lab_slug, name = path.parts[-4:]
        received = path.parents[3] / "received" / student / lab_slug
        os.replace(path, free_name(received, f"{name}.damaged"))


def _holds(path: Path, record: dict[str, Any]) -> bool:
    return path.is_file() and record.get("notebook") == hashlib.sha256(path.read_bytes()).hexdigest()


def _set_aside(root: Path, lab_slug: str, student: str) -> None:
    """Move what a student's folder holds to `received/`; nbgrader would copy it, and follow links."""
    folder = root / "submitted" / student / lab_slug
    kept = {"timestamp.txt": _is_timestamp, SECRET: _is_secret}
    others = [path for path in folder.iterdir() if not (path.name in kept and kept[path.name](path))]
    if not others:
        return
    received = root / "received" / student / lab_slug
    number = sum(1 for _ in received.glob("exchange_*")) + 1
    aside = received / f"exchange_{number}"
    aside.mkdir(parents=True)
    for path in others:
        os.replace(path, aside / path.name)  # a link is moved, not what it points to


def _is_timestamp(path: Path) -> bool:
    """Whether nbgrader can read the file; one that it cannot stops its grading."""
    from nbgrader.utils import parse_utc

    try:
        return _is_small_file(path, 100) and bool(parse_utc(path.read_text("utf-8").strip()))
    except Exception:  # the parser raises what it likes
        return False


def _is_small_file(path: Path, size: int) -> bool:
    info = path.lstat()
    return stat.S_ISREG(info.st_mode) and info.st_size < size  # a pipe would keep a reader waiting


def _is_secret(path: Path) -> bool:
    return _is_small_file(path, 1000) and bool(_HEX.fullmatch(path.read_bytes()))


def copy_secret(root: Path, folder: Path, files: list[tuple[Owner, Entry]]) -> None:
    """Copies what `nbgrader release_feedback` needs of a submission that came from the exchange."""
    newest = max((owner.attempt for owner, _ in files if owner.attempt), default=None)
    for owner, entry in files:
        if owner.file == SECRET and owner.attempt == newest:
            with contextlib.suppress(Refused):
                if _HEX.fullmatch(raw := entry.read()):
                    write_safely(root, folder / SECRET, raw)
