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
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any

from grader.examination.intake import read_submission
from grader.examination.notebook_file import Refused
from grader.examination.submission import rebuild
from grader.labs.lab import Lab, lab_from_notebook
from grader.labs.lab_source import write_notebook
from grader.results.result import NO_CELLS
from grader.submissions.history import HISTORY, RECORD, DamagedReceipt, Version, read_history, texts
from grader.submissions.lms import ON_THIS_CLOCK

STUDENT_ID = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._@+-]{0,99}\Z")
BY_HAND = "the instructor"
LEFT_OUT, NAMES = "left_out", "names.txt"
MAX_RECORD = 1 << 20  # bytes; a record of ours has at most MAX_NOTES notes
_RECORD_TEXTS = ("received", "sha256", "refused", "path", "form", "time", "time_from", "notebook")


@dataclass(frozen=True)
class Handed:
    """One file as handed in: its path inside the folder or zip, its bytes, when it was handed in (UTC).

    problem: why it is refused unread; form: how the download was understood, empty when nbgrader's exchange brought it;
    time_from: what `changed` rests on; late: what the LMS says; notes: how this file was chosen; number: Canvas' number
    of the file; doubt: what a person should be asked before it replaces what is there.
    """

    path: PurePosixPath
    raw: bytes
    changed: datetime | None
    problem: str = ""
    form: str = ""
    time_from: str = ""
    late: bool | None = None
    notes: tuple[str, ...] = ()
    number: int = 0
    doubt: str = ""


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
    version = _version(handed)
    news = "changed" if history else "new"
    said = handed.late
    for old in history:
        if _same(old, version):  # the same bytes were there already at the earlier time
            if said is None and old.late is not None:  # a folder takes back nothing that an LMS said
                version.late = old.late
            version.time, version.time_from = earlier((old.time, old.time_from), (version.time, version.time_from))
    version.file = next((old.file for old in history if _same(old, version)), "")
    if history and _same(history[-1], version):
        if version.form:  # what nbgrader brought again says nothing new
            history[-1].late, history[-1].number = version.late, max(version.number, history[-1].number)
            history[-1].time, history[-1].time_from = version.time, version.time_from
        news = "unchanged"
    elif history and _is_older(version, history[-1]):
        news = "older"
        if not any(_same(old, version) for old in history):
            version.file = _keep(folder, handed, lab_slug, root, len(history) + 1)
            history.insert(len(history) - 1, version)
    else:
        version.file = version.file or _keep(folder, handed, lab_slug, root, len(history) + 1)
        history.append(version)
    if version.file and _bytes_of(folder / version.file) != handed.raw:  # damaged or gone since
        write_safely(root, folder / version.file, handed.raw)
    write_history(root, lab_slug, student, history)
    return student, news


def _version(handed: Handed) -> Version:
    time = handed.changed.astimezone(UTC).isoformat() if handed.changed else ""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return Version("", hashlib.sha256(handed.raw).hexdigest(), str(handed.path), handed.problem, handed.form, time,
                   handed.time_from, handed.late, list(handed.notes), now, handed.number)  # fmt: skip


def keep_left_out(root: Path, lab_slug: str, student: str, files: Sequence[tuple[PurePosixPath, bytes]]) -> None:
    """Put files that do not count into `received/STUDENT/LAB/left_out/`, each once, with where they came from."""
    folder = root / "received" / student / lab_slug / LEFT_OUT
    there = [*folder.parent.glob("[0-9]*_*"), *folder.glob("[0-9]*_*")]
    known = {hashlib.sha256(raw).hexdigest() for path in there if (raw := _bytes_of(path)) is not None}
    for path, raw in files:
        digest = hashlib.sha256(raw).hexdigest()
        if not raw or digest in known:
            continue
        known.add(digest)
        folder.mkdir(parents=True, exist_ok=True)
        name = _keep(folder, Handed(path, raw, None), lab_slug, root, len(known))
        lines = _text_of(folder / NAMES) or ""
        write_safely(root, folder / NAMES, f"{lines}{name}: {path}\n")


def write_history(root: Path, lab_slug: str, student: str, history: list[Version]) -> None:
    """Writes the history as a whole, where it is not that already."""
    path = root / "received" / student / lab_slug / HISTORY
    text = json.dumps([asdict(v) for v in history], indent=1) + "\n"
    if _text_of(path) != text:
        write_safely(root, path, text)


def earlier(old: tuple[str, str], new: tuple[str, str]) -> tuple[str, str]:
    """The one of two times of handing in equal bytes, each with what it rests on, that counts: what a person said; then
    what an LMS says; then what an LMS says without a zone; then a file's own time; of two of a kind the earlier one.
    """

    def rank(one: tuple[str, str]) -> int:
        time, time_from = one
        lms = 2 if is_doubtful(time_from) else 1
        return 0 if time_from == BY_HAND else 4 if not time else 3 if from_file(time_from) else lms

    if rank(old) != rank(new) or rank(old) in (0, 4):
        return old if rank(old) <= rank(new) else new
    return old if datetime.fromisoformat(old[0]) <= datetime.fromisoformat(new[0]) else new


def from_file(time_from: str) -> bool:
    """Whether a time rests on nothing but a file, whose time every copy may change, and its owner too."""
    return time_from.startswith("the file")


def is_doubtful(time_from: str) -> bool:
    """Whether a person should say that a time holds before it costs points: a file's own, or one without a zone."""
    return from_file(time_from) or time_from.endswith(ON_THIS_CLOCK)


def set_time(root: Path, lab_slug: str, student: str, when: datetime | None) -> None:
    """Say when what counts was handed in; None: unknown. It stays so for these bytes. Raises LookupError."""
    history = read_history(root, lab_slug, student)
    if not history:
        raise LookupError(student)
    history[-1].time = when.astimezone(UTC).isoformat() if when else ""
    history[-1].time_from = BY_HAND
    write_history(root, lab_slug, student, history)
    derive(root, lab_slug, student)


def doubt(root: Path, lab_slug: str, student: str, handed: Handed | str) -> str:
    """The reason why a person should be asked before this replaces what is there; empty where there is nothing to
    ask."""
    history = read_history(root, lab_slug, student)
    if not history:
        return ""
    if isinstance(handed, str):
        handed = Handed(PurePosixPath(student), b"", None, handed)
    present, new = history[-1], _version(handed)
    if _same(present, new) or _is_older(new, present):
        return ""
    there = read_record(root / "received" / student / lab_slug)
    reason = "" if there.get("refused") else _loses(root, lab_slug, handed, list(there.get("notes", [])))
    if reason:
        return f"{reason}; what is there was read"
    if _is_older(present, new):
        return ""
    if new.time and present.time and datetime.fromisoformat(new.time) < datetime.fromisoformat(present.time):
        return f"by {new.time_from} it is of {_minute(new.time)}, and what is there of {_minute(present.time)} UTC"
    if old := next((old for old in history if _same(old, new)), None):
        return f"the same file was collected on {old.collected[:10]}, and replaced since"
    return ""


def _minute(time: str) -> str:
    return time[:16].replace("T", " ")


def _loses(root: Path, lab_slug: str, handed: Handed, present: list[str]) -> str:
    """The reason why this would earn nothing; empty where it may earn points."""
    if handed.problem:
        return f"it would be refused: {handed.problem}"
    _, release, lab = released(root, lab_slug)
    try:
        _, notes = _intake(handed.raw, release, lab)
    except Refused as error:
        return f"it would be refused: {error}"
    return NO_CELLS if NO_CELLS in notes and NO_CELLS not in present else ""


def read_record(folder: Path) -> dict[str, Any]:
    """What intake noted about a submission; empty where intake has not seen it."""
    path = folder / RECORD
    try:
        info = path.lstat()
        if not stat.S_ISREG(info.st_mode) or info.st_size > MAX_RECORD:  # a student may bring one, too
            return {"pending": True}
        record = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError):
        return {"pending": True}
    return record if isinstance(record, dict) else {"pending": True}


def whole(record: dict[str, Any]) -> bool:
    """Whether a record has all that intake writes, each of its type."""
    return all(isinstance(record.get(name), str) for name in _RECORD_TEXTS) and texts(record.get("notes"))


def derive(root: Path, lab_slug: str, student: str, news: str = "unchanged") -> Received:
    """Make `submitted/` from the last entry of the history; nothing is written if it is up to date.

    Raises DamagedReceipt where what was kept of it is not what was handed in.
    """
    version = read_history(root, lab_slug, student)[-1]
    received, submitted = (root / top / student / lab_slug for top in ("received", "submitted"))
    release_path, refused, notes, text = _made(root, lab_slug, student, version)
    digest = hashlib.sha256(kept_bytes(root, lab_slug, student, version) + refused.encode()).hexdigest()
    digest = digest if refused else version.sha256
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
    files = {release_path.name: text, RECORD: json.dumps(record, indent=1) + "\n"}
    if version.time:
        files["timestamp.txt"] = datetime.fromisoformat(version.time).strftime("%Y-%m-%d %H:%M:%S.%f UTC")
    unknown = not version.time and (version.form or version.time_from == BY_HAND)
    stale = submitted / "timestamp.txt" if unknown else None
    differs = any(_text_of(submitted / name) != text for name, text in files.items())
    if differs or _text_of(received / RECORD) != files[RECORD] or (stale and stale.exists()):
        submitted.mkdir(parents=True, exist_ok=True)
        write_safely(root, submitted / RECORD, json.dumps({"pending": True}) + "\n")
        if stale:
            stale.unlink(missing_ok=True)
        for name, text in sorted(files.items(), key=lambda item: item[0] == RECORD):
            if name == RECORD:  # the copy that no submission can bring
                write_safely(root, received / name, text)
            write_safely(root, submitted / name, text)
    return Received(student, refused, tuple(notes), news, version.late, version.time, version.time_from)


def written_by_intake(root: Path, lab_slug: str, student: str, notebook: Path) -> bool:
    """Whether a notebook is the one that intake makes from what counts; no where that cannot be told."""
    try:
        history = read_history(root, lab_slug, student)
        return bool(history) and _text_of(notebook) == _made(root, lab_slug, student, history[-1])[-1]
    except DamagedReceipt:
        return False


def _made(root: Path, lab_slug: str, student: str, version: Version) -> tuple[Path, str, list[str], str]:
    """The release's path; why the version is refused, or empty; the notes on it; the notebook made from it."""
    release_path, release, lab = released(root, lab_slug)
    raw = kept_bytes(root, lab_slug, student, version)
    refused, notebook, notes = version.problem, release, list(version.notes)
    if not refused:
        try:
            notebook, found = _intake(raw, release, lab)
            notes += found
        except Refused as error:
            refused = str(error)
    return release_path, refused, notes, write_notebook(notebook)


def kept_bytes(root: Path, lab_slug: str, student: str, version: Version) -> bytes:
    """The bytes that were handed in. Raises DamagedReceipt where they are not what lies in `received/`."""
    if not version.file:
        return b""
    path = root / "received" / student / lab_slug / version.file
    raw = _bytes_of(path)
    if raw is None or hashlib.sha256(raw).hexdigest() != version.sha256:
        why = "it cannot be read" if raw is None else "its SHA-256 is not that of what was handed in"
        again = f"collect the same file again: inferlab grade collect {lab_slug} FOLDER_OR_ZIP"
        raise DamagedReceipt(root, lab_slug, student, path, why, again)
    return raw


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


def _same(old: Version, new: Version) -> bool:
    return (old.sha256, old.problem) == (new.sha256, new.problem)


def _is_older(new: Version, present: Version) -> bool:
    """Whether an LMS says so of both; a file's own time changes with every copy and decides nothing."""
    if new.number and present.number and new.number != present.number:
        return new.number < present.number  # Canvas counts up
    trusted = all(v.time and not from_file(v.time_from) and v.time_from != BY_HAND for v in (new, present))
    return trusted and datetime.fromisoformat(new.time) < datetime.fromisoformat(present.time)


def _keep(folder: Path, handed: Handed, lab_slug: str, root: Path, number: int) -> str:
    """Store the bytes under a name that nothing in them decides; returns it."""
    if not handed.raw:
        return ""
    stem = next((root / "labs" / lab_slug).glob("*.ipynb")).stem
    suffix = handed.path.suffix.lower()
    suffix = suffix if re.fullmatch(r"\.[a-z0-9]{1,8}", suffix) else ".ipynb"
    name = f"{number}_{stem}{suffix}"
    while (folder / name).exists() and _bytes_of(folder / name) != handed.raw:  # not known to a repaired history
        number += 1
        name = f"{number}_{stem}{suffix}"
    write_safely(root, folder / name, handed.raw)
    return name


def _bytes_of(path: Path) -> bytes | None:
    try:
        return path.read_bytes() if stat.S_ISREG(path.lstat().st_mode) else None
    except OSError:
        return None


def _text_of(path: Path) -> str | None:
    try:
        return path.read_text("utf-8") if stat.S_ISREG(path.lstat().st_mode) else None
    except (OSError, ValueError):
        return None
