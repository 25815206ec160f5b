"""The files in a folder or a zip of submissions: listed without reading them, and each read alone, within limits.

Nothing is ever extracted: no path in a zip and no link in a folder decides where anything is written or read.
"""

from __future__ import annotations

import dataclasses
import io
import os
import stat
import unicodedata
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath

from grader.course import CourseError
from grader.examination.notebook_file import MAX_BYTES, Refused, too_large
from grader.results.shown_text import BLANK

MAX_ENTRIES = 200_000  # of a folder or zip that an instructor collects
MAX_FILES = 20_000  # of one student
MAX_PART = 2000  # characters of a folder's or file's name that are looked at; file systems allow 255 bytes
CHECKPOINTS = ".ipynb_checkpoints"  # where Jupyter keeps a copy of each notebook
_CENTRAL = b"PK\x01\x02"  # begins a zip's entry in its list of contents


@dataclass(frozen=True)
class Entry:
    """One file as handed in. path: inside the folder or zip, to tell whose it is, never to open anything.

    problem: why it will not be read; changed: as the folder or zip says, in UTC; read: its bytes, raises Refused;
    names: the parts of the path as they came, letter by letter. In a folder, owners: the user ids of the file and of
    the folders above it; settled: when the file became what it is (its ctime), which no user can choose.
    """

    path: PurePosixPath
    changed: datetime | None
    problem: str
    read: Callable[[], bytes]
    names: tuple[str, ...] = ()
    owners: frozenset[int] = frozenset()
    settled: datetime | None = None

    @property
    def given(self) -> tuple[str, ...]:
        return self.names[-len(self.path.parts) :] or self.path.parts

    @property
    def name(self) -> str:
        return self.path.name


@contextmanager
def opened(source: Path) -> Iterator[list[Entry]]:
    """All files of a folder or zip, which stays open meanwhile. Raises CourseError."""
    if source.is_dir():
        yield _limited(list(_files_in_folder(source)), source)
        return
    if not source.exists():
        raise CourseError(f"{source} does not exist")
    try:
        archive = zipfile.ZipFile(source)
    except OSError:
        raise
    except Exception as error:  # a damaged zip fails in many ways
        raise CourseError(
            f"{source} is neither a folder nor a sound zip file ({error}); if another program can unpack it, collect "
            "the folder"
        ) from error
    with archive:
        yield _limited(_files_in_zip(archive), source)


def hidden_notebooks(source: Path, entries: list[Entry]) -> list[str]:
    """The hidden files and folders of a folder or zip that hold notebooks, where none was handed in beside them: what
    Jupyter keeps of a notebook that is not there, a folder that begins with a dot. entries: what `opened` gave."""
    notebooks = [
        entry.path for entry in entries if ".ipynb" in entry.name.lower() or entry.name.lower().endswith(".zip")
    ]
    beside, above = {path.parent for path in notebooks}, {folder for path in notebooks for folder in path.parents}
    found: dict[str, None] = {}
    for path in _all_paths(source):
        at = next((number for number, part in enumerate(path.parts) if part.startswith(".")), None)
        if at is None or not path.name.endswith(".ipynb") or path.name.startswith("._"):  # macOS writes ._NAME
            continue
        folder, hidden = PurePosixPath(*path.parts[:at]), path.parts[at]
        if folder not in (above if hidden == CHECKPOINTS else beside - {PurePosixPath()}):
            found[str(folder / hidden)] = None
    return sorted(found)


def _all_paths(source: Path) -> Iterator[PurePosixPath]:
    if source.is_dir():
        for folder, _, files in os.walk(source):
            yield from (_inner(source, Path(folder, name)) for name in files)
        return
    with zipfile.ZipFile(source) as archive:
        for name in archive.namelist():
            yield PurePosixPath(*map(printable, PurePosixPath(name.replace("\\", "/")).parts))


def files_in_student_zip(raw: bytes) -> list[Entry]:
    """The files in a zip that a student handed in instead of a notebook. Raises Refused."""
    if raw.count(_CENTRAL) > MAX_FILES:
        raise Refused(f"the zip holds more than {MAX_FILES} files: hand in the notebook alone")
    try:
        return _files_in_zip(zipfile.ZipFile(io.BytesIO(raw)))
    except Exception as error:
        raise Refused(f"the zip is damaged ({type(error).__name__}): hand in the notebook itself") from None


def without_outer_folder(entries: list[Entry]) -> list[Entry]:
    """The entries with the folder taken off that holds all of them, as in a zip of a folder."""
    if len({entry.path.parts[0] for entry in entries}) != 1 or any(len(entry.path.parts) < 2 for entry in entries):
        return entries
    return [dataclasses.replace(entry, path=PurePosixPath(*entry.path.parts[1:])) for entry in entries]


def _limited(entries: list[Entry], source: Path) -> list[Entry]:
    if len(entries) > MAX_ENTRIES:
        raise CourseError(f"{source} holds {len(entries)} files, at most {MAX_ENTRIES} are taken in at once; is it the "
                          "right one? Split it into several otherwise")  # fmt: skip
    return entries


def _files_in_folder(source: Path) -> Iterator[Entry]:
    unreadable: list[OSError] = []
    owners: dict[str, frozenset[int]] = {}  # of each folder, with those above it
    for folder, names, files in os.walk(source, onerror=unreadable.append):
        above = owners.pop(folder, frozenset())
        for name in names:
            owners[os.path.join(folder, name)] = above | _owner(Path(folder, name))
        for name in sorted(names):
            path = Path(folder, name)
            if path.is_symlink():  # os.walk does not follow it, but it was handed in
                yield _unreadable(source, path, "is a link; a link is never followed")
            elif name.lower().endswith((".ipynb", ".zip")):
                yield _unreadable(source, path, "is a folder, not a file")
                names.remove(name)
        names[:] = sorted(name for name in names if not _is_clutter(name))
        for name in sorted(files):
            if not _is_clutter(name):
                yield _file_entry(source, Path(folder, name), above)
    for error in unreadable:
        yield _unreadable(source, Path(error.filename), f"cannot be read: {error.strerror}")


def _owner(path: Path) -> frozenset[int]:
    try:
        return frozenset({path.lstat().st_uid})
    except OSError:
        return frozenset()


def _unreadable(source: Path, path: Path, problem: str) -> Entry:
    def refuse() -> bytes:
        raise Refused(f"{_inner(source, path).name} {problem}")

    owners = frozenset[int]().union(*(_owner(p) for p in (path, *path.parents) if source in p.parents))
    names = path.relative_to(source).parts
    return Entry(_inner(source, path), None, f"{_inner(source, path).name} {problem}", refuse, names, owners)


def _file_entry(source: Path, path: Path, above: frozenset[int]) -> Entry:
    try:
        info = path.lstat()
    except OSError as error:
        return _unreadable(source, path, f"cannot be read: {error.strerror}")
    if stat.S_ISLNK(info.st_mode):
        return _unreadable(source, path, "is a link; a link is never followed")
    if not stat.S_ISREG(info.st_mode):
        return _unreadable(source, path, "is a pipe or a device, not a file")
    try:
        changed = datetime.fromtimestamp(info.st_mtime, UTC)
    except (ValueError, OverflowError, OSError):
        changed = None
    settled = datetime.fromtimestamp(info.st_ctime, UTC)
    names, owners = path.relative_to(source).parts, above | {info.st_uid}
    return Entry(
        _inner(source, path), changed, too_large(info.st_size), lambda: _read_file(path), names, owners, settled
    )


def _read_file(path: Path) -> bytes:
    """A plain file's bytes, even if a link or a pipe takes its place meanwhile. Raises Refused."""
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        descriptor = os.open(path, flags)
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise Refused("the file is not a plain file")
            return _capped(file.read(MAX_BYTES + 1))
    except OSError as error:
        raise Refused(f"the file cannot be read: {error.strerror}") from None


def _inner(source: Path, path: Path) -> PurePosixPath:
    """A path as text that can be printed and compared: names need not be UTF-8, and macOS takes letters apart."""
    return PurePosixPath(*(printable(part) for part in path.relative_to(source).parts))


def printable(text: str) -> str:
    """NFC, and what no terminal shows written as an escape. Two names may look alike then: see `Entry.names`."""
    text = text[:MAX_PART].encode("utf-8", "backslashreplace").decode("utf-8")
    text = unicodedata.normalize("NFC", text)  # takes the square of the number of accents on one letter
    return "".join(
        char if char.isprintable() and char not in BLANK else char.encode("unicode_escape").decode() for char in text
    )


def _is_clutter(part: str) -> bool:
    """Checkpoints and what file managers leave behind; `..` is not among it, it is refused."""
    return (part.startswith(".") and part != "..") or part in ("__MACOSX", "Thumbs.db", "desktop.ini", "__pycache__")


def _files_in_zip(archive: zipfile.ZipFile) -> list[Entry]:
    entries = (_zip_entry(archive, info) for info in archive.infolist() if not info.filename.endswith("/"))
    return [entry for entry in entries if entry.path.parts and not any(_is_clutter(part) for part in entry.path.parts)]


def _zip_entry(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Entry:
    path = PurePosixPath(_zip_name(info).replace("\\", "/"))
    problem = too_large(info.file_size)
    if path.is_absolute() or ".." in path.parts or (path.parts and path.parts[0].endswith(":")):
        problem = "the zip holds it outside its folder"
    elif stat.S_IFMT(info.external_attr >> 16) not in (0, stat.S_IFREG):
        problem = "the zip holds it as a link or a device; a link is never followed"
    elif info.flag_bits & 1:
        problem = "the zip is encrypted: hand in the notebook without a password"
    names = tuple(part for part in path.parts if part not in ("..", "/"))

    def read() -> bytes:
        if problem:
            raise Refused(problem)
        try:
            with archive.open(info) as file:
                return _capped(file.read(MAX_BYTES + 1))  # whatever size the zip claims: a bomb stops here
        except Refused:
            raise
        except Exception as error:  # damaged, an unknown method, a size that is a lie
            raise Refused(f"the zip is damaged here ({type(error).__name__}): hand it in again") from None

    return Entry(PurePosixPath(*map(printable, names)), _zip_time(info), problem, read, names)


def _zip_name(info: zipfile.ZipInfo) -> str:
    """An entry's name. Without the flag for UTF-8 it is cp437 by the standard, but many programs write UTF-8 anyway."""
    if info.flag_bits & 0x800 or info.filename.isascii():
        return info.filename
    try:
        return info.filename.encode("cp437").decode("utf-8")
    except UnicodeError:
        return info.filename


def _zip_time(info: zipfile.ZipInfo) -> datetime | None:
    """The time of a zip's entry. It has no zone and counts in twos of seconds; it is taken for this machine's clock."""
    try:
        return datetime(*info.date_time).astimezone(UTC) if info.date_time[0] > 1980 else None
    except (ValueError, OverflowError, OSError):
        return None


def _capped(raw: bytes) -> bytes:
    if reason := too_large(len(raw)):
        raise Refused(reason)
    return raw
