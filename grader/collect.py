"""From a folder or a zip of submissions to `submitted/STUDENT/LAB/`: safe notebooks, and a record of what was refused.

Understood: STUDENT/LAB/NAME.ipynb, STUDENT/NAME.ipynb, STUDENT/any.ipynb, and STUDENT.ipynb at the top. What was handed
in is kept as it came in `received/STUDENT/LAB/`; what nbgrader reads is always rebuilt from the release, so no file of
a learner ever reaches nbgrader. A refused submission is there as well, as the empty lab with the reason beside it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import stat
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any

from grader.course import CourseError
from grader.intake import MAX_BYTES, Refused, read_submission, rebuild
from grader.lab import Lab, lab_from_notebook
from grader.lab_source import write_notebook

_STUDENT = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._@+-]{0,99}$")
MAX_FILES = 20000


@dataclass(frozen=True)
class Handed:
    """One file as handed in: its path inside the folder or zip, its bytes, when it was last changed."""

    path: PurePosixPath
    raw: bytes
    changed: datetime | None
    problem: str = ""  # why its bytes were not read


@dataclass(frozen=True)
class Received:
    """What became of one submission. refused: the reason, or empty."""

    student: str
    refused: str
    notes: tuple[str, ...] = ()


def collect(root: Path, lab_slug: str, source: Path) -> list[Received]:
    """Take in all submissions in `source`. Raises CourseError when `source` holds none."""
    release_path = next((root / "labs" / lab_slug).glob("*.ipynb"), None)
    if release_path is None:
        raise CourseError(f"{lab_slug} is not released in this course; first: inferlab grade release {lab_slug}")
    by_student: dict[str, list[Handed]] = {}
    for handed in _without_outer_folder(list(_files(source)), lab_slug, release_path.name):
        by_student.setdefault(_student(handed.path), []).append(handed)
    if not by_student:
        raise CourseError(f"no notebook in {source}; expected STUDENT/{lab_slug}/{release_path.name} or STUDENT.ipynb")
    return [receive(root, lab_slug, student, _choose(files, lab_slug, release_path.name))
            for student, files in sorted(by_student.items())]  # fmt: skip


def receive(root: Path, lab_slug: str, student: str, handed: Handed | str) -> Received:
    """Take in one submission, or (a text) record why there is none to take."""
    release_path = next((root / "labs" / lab_slug).glob("*.ipynb"))
    release = json.loads(release_path.read_text("utf-8"))
    lab = lab_from_notebook(release, lab_slug, release_path.stem)
    raw = b"" if isinstance(handed, str) else handed.raw
    refused, notebook = "", release
    notes: tuple[str, ...] = ()
    try:
        if not _STUDENT.match(student):
            raise Refused(f"the name {student[:50]!r} cannot be a student's id")
        if isinstance(handed, str) or handed.problem:
            raise Refused(handed if isinstance(handed, str) else handed.problem)
        notebook, notes = _intake(raw, release, lab)
    except Refused as error:
        refused = str(error)
        student = student if _STUDENT.match(student) else "unnamed-" + hashlib.sha256(student.encode()).hexdigest()[:8]
    received, submitted = root / "received" / student / lab_slug, root / "submitted" / student / lab_slug
    for folder in (received, submitted):
        folder.mkdir(parents=True, exist_ok=True)
    (received / release_path.name).write_bytes(raw)
    (submitted / release_path.name).write_text(write_notebook(notebook), "utf-8")
    digest = hashlib.sha256(raw + refused.encode()).hexdigest()
    record = {"received": digest, "refused": refused, "notes": list(notes)}
    (submitted / "intake.json").write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    if not isinstance(handed, str) and handed.changed is not None:
        (submitted / "timestamp.txt").write_text(handed.changed.strftime("%Y-%m-%d %H:%M:%S.%f UTC"), "utf-8")
    return Received(student, refused, tuple(notes))


def _intake(raw: bytes, release: dict[str, Any], lab: Lab) -> tuple[dict[str, Any], tuple[str, ...]]:
    try:
        submission = read_submission(raw, lab)
        return rebuild(release, lab, submission), tuple(submission.notes)
    except Refused:
        raise
    except Exception as error:  # one submission can never stop a batch, not even by a fault of ours
        raise Refused(f"the file could not be read: {type(error).__name__}") from error


def _without_outer_folder(files: list[Handed], lab_slug: str, name: str) -> list[Handed]:
    """Drops a folder that holds all submissions, as a zip of a folder has; a student's own folder is kept."""
    tops = {file.path.parts[0] for file in files}
    inside = [file.path.relative_to(file.path.parts[0]) for file in files if len(file.path.parts) > 1]
    if len(tops) != 1 or len(inside) != len(files):
        return files
    if any(path == PurePosixPath(name) or path.parts[0] == lab_slug for path in inside):
        return files
    if len(files) == 1 and len(inside[0].parts) == 1:
        return files
    return [dataclasses.replace(file, path=path) for file, path in zip(files, inside, strict=True)]


def _student(path: PurePosixPath) -> str:
    return path.parts[0] if len(path.parts) > 1 else path.stem


def _choose(files: list[Handed], lab_slug: str, name: str) -> Handed | str:
    """The one file that is this lab's, or why there is none."""
    for wanted in (
        [f for f in files if f.path.parts[-2:] == (lab_slug, name)],
        [f for f in files if f.path.name == name],
        files,
    ):
        if len(wanted) == 1:
            return wanted[0]
    return "several notebooks were handed in, none of them is named " + name


def _files(source: Path) -> Iterator[Handed]:
    """All notebooks in a folder or zip, each read only when it is a plain file of a sane size."""
    if source.is_dir():
        yield from _files_in_folder(source)
    elif zipfile.is_zipfile(source):
        yield from _files_in_zip(source)
    else:
        raise CourseError(f"{source} is neither a folder nor a zip file")


def _files_in_folder(source: Path) -> Iterator[Handed]:
    for path in sorted(source.rglob("*.ipynb"))[:MAX_FILES]:
        inner = PurePosixPath(path.relative_to(source).as_posix())
        if any(_is_hidden(part) for part in inner.parts):
            continue
        info = path.lstat()
        parents = [source / Path(*inner.parts[:n]) for n in range(1, len(inner.parts))]
        if not stat.S_ISREG(info.st_mode) or any(parent.is_symlink() for parent in parents):
            # Following a link would copy any file of this machine into the submission.
            yield Handed(inner, b"", None, "the file is a link or not a plain file")
        elif info.st_size > MAX_BYTES:
            yield Handed(
                inner, b"", None, f"the file has {info.st_size >> 20} MiB; at most {MAX_BYTES >> 20} MiB are read"
            )
        else:
            changed = datetime.fromtimestamp(info.st_mtime, UTC)
            yield Handed(inner, path.read_bytes(), changed)


def _is_hidden(part: str) -> bool:
    """Checkpoints and what file managers leave behind; `..` is not hidden, it is refused."""
    return (part.startswith(".") and part != "..") or part == "__MACOSX"


def _files_in_zip(source: Path) -> Iterator[Handed]:
    with zipfile.ZipFile(source) as archive:
        for entry in archive.infolist()[:MAX_FILES]:
            inner = PurePosixPath(entry.filename.replace("\\", "/"))
            if entry.is_dir() or inner.suffix != ".ipynb" or any(_is_hidden(part) for part in inner.parts):
                continue
            if inner.is_absolute() or ".." in inner.parts or stat.S_ISLNK(entry.external_attr >> 16):
                inner = PurePosixPath(*(part for part in inner.parts if part not in ("..", "/")))
                yield Handed(inner, b"", None, "the zip holds it as a link or outside its folder")
                continue
            try:
                with archive.open(entry) as file:
                    raw = file.read(MAX_BYTES + 1)
                yield Handed(inner, raw, None)
            except Exception as error:  # damaged, encrypted, an unknown method
                yield Handed(inner, b"", None, f"the zip's entry cannot be read: {type(error).__name__}")
