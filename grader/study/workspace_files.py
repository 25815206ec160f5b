"""Files of the workspace: hashes that say what a learner changed, and writing that never lands on another file.

A rename is the only step that can take a file away from its name, and it takes it to a name of its own. So whatever an
editor, a second process or a crash does in between, what the learner wrote still has a name.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

_PREFIX = ".inferlab-"  # of a file that is being written; the writer's process id follows


@dataclass(frozen=True)
class Version:
    """Hashes of one version of a file. content: of its bytes; text: of what was written in it by hand.

    The text of a notebook is its cells' sources: running it, or saving it with another editor, changes the content and
    not the text. Ends of lines, spaces before them and empty cells (Shift-Enter adds one) do not count as text.
    """

    content: str
    text: str


def version_of(content: bytes) -> Version:
    return Version(_sha256(content), _sha256(_text(content)))


def _text(content: bytes) -> bytes:
    try:
        written = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        return content
    try:
        cells = [(cell["cell_type"], _lines("".join(cell["source"]))) for cell in json.loads(written)["cells"]]
        written = json.dumps([cell for cell in cells if any(cell[1])])
    except (ValueError, KeyError, TypeError, RecursionError):
        written = "\n".join(_lines(written))  # not a notebook
    return written.encode("utf-8", "surrogatepass")


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def is_protected(path: Path) -> bool:
    """Whether the learner has said that this name is theirs: a link to a place of their own, or read-only."""
    return path.is_symlink() or not path.stat().st_mode & stat.S_IWUSR


def in_the_way(home: Path, relative: str) -> str:
    """Why nothing can be put at `relative`, or "" where it can: something other than a folder or a file is there."""
    target = home / relative
    for folder in reversed(target.relative_to(home).parents):
        if os.path.lexists(home / folder) and not (home / folder).is_dir():
            return f"{folder.as_posix()} is not a folder"
    if os.path.lexists(target) and not target.is_file():
        return "it is a folder" if target.is_dir() else "it is a link to nothing, or no ordinary file"
    return ""


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a file as a whole or not at all, over whatever is there: under another name first, then renamed."""
    with _written(path.parent, content) as temporary:
        os.replace(temporary, path)


def place(path: Path, content: bytes) -> None:
    """Writes a new file as a whole or not at all. Raises FileExistsError where the name is taken."""
    with _written(path.parent, content) as temporary:
        _give_name(temporary, path)


def rename(path: Path, name: Path) -> None:
    """Renames a file. Raises FileExistsError where `name` is taken, and FileNotFoundError where `path` has gone.

    It goes by way of a name that nothing saves to: what is saved at `path` meanwhile stays there. A crash in between
    leaves the file under that name, NAME.old.ipynb.
    """
    if os.path.lexists(name):
        raise FileExistsError(str(name))
    aside = _put_aside(path)
    _give_name(aside, name)
    aside.unlink()


def replace(path: Path, content: bytes, is_ours: Callable[[bytes], bool]) -> Path | None:
    """Puts `content` at `path` and what was there aside; returns where, or None where it was ours and is gone.

    What was there is read only when nothing can save over it any more. Raises FileNotFoundError where it has gone,
    and FileExistsError where a file of that name was saved meanwhile: then that file stays, and the other aside.
    """
    with _written(path.parent, content) as temporary:
        aside = _put_aside(path)
        _give_name(temporary, path)
    if not is_ours(aside.read_bytes()):
        return aside
    aside.unlink()
    return None


def place_beside(path: Path, content: bytes, kind: str = "new") -> Path:
    """Writes NAME.new.ipynb, or NAME.new2.ipynb, … where that is taken; returns the one that has the content."""
    for beside in _beside(path, kind):
        with contextlib.suppress(FileExistsError):
            place(beside, content)
            return beside
        if beside.is_file() and beside.read_bytes() == content:
            return beside
    raise AssertionError("there is always another number")


def _put_aside(path: Path) -> Path:
    for aside in _beside(path, "old"):
        with contextlib.suppress(FileExistsError):
            os.close(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))  # the name is ours: rename overwrites
            try:
                os.replace(path, aside)
            except OSError:
                aside.unlink()
                raise
            return aside
    raise AssertionError("there is always another number")


def _beside(path: Path, kind: str) -> Iterator[Path]:
    number = 1
    while True:
        yield path.with_name(f"{path.stem}.{kind}{number if number > 1 else ''}{path.suffix}")
        number += 1


def _give_name(source: Path, name: Path) -> None:
    """Gives a file a name. Raises FileExistsError where it is taken, even by a link to nothing."""
    try:
        os.link(source, name)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links (a network drive, a memory stick): the check comes first
        if os.path.lexists(name):
            raise FileExistsError(str(name)) from None
        os.replace(source, name)


def sweep(folder: Path) -> None:
    """Deletes what writers of this machine left in `folder` when they were killed."""
    for left in folder.glob(f"{_PREFIX}*"):
        pid = left.name.removeprefix(_PREFIX).partition("-")[0]
        if pid.isdigit() and not _is_alive(int(pid)):
            left.unlink(missing_ok=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        return True
    return True


@contextlib.contextmanager
def _written(folder: Path, content: bytes) -> Iterator[Path]:
    """A file on the disk, under a name that nothing looks for, which is gone afterwards."""
    folder.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=folder, prefix=f"{_PREFIX}{os.getpid()}-")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o644)  # mkstemp makes 0600; a workspace may be shared with a group
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)
