"""nbgrader's configuration of a course: our steps in its autograding and feedback, then what the course's file adds.

That file, `nbgrader_config.py` in the course folder, imports `nbgrader_config` from here; so it keeps its place.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from grader.course import CONFIG_NAME, CourseError
from grader.labs.release import kept_log, release_config
from grader.saying import install

_in_config_file: ContextVar[bool] = ContextVar("in_config_file", default=False)


@contextmanager
def nbgrader_errors(what: str) -> Iterator[None]:
    """Turns nbgrader's exceptions into a CourseError that says what was being done."""
    from nbgrader.converters.base import NbGraderException

    try:
        yield
    except NbGraderException as error:
        raise CourseError(f"nbgrader could not {what}; its messages are above ({error})") from error


def nbgrader_config(root: Path) -> Any:
    """nbgrader's configuration for the course in `root`, as a traitlets Config: ours, then what its file adds to it."""
    import nbgrader.api
    from traitlets.config import PyFileConfigLoader

    nbgrader.api.get_alembic_version = _gradebook_version
    nbgrader.api.app_log = kept_log("inferlab.gradebook")[0]  # a page of SQL before an exception that says the same
    c = _our_config(root)
    if (root / CONFIG_NAME).exists() and not _in_config_file.get():
        token = _in_config_file.set(True)  # the file itself calls this for our part
        try:
            c.merge(PyFileConfigLoader(CONFIG_NAME, str(root)).load_config())
        except Exception as error:
            raise CourseError(f"{root / CONFIG_NAME} cannot be used: {type(error).__name__}: {error}") from error
        finally:
            _in_config_file.reset(token)
    url = c.CourseDirectory.get("db_url", "")
    if str(url).startswith("postgresql") and importlib.util.find_spec("psycopg") is None:
        raise CourseError(f"a gradebook in PostgreSQL needs an extra: {install('postgres')}")
    return c


def _gradebook_version() -> str:
    """The version of the tables in a new gradebook. nbgrader starts the program `alembic` to learn it, which takes a
    second, and which is not on PATH without an activated environment.
    """
    import nbgrader
    from alembic.script import ScriptDirectory

    return str(ScriptDirectory(str(Path(nbgrader.__file__).with_name("alembic"))).get_current_head())


def _our_config(root: Path) -> Any:
    from grader.courses.late_plugin import CourseLatePolicy
    from grader.courses.nbgrader_hooks import FeedbackExporter, autograde_steps, feedback_steps

    c = release_config(root)
    c.OverwriteCells.add_missing_cells = True  # off, a deleted check would stay without a grade for ever
    c.Autograde.autograde_preprocessors = autograde_steps()
    c.AssignLatePenalties.plugin_class = CourseLatePolicy
    c.GenerateFeedback.exporter_class = FeedbackExporter
    c.GenerateFeedback.preprocessors = feedback_steps()
    return c
