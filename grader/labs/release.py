"""How nbgrader makes the notebook that learners get: its folders, and what replaces a solution.

The same for the public labs of the repository and for every course; a course adds its own, see `grader/courses`.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from grader.labs.lab import STUB


def release_config(root: Path) -> Any:
    """nbgrader's configuration, a traitlets Config, for releasing labs from `root`/solutions to `root`/labs."""
    from traitlets.config import Config

    c = Config()
    c.CourseDirectory.root = str(root)
    # Empty, as nbgrader leaves it, it names a course that no gradebook has: PostgreSQL refuses that, SQLite does not.
    c.CourseDirectory.course_id = "default_course"
    c.CourseDirectory.source_directory = "solutions"
    c.CourseDirectory.release_directory = "labs"
    # Without "*.py" nbgrader copies SLUG.py, with all solutions, next to the released notebook.
    c.CourseDirectory.ignore = ["*.py", "*.pyc", "__pycache__", ".ipynb_checkpoints", ".pytest_cache", "intake.json"]
    c.ClearSolutions.code_stub = {"python": STUB}
    return c


def course_directory(config: Any, lab: str, student: str = "*") -> Any:
    """nbgrader's CourseDirectory for one lab and one student ("*": all)."""
    from nbgrader.coursedir import CourseDirectory

    directory = CourseDirectory(config=config, log=quiet_log())
    directory.assignment_id, directory.student_id = lab, student
    return directory


class Messages(logging.Handler):
    """Keeps what nbgrader says went wrong; its exceptions only refer to its messages."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def cause(self) -> str:
        """The exception in the traceback that nbgrader wrote; without one, what it said first."""
        traces = [line for line in self.lines if line.startswith("Traceback")]
        return traces[0].strip().split("\n")[-1] if traces else " ".join(self.lines[:1])


def kept_log(name: str) -> tuple[logging.Logger, Messages]:
    """A log for nbgrader that prints nothing, and where its messages are kept."""
    log, messages = logging.getLogger(name), Messages()
    log.propagate, log.handlers = False, [messages]
    return log, messages


def quiet_log() -> logging.Logger:
    """nbgrader's messages at the level of errors; its commands are quiet when all is well."""
    log = logging.getLogger("inferlab.nbgrader")
    log.setLevel(logging.ERROR)
    return log
