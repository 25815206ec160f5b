"""The learner's workspace: copies of chapters and labs, which belong to the learner.

`prepare` copies what is missing and remembers the hash of what it copied. A file whose hash has changed since is the
learner's and is never overwritten: a newer version goes beside it, as NAME.new.ipynb.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

STATE_NAME = ".inferlab.json"


class WorkspaceError(RuntimeError):
    """The workspace cannot be used: says which path, why, and what to do."""


def data_root() -> Path:
    """Folder that holds `labs`: the repository root in a checkout, `inferlab_data` beside the installed packages."""
    root = Path(__file__).resolve().parent.parent
    return root if in_checkout() else root / "inferlab_data"


def in_checkout() -> bool:
    return (Path(__file__).resolve().parent.parent / "datasets" / "course_model").is_dir()


def chapters_root() -> Path:
    """Folder of the chapters: a package beside this one, in a checkout and installed alike."""
    return Path(__file__).resolve().parent.parent / "chapters"


def home() -> Path:
    """Where the learner works: INFERLAB_HOME, or ~/inferlab."""
    return Path(os.environ.get("INFERLAB_HOME") or "~/inferlab").expanduser().absolute()


@dataclass
class Prepared:
    """What `prepare` did; paths are relative to the workspace."""

    home: Path
    copied: list[str] = field(default_factory=list)  # new here
    updated: list[str] = field(default_factory=list)  # replaced; the learner had not touched them
    beside: dict[str, str] = field(default_factory=dict)  # edited by the learner -> where the new version went
    outdated: list[str] = field(default_factory=list)  # a new version exists and --update was not given


@dataclass
class _State:
    """Hashes by path: of what we last put there, and of the newer version that lies beside the learner's file."""

    copied: dict[str, str] = field(default_factory=dict)
    offered: dict[str, str] = field(default_factory=dict)


def prepare(update: bool = False) -> Prepared:
    """Brings chapters and labs into the workspace. Without `update`, only what is missing is copied.

    Raises WorkspaceError if the workspace cannot be made or written.
    """
    result = Prepared(_make_home())
    state = _read_state(result.home)
    try:
        try:
            for relative, source in _course_files():
                _bring(relative, source.read_bytes(), result, state, update)
        finally:
            write_atomically(result.home / STATE_NAME, json.dumps(asdict(state), indent=1).encode())
    except OSError as error:
        raise _unwritable(result.home, error) from None
    return result


def _bring(relative: str, content: bytes, result: Prepared, state: _State, update: bool) -> None:
    target, new = result.home / relative, _sha256(content)
    there = _sha256(target.read_bytes()) if target.is_file() else None
    before = state.copied.get(relative)
    if there == new:
        state.copied[relative] = new
    elif there is None:
        write_atomically(target, content)
        state.copied[relative] = new
        result.copied.append(relative)
    elif new in (before, state.offered.get(relative)):
        pass  # the learner's edits, and nothing newer than what they started from or were given
    elif not update:
        result.outdated.append(relative)
    elif there == before:
        write_atomically(target, content)
        state.copied[relative] = new
        result.updated.append(relative)
    else:
        beside = _write_beside(target, content)
        state.offered[relative] = new
        result.beside[relative] = beside.relative_to(result.home).as_posix()


def _write_beside(target: Path, content: bytes) -> Path:
    """Writes NAME.new.ipynb, or NAME.new2.ipynb, … where that is taken: it may hold edits too."""
    for number in range(1, 1000):
        suffix = ".new" if number == 1 else f".new{number}"
        beside = target.with_name(f"{target.stem}{suffix}{target.suffix}")
        if not beside.exists():
            write_atomically(beside, content)
            return beside
    raise WorkspaceError(f"{target.parent}: too many .new files; delete the ones you do not need")


def _course_files() -> Iterator[tuple[str, Path]]:
    """(path in the workspace, source): the chapters' notebooks, all of a lab's folder, and the page for assistants."""
    labs = data_root() / "labs"
    sources = (
        ("chapters", chapters_root(), "[0-9]*/**/*.ipynb"),
        ("labs", labs, "[0-9]*/**/*"),
        ("labs", labs, "AGENTS.md"),
    )
    for top, root, pattern in sources:
        for source in sorted(root.glob(pattern)):
            inner = source.relative_to(root)
            if source.is_file() and not any(part.startswith((".", "__")) for part in inner.parts):
                yield f"{top}/{inner.as_posix()}", source


def _make_home() -> Path:
    folder = home()
    repository = data_root()
    if in_checkout() and folder.resolve().is_relative_to(repository):
        raise WorkspaceError(
            f"{folder} lies inside the repository {repository}, which stays clean. "
            "Set INFERLAB_HOME to a folder outside it, for example INFERLAB_HOME=~/inferlab"
        )
    for wanted in (folder, folder / "chapters", folder / "labs"):
        try:
            wanted.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            taken = next(p for p in (wanted, *wanted.parents) if p.exists() or p.is_symlink())
            raise WorkspaceError(
                f"{taken} is a file, but a folder is needed there. Move it away, or set INFERLAB_HOME to another folder"
            ) from None
        except OSError as error:
            raise _unwritable(wanted, error) from None
    return folder


def _unwritable(path: Path, error: OSError) -> WorkspaceError:
    reason = error.strerror or str(error)
    return WorkspaceError(
        f"cannot write to the workspace: {error.filename2 or error.filename or path}: {reason}. "
        "Make it writable, or set INFERLAB_HOME to a folder that is"
    )


def _read_state(folder: Path) -> _State:
    path = folder / STATE_NAME
    try:
        raw = json.loads(path.read_text("utf-8"))
        return _State(copied=dict(raw["copied"]), offered=dict(raw["offered"]))
    except (OSError, ValueError, TypeError, KeyError):
        # Missing or damaged: every file counts as the learner's and nothing is overwritten, which is the safe side.
        return _State()


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a file as a whole or not at all: under another name first, then renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".inferlab-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # mkstemp makes 0600; a workspace may be shared with a group
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
