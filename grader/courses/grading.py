"""The steps of a grade: release, run, feedback, report. Each works in a course folder and lets nbgrader do its part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from grader.course import CourseError, released_labs
from grader.courses.batch import grade_students, plan, record_students
from grader.courses.course import nbgrader_config, nbgrader_errors
from grader.courses.drawn import drawn, list_drawn
from grader.courses.misconceptions import write_misconceptions
from grader.labs.lab_source import private_notebook, write_notebook
from grader.labs.release import course_directory, kept_log, quiet_log
from grader.results.result import Result


def release(root: Path, wanted: str, sources: Path) -> tuple[str, Path]:
    """Brings lab `wanted` from `sources` (a repository's solutions/) into the course and releases it.

    A private course gets the lab with the conventions drawn for it. What is released is scanned for what is hidden.
    Returns the lab's slug and the released notebook's path. Raises CourseError, LabError.
    """
    from nbgrader.converters import GenerateAssignment

    from grader.courses.bundle import refuse, release_leaks

    if not sources.is_dir():
        raise CourseError(
            f"there is no folder {sources}. The installed package holds no solutions, on purpose: clone the course's "
            "repository and run this from its environment, or name its folder: --sources REPOSITORY/solutions"
        )
    found = [p for p in sorted(sources.glob("[0-9]*_*/*.py")) if wanted in (p.parent.name, p.parent.name.split("_")[0])]
    if len(found) != 1:
        known = ", ".join(sorted(p.parent.name for p in sources.glob("[0-9]*_*/*.py"))) or "none"
        raise CourseError(f"no lab {wanted!r} in {sources}; labs there: {known}")
    slug, name = found[0].parent.name, found[0].stem
    folder = root / "solutions" / slug
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.ipynb").write_text(write_notebook(private_notebook(found[0], drawn(root, found[0]))), "utf-8")
    config = nbgrader_config(root)
    converter = GenerateAssignment(coursedir=course_directory(config, slug), config=config, log=quiet_log())
    converter.force = True
    with nbgrader_errors(f"release {slug}"):
        converter.start()
    made = root / "labs" / slug / f"{name}.ipynb"
    if leaks := release_leaks(root, slug, made):
        made.unlink()
        refuse(leaks, f"lab {slug} was not released")
    list_drawn(root, sources)
    mutants = sources.parent / "tests" / "labs"
    write_misconceptions(found[0], mutants, root / "misconceptions", drawn(root, found[0]))
    return slug, made


def lab_slug(root: Path, wanted: str) -> str:
    """The slug of a lab that is released in the course. Raises CourseError."""
    for slug in released_labs(root):
        if wanted in (slug, slug.split("_")[0]):
            return slug
    raise CourseError(f"{wanted} is not released in this course; first: inferlab grade release {wanted}")


def students(root: Path, slug: str, wanted: Sequence[str] | None = None) -> list[str]:
    """Ids of the students who handed in the lab, or of those `wanted`. Raises CourseError where one of them did not."""
    found = sorted(path.parent.name for path in (root / "submitted").glob(f"*/{slug}") if path.is_dir())
    if missing := sorted(set(wanted or ()) - set(found)):
        raise CourseError(f"{', '.join(missing)} handed in nothing for {slug}; ids are the folders in submitted/")
    return [student for student in found if not wanted or student in wanted]


def run(
    root: Path, slug: str, again: bool = False, wanted: Sequence[str] | None = None, **options: Any
) -> Iterator[Result]:
    """Grade the submissions that are new or changed (all with `again`), one result each, whatever happens.

    wanted: some students only; options: of `grader.courses.batch.grade_students`. Raises CourseError, before anything
    is graded, where receipts are damaged.
    """
    waiting = plan(root, slug, students(root, slug, wanted), again)
    if waiting.damaged:
        raise CourseError("\n".join(map(str, waiting.damaged)))
    yield from record_students(root, slug, waiting.record)
    yield from grade_students(root, slug, waiting.examine, **options)


def feedback(root: Path, slug: str) -> tuple[list[Path], dict[str, str]]:
    """Writes one HTML page per graded submission, by nbgrader's generate_feedback with our page. Returns the paths, and
    for each student whose page could not be written the reason; the others have theirs all the same.

    Call it under the course's lock: a run replaces what pages are made of. CourseError where the gradebook cannot be
    used.
    """
    from nbgrader.converters import GenerateFeedback
    from sqlalchemy.exc import SQLAlchemyError

    config = nbgrader_config(root)
    made: list[Path] = []
    failed: dict[str, str] = {}
    for student in students(root, slug):
        if not (root / "autograded" / student / slug).is_dir():
            continue
        log, messages = kept_log("inferlab.feedback")
        converter = GenerateFeedback(coursedir=course_directory(config, slug, student), config=config, log=log)
        converter.force = True
        try:
            converter.start()
        except Exception as error:  # whatever it is, it is this student's, unless it is the gradebook's
            if isinstance(error.__context__, SQLAlchemyError):
                said = str(getattr(error.__context__, "orig", error.__context__)).split("\n")[0]
                raise CourseError(f"the gradebook cannot be used: {said}. Is it being written to, by a formgrader or "
                                  "another command? The same command, later, writes all pages") from error  # fmt: skip
            failed[student] = messages.cause() or f"{type(error).__name__}: {error}"
            continue
        made += sorted((root / "feedback" / student / slug).glob("*.html"))
    return made, failed
