"""The labs' sources, and the commit, which decides what part of their proofs `make test` tries.

`make test-all` proves every lab in full; `tests/record.txt` has what that needed, and a run says which are older.
"""

from __future__ import annotations

import functools
import hashlib
import os
import subprocess
from pathlib import Path

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


def its_turn() -> Path:
    """The lab of which this commit tries most."""
    return SOURCES[int(git("rev-list", "--count", "--first-parent", "HEAD") or 0) % len(SOURCES)]


def has_changed(source: Path) -> bool:
    """Whether the lab's own files differ from those of the commit before."""
    own = [f"{top}/{source.parent.name}" for top in ("solutions", "labs", "tests/labs")]
    new = git("ls-files", "--others", "--exclude-standard", "--", *own)
    return bool(new or git("diff", "--name-only", "HEAD~1", "--", *own))


def was_tried(test: str, source: Path) -> bool:
    """Whether a slow test of this lab was ever recorded as passed."""
    record = ROOT / "tests" / "record.txt"
    return record.is_file() and f"{test}[{source.parent.name}]\t" in record.read_text("utf-8")
