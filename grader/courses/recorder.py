"""Records finished results in nbgrader's gradebook: one writer, one transaction per submission, nothing twice.

nbgrader does the recording, with its Autograde converter and our `ExaminerStep` in it. Alone it opens the gradebook
eight times for a submission, makes its tables anew each time and commits after every cell. Here all its steps share one
open gradebook, whose transaction ends when the submission is finished: a kill leaves all of it or nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nbgrader.api import Grade, Gradebook, GradeCell, MissingEntry, SubmittedAssignment, SubmittedNotebook
from nbgrader.converters import Autograde
from nbgrader.converters.base import NbGraderException
from sqlalchemy import event
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.exc import OperationalError, SQLAlchemyError
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from grader.course import FULL, CourseError, is_full
from grader.courses.course import nbgrader_config
from grader.courses.disarm import harmless_name
from grader.courses.nbgrader_hooks import load_result, result_path
from grader.labs.release import course_directory, kept_log
from grader.submissions.roster import Roster

BUSY_MS = 60_000  # that the writer waits while a formgrader writes to the same SQLite file
_OPENS = (
    "nbgrader.converters.autograde",
    "nbgrader.preprocessors.overwritecells",
    "nbgrader.preprocessors.saveautogrades",
    "nbgrader.preprocessors.latesubmissions",
)  # the modules of nbgrader that open the gradebook on the way of a submission


class RecordingFailed(RuntimeError):
    """nbgrader could not record one submission; the others are not affected."""


class _Held(Session):
    """A session in which nbgrader's `commit` after every cell only writes to the open transaction."""

    def commit(self) -> None:
        self.flush()


class _SharedGradebook(Gradebook):
    """A gradebook that stays open when nbgrader's steps are done with it; `finish` commits, `drop` forgets."""

    def __init__(self, db_url: str):
        super().__init__(db_url)
        super().close()
        if self.engine.dialect.name == "sqlite":
            event.listen(self.engine, "connect", lambda connection, _: connection.execute(_busy()))
        self.problem: BaseException | None = None  # of the database itself; nbgrader takes it for a student's
        event.listen(self.engine, "handle_error", self._hear)
        self.db = scoped_session(sessionmaker(autoflush=True, bind=self.engine, future=True, class_=_Held))

    def _hear(self, context: ExceptionContext) -> None:
        if isinstance(context.sqlalchemy_exception, OperationalError):
            self.problem = context.sqlalchemy_exception

    def close(self) -> None:
        pass

    def finish(self) -> None:
        Session.commit(self.db())
        self.db.remove()  # what a person writes in the formgrader meanwhile must be seen by the next submission

    def drop(self) -> None:
        self.db.rollback()
        self.db.remove()


def _busy() -> str:
    return f"PRAGMA busy_timeout = {BUSY_MS}"


class Recorder:
    """The writer of one lab's results. Use as a context manager, from one thread, under the course's lock."""

    def __init__(self, root: Path, slug: str):
        self._root, self._slug = root, slug
        config = nbgrader_config(root)
        # Metadata comes from the release, by intake: nothing to check, and checking takes nbgrader a third of its time.
        steps = ("DeduplicateIds", "CheckCellMetadata")
        config.Autograde.sanitize_preprocessors = _without(steps, Autograde.sanitize_preprocessors.default_args[0])
        config.Autograde.autograde_preprocessors = _without(steps, config.Autograde.autograde_preprocessors)
        config.ExaminerStep.examine = False
        log, self._messages = kept_log("inferlab.recorder")
        self._directory = course_directory(config, slug)
        with _database_errors():
            self._book = _SharedGradebook(self._directory.db_url)
        self._converter = Autograde(coursedir=self._directory, config=config, log=log)
        self._converter.force = True
        self._journal = Journal(root, slug)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: Any) -> None:
        self._book.drop()
        self._book.engine.dispose()

    def record(self, student: str) -> None:
        """Record the student's result. Raises RecordingFailed, and CourseError where no gradebook can be written."""
        self._messages.lines.clear()
        self._directory.student_id = student
        try:
            with _database_errors(), _all_steps_use(self._book):
                self._converter.start()
                if load_result(self._root, self._slug, student).status == "machinery":
                    self._let_a_person_look(student)
                self._book.finish()
        except NbGraderException as error:
            if self._book.problem is not None:
                raise _cannot_write(self._book.problem) from error
            cause = self._messages.cause() or str(error)
            if is_full(cause):
                raise CourseError(f"{FULL} ({cause[:300]})") from error
            raise RecordingFailed(cause) from error
        finally:
            self._book.drop()
        self._journal.add(student)

    def record_failure(self, student: str) -> None:
        """Records a zero that a person must look at, where nbgrader failed: never an empty grade."""
        with _database_errors():
            try:
                self._book.update_or_create_student(student)
                self._let_a_person_look(student)
                self._book.finish()
            finally:
                self._book.drop()
        self._journal.add(student)

    def _let_a_person_look(self, student: str) -> None:
        for notebook in self._book.update_or_create_submission(self._slug, student).notebooks:
            for grade in notebook.grades:
                grade.auto_score, grade.needs_manual_grade = 0.0, True


class Journal:
    """Which results are in the gradebook: a line per recording, the student and a digest of what was recorded.

    A line that a kill has torn or lost only means that the result is recorded once more, to the same effect.
    """

    def __init__(self, root: Path, slug: str):
        self._root, self._slug = root, slug
        self._path = root / "results" / slug / "recorded.log"
        self._known: dict[str, str] = {}
        with contextlib.suppress(FileNotFoundError):
            text = self._path.read_text("utf-8", "replace")
            for line in text.split("\n")[:-1]:
                student, _, digest = line.partition(" ")
                self._known[student] = digest
            if text and not text.endswith("\n"):
                self._write("\n")

    def add(self, student: str) -> None:
        self._known[student] = self._digest(student)
        self._write(f"{student} {self._known[student]}\n")

    def has(self, student: str) -> bool:
        """Whether the student's result, as it is now, has been recorded, with the time it was handed in."""
        return student in self._known and self._known[student] == self._digest(student)

    def _digest(self, student: str) -> str:
        digest = hashlib.sha256()
        submitted = self._root / "submitted" / student / self._slug / "timestamp.txt"
        for path in (result_path(self._root, self._slug, student), submitted):
            digest.update((path.read_bytes() if path.exists() else b"none") + b"\0")
        return digest.hexdigest()

    def _write(self, text: str) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(text)


def in_gradebook(root: Path, slug: str) -> set[str]:
    """Students who have an automatic score for every check of the lab. Raises CourseError."""
    with _database_errors(), Gradebook(course_directory(nbgrader_config(root), slug).db_url) as book:
        try:
            number = book.find_assignment(slug).id
        except MissingEntry:
            raise CourseError(f"{slug} is not in the gradebook; first: inferlab grade release {slug}") from None
        found = book.db.query(SubmittedAssignment.student_id).filter(SubmittedAssignment.assignment_id == number)
        without = (
            found.join(SubmittedNotebook, SubmittedNotebook.assignment_id == SubmittedAssignment.id)
            .join(Grade, Grade.notebook_id == SubmittedNotebook.id)
            .join(GradeCell, GradeCell.id == Grade.cell_id)
            .filter(GradeCell.cell_type == "code", Grade.auto_score.is_(None))
        )
        return {student for (student,) in found} - {student for (student,) in without}


def _without(names: tuple[str, ...], steps: list[type]) -> list[type]:
    return [step for step in steps if step.__name__ not in names]


@contextlib.contextmanager
def _all_steps_use(book: _SharedGradebook) -> Iterator[None]:
    """Gives `book` to nbgrader's steps where they open the gradebook, inside the block."""
    modules = [importlib.import_module(name) for name in _OPENS]
    for module in modules:
        module.Gradebook = lambda *_, **__: book  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for module in modules:
            module.Gradebook = Gradebook  # type: ignore[attr-defined]


@contextlib.contextmanager
def _database_errors() -> Iterator[None]:
    try:
        yield
    except SQLAlchemyError as error:
        raise _cannot_write(error) from error


def _cannot_write(error: BaseException) -> CourseError:
    said = str(getattr(error, "orig", None) or error).split("\n")[0]
    return CourseError(f"the gradebook cannot be used: {said}. No result is lost: repair it, then run again")


def register(root: Path, roster: Roster) -> None:
    """Bring the students' names and addresses into nbgrader's gradebook."""
    with Gradebook(course_directory(nbgrader_config(root), "*").db_url) as book:
        for student in roster.students.values():
            book.update_or_create_student(
                student.id, first_name=harmless_name(student.first_name) or None,
                last_name=harmless_name(student.last_name) or None,
                email=student.email or None, lms_user_id=student.ids.get("canvas_id") or student.ids.get("id_number"),
            )  # fmt: skip
