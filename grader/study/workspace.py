"""The learner's workspace: copies of chapters and labs, which belong to the learner.

`prepare` copies what is missing. A new version of the course, on request, replaces what the learner has not written
in, and goes beside what they have, as NAME.new.ipynb. Nothing a learner saved is ever without a name:

- Not touched: replaced.
- Only run (outputs and counts differ from what we copied, no source does): replaced too, since reading a chapter means
  running it, and the corrected one is expected under its name. Outputs may matter: the run copy stays, NAME.old.ipynb.
- Edited, read-only, or a link: stays under its name.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from grader.links import START
from grader.study.workspace_files import (
    Version,
    in_the_way,
    is_protected,
    place,
    place_beside,
    rename,
    replace,
    version_of,
)
from grader.study.workspace_files import (
    write_atomically as write_atomically,  # also for what else is put beside a notebook
)

STATE_NAME = ".inferlab.json"
RELEASED = "released"  # a private course's notebooks, from the instructor's bundle, in place of the public ones
PATIENCE = 20  # seconds; a prepare takes less than one
RENAMED = {  # notebooks that the course has renamed: what a learner has under the old name takes the new one
    "chapters/04_paged_attention/chapter.ipynb": "chapters/04_paged_attention/a_blocks.ipynb",
    "chapters/06_prefix_caching/chapter.ipynb": "chapters/06_prefix_caching/a_prefixes.ipynb",
}


class WorkspaceError(RuntimeError):
    """The workspace cannot be used: says which path, why, and what to do."""


def data_root() -> Path:
    """Folder that holds `labs`: the repository root in a checkout, `inferlab_data` beside the installed packages."""
    root = Path(__file__).resolve().parents[2]
    return root if in_checkout() else root / "inferlab_data"


def in_checkout() -> bool:
    return (Path(__file__).resolve().parents[2] / "datasets" / "course_model").is_dir()


def chapters_root() -> Path:
    """Folder of the chapters: a package beside this one, in a checkout and installed alike."""
    return Path(__file__).resolve().parents[2] / "chapters"


def labs_root() -> Path:
    """Folder of the labs as handed out: those of an instructor's bundle in the workspace, or else the public ones."""
    released = home() / RELEASED
    return released if released.is_dir() else data_root() / "labs"


def home() -> Path:
    """The folder in which the learner works: INFERLAB_HOME, or ~/inferlab."""
    return Path(os.environ.get("INFERLAB_HOME") or "~/inferlab").expanduser().absolute()


@dataclass
class Prepared:
    """What `prepare` did; paths are relative to the workspace."""

    home: Path
    renamed: dict[str, str] = field(default_factory=dict)  # the learner's file, whatever is in it -> its name now
    copied: list[str] = field(default_factory=list)  # new here
    updated: list[str] = field(default_factory=list)  # replaced; the learner had not changed them
    kept: dict[str, str] = field(default_factory=dict)  # replaced, but had been run -> where the run copy is
    beside: dict[str, str] = field(default_factory=dict)  # edited by the learner -> where the new version went
    outdated: list[str] = field(default_factory=list)  # a new version exists and --update was not given
    blocked: dict[str, str] = field(default_factory=dict)  # left alone -> why


@dataclass
class _State:
    """Per path: every version the course has had here, and the content hash of the newest one the learner was given."""

    ours: dict[str, list[Version]] = field(default_factory=dict)
    given: dict[str, str] = field(default_factory=dict)


def prepare(update: bool = False) -> Prepared:
    """Brings chapters and labs into the workspace. Without `update`, only what is missing is copied.

    Raises WorkspaceError if the workspace cannot be made or written.
    """
    result = Prepared(_make_home())
    course = [(relative, source.read_bytes()) for relative, source in course_files()]
    try:
        with _one_at_a_time(result.home):
            state = _read_state(result.home)
            for relative, content in course:
                if (version := version_of(content)) not in state.ours.setdefault(relative, []):
                    state.ours[relative].append(version)
            _rename(result, state, {relative for relative, _ in course})
            _write_state(result.home, state)  # before the first copy: after a crash it must not look like an edit
            try:
                for relative, content in course:
                    _bring(relative, content, result, state, update)
            finally:
                _write_state(result.home, state)
    except OSError as error:
        raise _unwritable(result.home, error) from None
    return result


def _rename(result: Prepared, state: _State, course: set[str]) -> None:
    """Gives learners' files the names that the course has now. One that is taken, read-only or a link stays."""
    for old, new in RENAMED.items():
        if old in course or new not in course:
            continue
        # What the course had under the old name is its own under the new one, too.
        known = state.ours.setdefault(new, [])
        known += [version for version in state.ours.get(old, []) if version not in known]
        if old in state.given:
            state.given.setdefault(new, state.given[old])
        there = result.home / old
        if not there.is_file() or is_protected(there):
            continue
        with contextlib.suppress(FileExistsError, FileNotFoundError):
            rename(there, result.home / new)
            result.renamed[old] = new


def _bring(relative: str, content: bytes, result: Prepared, state: _State, update: bool) -> None:
    for _ in range(3):
        if reason := in_the_way(result.home, relative):
            result.blocked[relative] = reason
            return
        # A name that is now taken was free a moment ago, or one that is gone was there: another process is saving.
        with contextlib.suppress(FileExistsError, FileNotFoundError):
            _bring_once(relative, content, result, state, update)
            return
    result.blocked[relative] = "another program keeps saving it"


def _bring_once(relative: str, content: bytes, result: Prepared, state: _State, update: bool) -> None:
    target, new, ours = result.home / relative, version_of(content), state.ours[relative]
    if not target.exists():
        place(target, content)
        result.copied.append(relative)
    else:
        there = version_of(target.read_bytes())
        untouched = there in ours and not is_protected(target)
        only_run = there.text in {version.text for version in ours} and not is_protected(target)
        if there == new or (there.text == new.text and not untouched):
            pass  # it has the newest text
        elif not untouched and state.given.get(relative) == new.content:
            pass  # the learner's edits, and nothing newer than what they started from or were given
        elif not update:
            result.outdated.append(relative)
            return
        elif only_run:
            aside = replace(target, content, is_ours=lambda found: version_of(found) in ours)
            if aside:
                result.kept[relative] = aside.relative_to(result.home).as_posix()
            else:
                result.updated.append(relative)
        else:
            result.beside[relative] = place_beside(target, content).relative_to(result.home).as_posix()
    state.given[relative] = new.content


def course_files() -> Iterator[tuple[str, Path]]:
    """(path in the workspace, source): START, the chapters' notebooks, all of a lab's folder, a page for assistants."""
    if (start := data_root() / START).is_file():
        yield START, start
    sources = (
        ("chapters", chapters_root(), "[0-9]*/**/*.ipynb"),
        ("labs", labs_root(), "[0-9]*/**/*"),
        ("labs", data_root() / "labs", "AGENTS.md"),
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
        ours = {str(name): [Version(**version) for version in versions] for name, versions in raw["ours"].items()}
        return _State(ours, dict(raw["given"]))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        # Missing or damaged: every file counts as the learner's and nothing is overwritten, which is the safe side.
        return _State()


def _write_state(folder: Path, state: _State) -> None:
    content = json.dumps(asdict(state), indent=1).encode()
    path = folder / STATE_NAME
    if not path.is_file() or path.read_bytes() != content:
        write_atomically(path, content)


@contextlib.contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Makes two `inferlab learn` take turns. Where one hangs, or files cannot be locked, the other continues after a
    while: no file is lost then, but a version may come twice.
    """
    import fcntl

    handle = os.open(folder, os.O_RDONLY)
    try:
        for _ in range(PATIENCE * 10):
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.1)
            except OSError:
                break
        yield
    finally:
        os.close(handle)
