"""Where the course keeps what the learner did: predictions, answers to quizzes. Widgets and grader both ask here."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import platformdirs


def data_folder() -> Path:
    """INFERLAB_DATA, or the user's data folder. It need not exist yet."""
    given = os.environ.get("INFERLAB_DATA")
    return Path(given).expanduser() if given else Path(platformdirs.user_data_path("inferlab", appauthor=False))


def append_record(path: Path, record: str) -> None:
    """Adds one line to a log and waits until it is on the disk. Raises OSError, also for a full disk.

    A record is its line break and then its text, in one write that the system appends as a whole. So a record that a
    kill cut short ends where the next one begins and costs only itself, and writers at the same time need no lock.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    data = ("\n" + record).encode()
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        written = os.write(handle, data)
        os.fsync(handle)
    finally:
        os.close(handle)
    if written < len(data):  # writing the rest now could land behind another writer's record
        raise OSError(errno.ENOSPC, "the disk is full", str(path))
