"""Makes damaged receipts anew from what lies beside them, where that says without doubt what counts.

received.json: from intake's record of what counts, and the kept files. intake.json: from received.json. What is damaged
is kept beside it, as NAME.damaged.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from grader.course import CourseError, course_lock
from grader.submissions.history import HISTORY, RECORD, DamagedReceipt, Version, free_name, read_history
from grader.submissions.receipt import derive, read_record, whole, write_history

_KEPT = re.compile(r"([1-9][0-9]*)_.+")  # how receipt.py names what it keeps


def repair(root: Path, lab_slug: str, student: str) -> str:
    """Repair a student's receipts for a lab; returns what was done and what is lost. Raises CourseError."""
    folder = root / "received" / student / lab_slug
    with course_lock(root):
        kept = read_record(folder)
        try:
            read_history(root, lab_slug, student)
            done = f"{RECORD} is made anew from {HISTORY}"
            if whole(kept):
                done = "nothing is damaged"
        except DamagedReceipt as error:
            history = _rebuilt(lab_slug, student, folder, kept, error)
            _set_aside(folder, HISTORY)
            write_history(root, lab_slug, student, history)
            time = f"{history[-1].time[:16].replace('T', ' ')} UTC" if history[-1].time else "unknown"
            done = (f"{HISTORY} is made anew: {history[-1].file or 'no file'} counts, handed in: {time}, by "
                    f"{history[-1].time_from or 'nothing'}; lost are the times of earlier files ({len(history) - 1})"
                    )  # fmt: skip
        if not whole(kept):
            _set_aside(folder, RECORD)
        if (root / "submitted" / student / lab_slug / RECORD).is_dir():
            _set_aside(root / "submitted" / student / lab_slug, RECORD, folder)
        derive(root, lab_slug, student)
    return done


def _rebuilt(lab_slug: str, student: str, folder: Path, kept: dict[str, Any], error: DamagedReceipt) -> list[Version]:
    """The history, as far as it can be known. Raises CourseError where it is in doubt which file counts."""
    files = sorted((int(found[1]), path) for path in folder.iterdir() if (found := _KEPT.fullmatch(path.name)))
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for _, path in files if path.is_file()}
    counts = [name for name, digest in digests.items() if digest == kept.get("sha256")]
    nothing_kept = kept.get("sha256") == hashlib.sha256(b"").hexdigest()
    # A file with a higher number came later, or is an older one that an LMS brought later: only the history knew.
    if (
        not whole(kept)
        or not (counts or nothing_kept)
        or (files and not nothing_kept and counts[-1] != files[-1][1].name)
    ):
        places = " ".join(shlex.quote(f"{top}/{student}/{lab_slug}") for top in ("received", "submitted"))
        what = str(error).partition("; put it back")[0]
        raise CourseError(f"{what}, and what lies beside it does not say which file counts. Put it back from a copy; "
                          f"without one, move {places} out of the course and collect again: inferlab grade collect "
                          f"{lab_slug} FOLDER_OR_ZIP")  # fmt: skip
    last = counts[-1] if counts else ""
    earlier = [
        Version(name, digest, name, "", "", "", "", None, [], _changed(folder / name))
        for name, digest in digests.items()
        if name != last
    ]
    late = kept.get("late")
    record = {name: kept[name] for name in ("path", "form", "time", "time_from")}
    return [*earlier, Version(file=last, sha256=kept["sha256"], problem=kept["refused"], notes=[],
                              late=late if isinstance(late, bool) else None,
                              collected=_changed(folder / (last or RECORD)), **record)]  # fmt: skip


def damaged_receipts(root: Path, lab_slug: str) -> list[str]:
    """The students whose receipts for a lab cannot be read."""
    found = []
    for folder in sorted((root / "received").glob(f"*/{lab_slug}")):
        try:
            history = read_history(root, lab_slug, folder.parent.name)
        except DamagedReceipt:
            found.append(folder.parent.name)
            continue
        if history and (folder / RECORD).exists() and not whole(read_record(folder)):
            found.append(folder.parent.name)
    return found


def _changed(path: Path) -> str:
    return datetime.fromtimestamp(path.stat().st_mtime, UTC).isoformat(timespec="seconds")


def _set_aside(folder: Path, name: str, to: Path | None = None) -> None:
    if (folder / name).exists() or (folder / name).is_symlink():
        os.replace(folder / name, free_name(to or folder, f"{name}.damaged"))
