"""The labs' sources, and the commit, which decides what part of their proofs `make test` tries.

`make test-all` proves every lab in full; `tests/record.txt` has what that needed, and a run says which are older.
"""

from __future__ import annotations

import functools
import hashlib
import os
import subprocess
from pathlib import Path

from tests.selection.record import PATH, Record
from tests.selection.sources import Tree

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "solutions").glob("[0-9]*_*/*.py"))


@functools.cache
def this_commit() -> str:
    """The commit's hash; outside of git, a hash of the course's manifest, which changes with the course."""
    return git("rev-parse", "HEAD") or hashlib.sha256((ROOT / "chapters" / "course.yaml").read_bytes()).hexdigest()


def git(*arguments: str) -> str:
    """Empty where git is missing, or has no answer."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_DIR")}
    command = ["git", "-C", str(ROOT), *arguments]
    try:
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600).stdout.strip()
    except OSError:
        return ""


@functools.cache
def due() -> tuple[Path, ...]:
    """The labs of which this commit tries most: the one whose turn it is, and those whose own files are not as they
    were when the tests were last recorded. The record sees what else changed: of another lab, `make test` tries that
    what is right passes and what is wrong does not."""
    turn = SOURCES[int(git("rev-list", "--count", "--first-parent", "HEAD") or 0) % len(SOURCES)]
    tree, record = Tree(ROOT, PATH), Record.read(ROOT / PATH)
    known = {(file.path, file.content) for file in record.files.values()}
    changed = [name for name in tree.names if (name, tree.content(name)) not in known]
    tops = ("solutions", "labs", "tests/labs")
    return tuple(source for source in SOURCES
                 if source == turn or any(name.startswith(f"{top}/{source.parent.name}/") for name in changed
                                          for top in tops))  # fmt: skip


def was_tried(test: str, source: Path) -> bool:
    """Whether the slow tests of this lab in a file of tests, `test`, were ever recorded as passed."""
    record, name = Record.read(ROOT / PATH), source.relative_to(ROOT).as_posix()
    slow = (line for line in record.lines if line.file == test and "slow" in line.costly)
    return any({"*", name} & record.paths(line) for line in slow)
