"""What a learner has done, chapter by chapter, read from what they leave behind. Nothing is kept here.

read       Code cells of a part that were run: an execution count in the saved notebook of the workspace, in the version
           laid beside it by an update (NAME.new.ipynb) or in the one put aside (NAME.old.ipynb). A cell is the same if
           its id is, or its text. The first cell, which installs the course elsewhere, does not count.
predicted  How many of the chapter's predictions were made; and how near: the factor between guess and answer.
quiz       Of a chapter's items, those answered at least once; right: at the last time; due: for review now.
solved     Points of the best `inferlab lab check`, and of the last.
"""

from __future__ import annotations

import ast
import importlib
import json
import math
import re
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from grader.examination.cell_source import plain_python
from grader.quiz.review import ReviewError, Reviews
from grader.study import lab_log, workspace
from grader.study.manifest import Chapter, Course, load_course

PLUMBING = "bootstrap"  # the id of the generated first code cell


@dataclass(frozen=True)
class PartProgress:
    """One notebook. run: code cells that were run, of `cells`; None where the learner's file cannot be read."""

    path: str  # in the workspace
    title: str
    cells: int
    run: int | None


@dataclass(frozen=True)
class LabProgress:
    """One lab. points: of the release, None while it is planned; best, last: earned, None before the first check."""

    folder: str
    slug: str
    points: int | None
    started: bool
    best: float | None = None
    last: float | None = None
    first_open: str = ""  # the check to begin with, at the last time

    @property
    def solved(self) -> bool:
        return self.points is not None and self.best == self.points


@dataclass(frozen=True)
class ChapterProgress:
    """One chapter. near: median factor between guess and answer, 1 is exact; None before the first answer was shown."""

    number: int
    folder: str
    title: str
    planned: bool
    parts: tuple[PartProgress, ...] = ()
    predicted: int = 0
    predictions: int = 0
    near: float | None = None
    answered: int = 0
    right: int = 0
    items: int = 0
    due: int = 0
    labs: tuple[LabProgress, ...] = ()

    @property
    def read(self) -> float | None:
        """Share of the chapter's code cells that were run, 0 to 1. None where nothing of it can be known."""
        known = [part for part in self.parts if part.run is not None]
        cells = sum(part.cells for part in known)
        return sum(part.run or 0 for part in known) / cells if cells else None


@dataclass
class Progress:
    """What a learner has done. problems: what could not be read, one sentence each; what is left is still right."""

    home: Path
    has_workspace: bool
    chapters: list[ChapterProgress] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    next_review: datetime | None = None  # the earliest; in the past where something is due


def measure(now: datetime | None = None, course: Course | None = None) -> Progress:
    """Reads workspace and data folder. Raises ManifestError only: a file that cannot be read becomes a problem."""
    home = workspace.home()
    progress = Progress(home, home.is_dir())
    records = _Records(now or datetime.now(UTC), progress.problems)
    progress.next_review = records.reviews.next_due if records.reviews else None
    for chapter in (course or load_course()).chapters:
        progress.chapters.append(_chapter(chapter, progress, records))
    return progress


class _Records:
    """The learner's data folder: predictions, answers to quizzes, checks of labs."""

    def __init__(self, now: datetime, problems: list[str]):
        # By name: the module also makes widgets, and ipywidgets comes without types.
        self.predictions = importlib.import_module("chapters.widgets.predictions").predictions()
        self.reviews: Reviews | None = None
        self.checks: dict[str, list[lab_log.Check]] = {}
        damaged = 0
        try:
            self.reviews = Reviews.load()
            damaged += self.reviews.damaged
        except ReviewError as error:
            problems.append(str(error))
        try:
            self.checks, broken = lab_log.read_checks()
            damaged += broken
        except OSError as error:
            problems.append(f"cannot read {lab_log.log_path()}: {error.strerror or error}")
        if damaged:
            problems.append(f"{damaged} damaged lines in {lab_log.log_path().parent} were left out")
        self.due = set(self.reviews.due(now)) if self.reviews else set()
        self.last = {answer.key: answer.verdict for answer in self.reviews.answers} if self.reviews else {}


def _chapter(chapter: Chapter, progress: Progress, records: _Records) -> ChapterProgress:
    labs = tuple(_lab(lab.slug, lab.points, chapter, progress.home, records) for lab in chapter.labs)
    if chapter.status == "planned":
        return ChapterProgress(chapter.number, chapter.folder, chapter.title, planned=True, labs=labs)
    parts: list[PartProgress] = []
    asked: set[str] = set()
    for part in chapter.parts:
        path = f"chapters/{chapter.folder}/{part.name}.ipynb"
        cells = code_cells(workspace.chapters_root() / chapter.folder / f"{part.name}.ipynb")
        asked.update(id for _, source in cells for id in predictions_asked(source))
        run = _run(cells, progress.home / path, path, progress.problems)
        parts.append(PartProgress(path, part.title, len(cells), run))
    made = [records.predictions[id] for id in sorted(asked & set(records.predictions))]
    items = quiz_keys(chapter.folder)
    return ChapterProgress(
        chapter.number,
        chapter.folder,
        chapter.title,
        planned=False,
        parts=tuple(parts),
        predicted=sum(prediction.guess is not None for prediction in made),
        predictions=len(asked),
        near=nearness([(prediction.guess, prediction.answer) for prediction in made]),
        answered=len(items & set(records.last)),
        right=sum(records.last.get(key) == "right" for key in items),
        items=len(items),
        due=len(items & records.due),
        labs=labs,
    )


def _lab(slug: str, points: int | None, chapter: Chapter, home: Path, records: _Records) -> LabProgress:
    started = (home / "labs" / chapter.folder / f"{slug}.ipynb").is_file()
    # A check of a release with other points says nothing about this one; checking again takes seconds.
    checks = [check for check in records.checks.get(chapter.folder, []) if check.points == points]
    if not checks:
        return LabProgress(chapter.folder, slug, points, started)
    best = max(check.earned for check in checks)
    return LabProgress(chapter.folder, slug, points, started, best, checks[-1].earned, checks[-1].first)


def code_cells(path: Path) -> list[tuple[str, str]]:
    """(id, source) of the code cells of a notebook of the course, without the generated first one."""
    cells = json.loads(path.read_text("utf-8"))["cells"]
    found = [(cell["id"], "".join(cell["source"])) for cell in cells if cell["cell_type"] == "code"]
    return [(id, source) for id, source in found if id != PLUMBING]


def predictions_asked(source: str) -> list[str]:
    """The ids of the predictions that a cell asks for: the first argument of each call of `predict`."""
    try:
        tree = ast.parse(plain_python(source))
    except SyntaxError:
        return []
    return [
        node.args[0].value
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and getattr(node.func, "attr", getattr(node.func, "id", "")) == "predict"
        and node.args
        and isinstance(node.args[0], ast.Constant)
        and isinstance(node.args[0].value, str)
    ]


def nearness(pairs: list[tuple[float | None, float | None]]) -> float | None:
    """Median factor between guess and answer: 2 is twice too much or half. Pairs without a ratio are left out."""
    factors = [
        math.exp(abs(math.log(guess / answer)))
        for guess, answer in pairs
        if guess is not None and answer is not None and guess > 0 and answer > 0
    ]
    return statistics.median(factors) if factors else None


def quiz_keys(folder: str) -> set[str]:
    """The keys of a chapter's quiz items. Only ids are read here; `load_quiz`, which checks everything, is slow."""
    path = workspace.chapters_root() / folder / "quiz.yaml"
    if not path.is_file():
        return set()
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return {f"{folder}/{item['id']}" for item in yaml.load(path.read_text("utf-8"), Loader=loader)["items"]}


def _run(cells: list[tuple[str, str]], path: Path, shown: str, problems: list[str]) -> int | None:
    executed: set[str] = set()
    broken = False
    for copy in _copies(path):
        try:
            executed |= executed_cells(copy)
        except (OSError, ValueError) as error:
            if copy == path:
                broken = True
                reason = error.strerror if isinstance(error, OSError) else error
                problems.append(f"{shown} cannot be read: {reason}. What you ran in it is not counted")
    run = sum(id in executed or source.strip() in executed for id, source in cells)
    return None if broken and not run else run


def _copies(path: Path) -> Iterator[Path]:
    """The learner's notebook, and its versions that updates laid beside it or put aside."""
    if path.exists():
        yield path
    for beside in sorted(path.parent.glob(f"{path.stem}.*{path.suffix}")):
        if re.fullmatch(r"\.(new|old)\d*", beside.name[len(path.stem) : -len(path.suffix)]):
            yield beside


def executed_cells(path: Path) -> set[str]:
    """Ids and sources of the code cells with an execution count. Raises OSError, and ValueError for no notebook."""
    try:
        cells: Any = json.loads(path.read_text("utf-8"))["cells"]
        run = [cell for cell in cells if cell["cell_type"] == "code" and cell.get("execution_count") is not None]
        found = {str(cell.get("id", "")) for cell in run} | {"".join(cell["source"]).strip() for cell in run}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError("it is not a notebook") from None
    return found - {""}
