"""What was handed in, kept as it came, and the clean notebook made from it for nbgrader.

    received/STUDENT/LAB/1_NAME.ipynb, 2_NAME.ipynb, ...; received.json: the history, the last entry counts
    submitted/STUDENT/LAB/NAME.ipynb: rebuilt from the release; intake.json: what intake did; timestamp.txt

No file of a learner ever reaches nbgrader. A refused submission is there as well, as the empty lab with the reason
beside it. Files are written under another name and renamed: `received.json` decides that something was taken in, and
`intake.json` is marked before and completed after its notebook, so what a kill interrupted is finished later.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any

from grader.examination.intake import Refused, read_submission, rebuild
from grader.labs.lab import Lab, lab_from_notebook
from grader.labs.lab_source import write_notebook

STUDENT_ID = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._@+-]{0,99}\Z")
HISTORY = "received.json"


@dataclass(frozen=True)
class Handed:
    """One file as handed in: its path inside the folder or zip, its bytes, when it was handed in (UTC).

    problem: why it is refused unread; form: how the download was understood, empty when nbgrader's exchange brought it;
    time_from: what `changed` rests on; late: what the LMS says; notes: how this file was chosen.
    """

    path: PurePosixPath
    raw: bytes
    changed: datetime | None
    problem: str = ""
    form: str = ""
    time_from: str = ""
    late: bool | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Received:
    """What became of one submission. refused: the reason, or empty; news: new, changed, unchanged, or older; time: when
    it was handed in (UTC, ISO 8601), empty where unknown; time_from: what that rests on; late: what the LMS says.
    """

    student: str
    refused: str
    notes: tuple[str, ...] = ()
    news: str = "new"
    late: bool | None = None
    time: str = ""
    time_from: str = ""


@dataclass
class _Version:
    """One entry of the history; file is empty when nothing could be kept."""

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


def receive(root: Path, lab_slug: str, student: str, handed: Handed | str) -> Received:
    """Take in one submission, or (a text) record why there is none to take. Taking it in again changes nothing."""
    student, news = keep(root, lab_slug, student, handed)
    return derive(root, lab_slug, student, news)


def keep(root: Path, lab_slug: str, student: str, handed: Handed | str) -> tuple[str, str]:
    """Put what was handed in into `received/`; returns the student's id and what is new, see `Received`."""
    if isinstance(handed, str):
        handed = Handed(PurePosixPath(student), b"", None, handed)
    there = (
        not set(student) & set("/\\\0") and student[:1] != "." and (root / "submitted" / student / lab_slug).is_dir()
    )
    if not there and not STUDENT_ID.match(student):
        problem = f"the name {student[:50]!r} cannot be a student's id"
        handed = replace(handed, problem=handed.problem or problem)
        student = "unnamed-" + hashlib.sha256(student.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    folder = root / "received" / student / lab_slug
    folder.mkdir(parents=True, exist_ok=True)
    history = read_history(root, lab_slug, student)
    version = _Version("", hashlib.sha256(handed.raw).hexdigest(), str(handed.path), handed.problem, handed.form,
                       handed.changed.astimezone(UTC).isoformat() if handed.changed else "", handed.time_from,
                       handed.late, list(handed.notes), datetime.now(UTC).isoformat(timespec="seconds"))  # fmt: skip
    news = "changed" if history else "new"
    if history and _same(history[-1], version):
        version.file, version.collected = history[-1].file, history[-1].collected
        # Only what the LMS says of it may have changed; a copied file's own time says nothing.
        if version.form and not (history[-1].time and version.time_from.startswith("the file")):
            history[-1].late, history[-1].time, history[-1].time_from = version.late, version.time, version.time_from
        news = "unchanged"
    elif history and _is_older(version, history[-1]):
        news = "older"
        if not any(_same(old, version) for old in history):
            version.file = _keep(folder, handed, lab_slug, root, len(history) + 1)
            history.insert(len(history) - 1, version)
    else:
        version.file = next((o.file for o in history if _same(o, version)), "")
        version.file = version.file or _keep(folder, handed, lab_slug, root, len(history) + 1)
        history.append(version)
    text = json.dumps([asdict(v) for v in history], indent=1) + "\n"
    if _text_of(folder / HISTORY) != text:
        write_safely(root, folder / HISTORY, text)
    return student, news


def read_history(root: Path, lab_slug: str, student: str) -> list[_Version]:
    """What a student handed in for a lab, oldest first; the last one counts."""
    path = root / "received" / student / lab_slug / HISTORY
    return [_Version(**v) for v in json.loads(path.read_text("utf-8"))] if path.exists() else []


def derive(root: Path, lab_slug: str, student: str, news: str = "unchanged") -> Received:
    """Make `submitted/` from the last entry of the history; nothing is written if it is up to date."""
    version = read_history(root, lab_slug, student)[-1]
    received, submitted = (root / top / student / lab_slug for top in ("received", "submitted"))
    release_path, release, lab = released(root, lab_slug)
    raw = (received / version.file).read_bytes() if version.file else b""
    refused, notebook, notes = version.problem, release, list(version.notes)
    if not refused:
        try:
            notebook, found = _intake(raw, release, lab)
            notes += found
        except Refused as error:
            refused = str(error)
    digest = hashlib.sha256(raw + refused.encode()).hexdigest() if refused else version.sha256
    text = write_notebook(notebook)
    record = {
        "received": digest,
        "sha256": version.sha256,
        "refused": refused,
        "notes": notes,
        "path": version.path,
        "form": version.form,
        "time": version.time,
        "time_from": version.time_from,
        "late": version.late,
        "notebook": hashlib.sha256(text.encode()).hexdigest(),
    }
    files = {release_path.name: text, "intake.json": json.dumps(record, indent=1) + "\n"}
    if version.time:
        files["timestamp.txt"] = datetime.fromisoformat(version.time).strftime("%Y-%m-%d %H:%M:%S.%f UTC")
    stale = submitted / "timestamp.txt" if version.form and not version.time else None
    differs = any(_text_of(submitted / name) != text for name, text in files.items())
    if differs or _text_of(received / "intake.json") != files["intake.json"] or (stale and stale.exists()):
        submitted.mkdir(parents=True, exist_ok=True)
        write_safely(root, submitted / "intake.json", json.dumps({"pending": True}) + "\n")
        if stale:
            stale.unlink(missing_ok=True)
        for name, text in sorted(files.items(), key=lambda item: item[0] == "intake.json"):
            if name == "intake.json":  # the copy that no submission can bring
                write_safely(root, received / name, text)
            write_safely(root, submitted / name, text)
    return Received(student, refused, tuple(notes), news, version.late, version.time, version.time_from)


def released(root: Path, lab_slug: str) -> tuple[Path, dict[str, Any], Lab]:
    """The released notebook's path, the notebook, and the lab in it. Raises StopIteration when there is none."""
    path = next((root / "labs" / lab_slug).glob("*.ipynb"))
    release = json.loads(path.read_text("utf-8"))
    return path, release, lab_from_notebook(release, lab_slug, path.stem)


def write_safely(root: Path, path: Path, content: str | bytes) -> None:
    """Write a file so that at every moment its old or its new content is there. Never writes through a link."""
    # Not beside it: nbgrader copies what lies beside a notebook.
    new = root / "received" / f".new-{os.getpid()}"
    new.parent.mkdir(exist_ok=True)
    new.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
    if path.is_dir() and not path.is_symlink():
        raise IsADirectoryError(f"{path} is a folder, but a file has to be written there")
    os.replace(new, path)


def _intake(raw: bytes, release: dict[str, Any], lab: Lab) -> tuple[dict[str, Any], list[str]]:
    try:
        submission = read_submission(raw, lab)
        return rebuild(release, lab, submission), submission.notes
    except Refused:
        raise
    except Exception as error:  # one submission can never stop a batch, not even by a fault of ours
        raise Refused(f"the file could not be read: {type(error).__name__}") from error


def _same(old: _Version, new: _Version) -> bool:
    return (old.sha256, old.problem) == (new.sha256, new.problem)


def _is_older(new: _Version, present: _Version) -> bool:
    """Whether an LMS says so of both; a file's own time changes with every copy and decides nothing."""
    trusted = all(v.time and not v.time_from.startswith("the file") for v in (new, present))
    return trusted and datetime.fromisoformat(new.time) < datetime.fromisoformat(present.time)


def _keep(folder: Path, handed: Handed, lab_slug: str, root: Path, number: int) -> str:
    """Store the bytes under a name that nothing in them decides; returns it."""
    if not handed.raw:
        return ""
    stem = next((root / "labs" / lab_slug).glob("*.ipynb")).stem
    suffix = handed.path.suffix.lower()
    name = f"{number}_{stem}" + (suffix if re.fullmatch(r"\.[a-z0-9]{1,8}", suffix) else ".ipynb")
    write_safely(root, folder / name, handed.raw)
    return name


def _text_of(path: Path) -> str | None:
    try:
        return path.read_text("utf-8") if stat.S_ISREG(path.lstat().st_mode) else None
    except (OSError, ValueError):
        return None
