"""Grade a lab again after one of its tests was fixed, and say what changed: old against new, per student and per check.

The old results stay in `results/LAB/history/WHEN/`. Points that a person gave stay in the gradebook, as nbgrader keeps
them, and such cells wait for that person again. A dry run grades in a copy of the course and leaves no trace.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from grader.course import CONFIG_NAME, CourseError, open_course
from grader.courses.course import nbgrader_config, nbgrader_errors
from grader.courses.recorded import recorded
from grader.courses.scores import scores
from grader.labs.release import course_directory, quiet_log
from grader.results.result import Result


@dataclass(frozen=True)
class Change:
    """What changed for one student. points: what the grader gave; totals: the gradebook's, None in a dry run or before
    grading; checks: those whose status changed, with both.
    """

    student: str
    old_points: float | None
    new_points: float
    old_status: str
    new_status: str
    old_total: float | None
    new_total: float | None
    checks: tuple[tuple[str, str, str], ...]

    @property
    def changed(self) -> bool:
        return bool(self.checks) or self.old_points != self.new_points or self.old_total != self.new_total


def regrade(
    root: Path, slug: str, dry_run: bool = False, tick: Callable[[Result], None] = lambda _: None, **options: Any
) -> list[Change]:
    """Grade every submission of the lab again. tick: called with each new result; options: of
    `grader.courses.grading.run`, such as `wanted`, for some students only. Raises CourseError.
    """
    there = recorded(root, slug)
    old = there.results
    if not old and not there.damaged:
        raise CourseError(f"nothing of {slug} is graded yet; first: inferlab grade run {slug}")
    before: dict[str, float | None] = {} if dry_run else _totals(root, slug)
    if dry_run:
        with _copy(root, slug) as copy:
            new = {result.student: result for result in _graded(copy, slug, tick, options)}
        after: dict[str, float | None] = {}
    else:
        _keep(root, slug)
        new = {result.student: result for result in _graded(root, slug, tick, options)}
        after = _totals(root, slug)
    return [_change(old.get(student), result, before.get(student), after.get(student))
            for student, result in sorted(new.items())]  # fmt: skip


def check_counts(changes: list[Change]) -> dict[str, tuple[int, int]]:
    """Per check: how many students gained it and how many lost it; without checks that no student gained or lost."""
    counts: dict[str, tuple[int, int]] = {}
    for change in changes:
        for name, before, after in change.checks:
            gained, lost = counts.get(name, (0, 0))
            counts[name] = (gained + (after == "passed"), lost + (before == "passed"))
    return {name: count for name, count in counts.items() if any(count)}


def _graded(root: Path, slug: str, tick: Callable[[Result], None], options: dict[str, Any]) -> Iterator[Result]:
    from grader.courses import grading

    for result in grading.run(root, slug, again=True, **options):
        tick(result)
        yield result


def _change(old: Result | None, new: Result, before: float | None, after: float | None) -> Change:
    was = {check.grade_id: check.status for check in old.checks} if old else {}
    checks = tuple((check.grade_id, was.get(check.grade_id, "new"), check.status)
                   for check in new.checks if was.get(check.grade_id, "new") != check.status)  # fmt: skip
    now = {check.grade_id for check in new.checks}
    gone = tuple((name, status, "removed") for name, status in was.items() if name not in now)
    return Change(new.student, old.earned if old else None, new.earned, old.status if old else "not graded",
                  new.status, before, after, checks + gone)  # fmt: skip


def _totals(root: Path, slug: str) -> dict[str, float | None]:
    return {score.student: score.total for score in scores(root, slug)}


def _keep(root: Path, slug: str) -> Path:
    """Copies the results as they are to the history; complete before anything is graded."""
    folder = root / "results" / slug
    stamp = datetime.now(UTC).strftime("%Y-%m-%dT%H-%M-%S-%fZ")
    unfinished = folder / "history" / f".{stamp}"
    unfinished.mkdir(parents=True)
    for path in (path for path in folder.glob("*.json") if path.is_file()):
        shutil.copy2(path, unfinished / path.name)
    return unfinished.rename(folder / "history" / stamp)


@contextmanager
def _copy(root: Path, slug: str) -> Iterator[Path]:
    """Yields a copy of the course with this lab alone, in another folder, with a gradebook of its own."""
    from nbgrader.converters import GenerateAssignment

    with tempfile.TemporaryDirectory(prefix="regrade-") as folder:
        copy = Path(folder)
        for path in root.iterdir():
            if path.is_file() and not path.name.startswith("gradebook.db"):
                shutil.copy2(path, copy / path.name)
        shutil.copytree(root / "solutions" / slug, copy / "solutions" / slug)
        for path in (path for folder in ("received", "submitted") for path in (root / folder).glob(f"*/{slug}")):
            shutil.copytree(path, copy / path.relative_to(root), symlinks=True)
        copy = open_course(copy)
        with (copy / CONFIG_NAME).open("a", encoding="utf-8") as file:  # at the end, to override any gradebook it names
            file.write(f"\nc.CourseDirectory.db_url = {f'sqlite:///{copy}/gradebook.db'!r}\n")
        config = nbgrader_config(copy)
        directory = course_directory(config, slug)
        if str(copy) not in directory.db_url:
            raise CourseError(f"a dry run needs a gradebook of its own, and {CONFIG_NAME} keeps another one")
        converter = GenerateAssignment(coursedir=directory, config=config, log=quiet_log())
        with nbgrader_errors(f"prepare {slug}"):
            converter.start()
        yield copy
