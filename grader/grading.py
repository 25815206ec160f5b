"""The steps of a grade: release, run, feedback, report. Each works in a course folder and lets nbgrader do its part."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from grader.collect import Handed, receive
from grader.course import CourseError, course_directory, nbgrader_config, nbgrader_errors, quiet_log
from grader.lab import load_lab
from grader.lab_source import solution_notebook, write_notebook
from grader.results import Result


def release(root: Path, wanted: str, sources: Path) -> tuple[str, Path]:
    """Bring lab `wanted` from `sources` (a repository's solutions/) into the course and release it.

    Returns the lab's slug and the released notebook's path. Raises CourseError, LabError.
    """
    from nbgrader.converters import GenerateAssignment

    found = [p for p in sorted(sources.glob("[0-9]*_*/*.py")) if wanted in (p.parent.name, p.parent.name.split("_")[0])]
    if len(found) != 1:
        raise CourseError(f"no lab {wanted!r} in {sources}; releasing needs a checkout with its solutions")
    slug, name = found[0].parent.name, found[0].stem
    folder = root / "solutions" / slug
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.ipynb").write_text(write_notebook(solution_notebook(found[0])), "utf-8")
    config = nbgrader_config(root)
    converter = GenerateAssignment(coursedir=course_directory(config, slug), config=config, log=quiet_log())
    converter.force = True
    with nbgrader_errors(f"release {slug}"):
        converter.start()
    return slug, root / "labs" / slug / f"{name}.ipynb"


def lab_slug(root: Path, wanted: str) -> str:
    """The slug of a lab that is released in the course. Raises CourseError."""
    for folder in sorted((root / "labs").glob("[0-9]*_*")):
        if wanted in (folder.name, folder.name.split("_")[0]):
            return folder.name
    raise CourseError(f"{wanted} is not released in this course; first: inferlab grade release {wanted}")


def students(root: Path, slug: str) -> list[str]:
    """Ids of the students who handed in the lab."""
    return sorted(path.parent.name for path in (root / "submitted").glob(f"*/{slug}") if path.is_dir())


def run(root: Path, slug: str, again: bool = False) -> Iterator[Result]:
    """Grade the submissions that are new or changed (all with `again`), one result each, whatever happens."""
    from grader.nbgrader_hooks import load_result, read_intake, refused_result, save_result

    for student in students(root, slug):
        _intake_if_needed(root, slug, student)
        try:
            if not again and load_result(root, slug, student).received == read_intake(root, slug, student)["received"]:
                continue
        except (OSError, KeyError, ValueError, TypeError):
            pass  # not graded yet
        _forget(root, slug, student)
        problem = _autograde(root, slug, student)
        if problem:
            name = next((root / "solutions" / slug).glob("*.ipynb"))
            result = refused_result(load_lab(name), problem, status="machinery")
            result.student = student
            save_result(root, result)
            _zero_in_gradebook(root, slug, student)
        yield load_result(root, slug, student)


def _autograde(root: Path, slug: str, student: str) -> str:
    """Let nbgrader grade one submission; returns what went wrong in the machinery, or nothing."""
    from nbgrader.converters import Autograde

    config = nbgrader_config(root)
    converter = Autograde(coursedir=course_directory(config, slug, student), config=config, log=quiet_log())
    converter.force = True
    try:
        converter.start()
    except Exception as error:
        return f"the grader failed on this submission: {type(error).__name__}: {error}"
    from grader.nbgrader_hooks import result_path

    return "" if result_path(root, slug, student).exists() else "nbgrader skipped this submission"


def _intake_if_needed(root: Path, slug: str, student: str) -> None:
    """Take in a notebook that came into submitted/ by another way than `collect`, such as nbgrader's exchange."""
    folder = root / "submitted" / student / slug
    if (folder / "intake.json").exists():
        return
    name = next((root / "labs" / slug).glob("*.ipynb")).name
    path = folder / name
    if path.is_symlink() or not path.is_file():
        path.unlink(missing_ok=True)
        receive(root, slug, student, f"{name} is missing, or a link")
        return
    receive(root, slug, student, Handed(PurePosixPath(student, name), path.read_bytes(), None))


def _forget(root: Path, slug: str, student: str) -> None:
    from grader.nbgrader_hooks import result_path

    result_path(root, slug, student).unlink(missing_ok=True)


def _zero_in_gradebook(root: Path, slug: str, student: str) -> None:
    """Fail closed: where the machinery failed there is a zero that a person must look at, never an empty grade."""
    from nbgrader.api import Gradebook

    with Gradebook(course_directory(nbgrader_config(root), slug).db_url) as book:
        book.update_or_create_student(student)
        submission = book.update_or_create_submission(slug, student)
        for notebook in submission.notebooks:
            for grade in notebook.grades:
                grade.auto_score, grade.needs_manual_grade = 0.0, True
        book.db.commit()


def feedback(root: Path, slug: str) -> list[Path]:
    """One HTML page per graded submission, by nbgrader's generate_feedback with our page. Returns their paths."""
    from nbgrader.converters import GenerateFeedback

    config = nbgrader_config(root)
    made = []
    for student in students(root, slug):
        if not (root / "autograded" / student / slug).is_dir():
            continue
        converter = GenerateFeedback(coursedir=course_directory(config, slug, student), config=config, log=quiet_log())
        converter.force = True
        with nbgrader_errors(f"write the feedback for {student}"):
            converter.start()
        made += sorted((root / "feedback" / student / slug).glob("*.html"))
    return made


@dataclass(frozen=True)
class Row:
    """One student in the report. score: the gradebook's, in points, with manual changes; None before grading."""

    student: str
    score: float | None
    max_score: float
    result: Result | None


def report(root: Path, slug: str) -> list[Row]:
    """What the gradebook and the results say about every submission of the lab."""
    from nbgrader.api import Gradebook, MissingEntry

    from grader.nbgrader_hooks import load_result

    rows = []
    with Gradebook(course_directory(nbgrader_config(root), slug).db_url) as book:
        maximum = float(book.find_assignment(slug).max_score)
        for student in students(root, slug):
            try:
                score: float | None = float(book.find_submission(slug, student).score)
                result: Result | None = load_result(root, slug, student)
            except (MissingEntry, OSError):
                score = result = None
            rows.append(Row(student, score, maximum, result))
    return rows
