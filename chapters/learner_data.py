"""Where the course keeps what the learner did: predictions, answers to quizzes. Widgets and grader both ask here."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs


def data_folder() -> Path:
    """INFERLAB_DATA, or the user's data folder. It need not exist yet."""
    given = os.environ.get("INFERLAB_DATA")
    return Path(given).expanduser() if given else Path(platformdirs.user_data_path("inferlab", appauthor=False))
