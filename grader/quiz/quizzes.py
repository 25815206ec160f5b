"""The quizzes of the course: one quiz.yaml per chapter, and which questions are drawn from them."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import Field, ValidationError, field_validator

from grader.quiz.expressions import QuizError
from grader.quiz.items import Item, Strict
from grader.quiz.question import Question
from grader.study.manifest import Chapter, load_course
from grader.study.workspace import chapters_root

# Ten times as fast where PyYAML was built with libyaml, which matters when all chapters are opened at once.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class Quiz(Strict):
    """All items of a chapter."""

    chapter: Annotated[str, Field(pattern=r"^\d\d_[a-z0-9_]+$")]
    items: tuple[Item, ...] = Field(min_length=1)

    @field_validator("items")
    @classmethod
    def _ids_are_unique(cls, items: tuple[Item, ...]) -> tuple[Item, ...]:
        ids = [item.id for item in items]
        if twice := {i for i in ids if ids.count(i) > 1}:
            raise ValueError(f"item ids used twice: {sorted(twice)}")
        return items

    def item(self, id: str) -> Item:
        """The item with this id. Raises QuizError."""
        for item in self.items:
            if item.id == id:
                return item
        raise QuizError(f"{self.chapter} has no quiz item {id!r}; it has {', '.join(i.id for i in self.items)}")

    def key(self, item: Item) -> str:
        """The key under which the answers to an item are kept: `02_kv_cache/cost-without-cache`."""
        return f"{self.chapter}/{item.id}"

    def question(self, id: str, seed: int = 0) -> Question:
        """One item, drawn, with the key under which its answers are kept."""
        item = self.item(id)
        return replace(item.draw(seed), key=self.key(item))

    def draw(self, seed: int = 0, tag: str | None = None) -> list[Question]:
        """One question from each item, or from each with this tag, in the file's order."""
        return [self.question(item.id, seed) for item in self.items if tag is None or tag in item.tags]


def load_quiz(chapter: str, path: Path | None = None) -> Quiz:
    """Reads and checks the quiz of a chapter's folder (`02_kv_cache`), or the file given. Raises QuizError."""
    path = path or chapters_root() / chapter / "quiz.yaml"
    try:
        quiz = Quiz.model_validate(yaml.load(path.read_text("utf-8"), _LOADER))
        for item in quiz.items:
            item.draw(0)  # a name that does not exist is found now, not in front of a learner
    except (OSError, UnicodeDecodeError, yaml.YAMLError, ValidationError, QuizError) as error:
        raise QuizError(f"{path}: {error}") from None
    return quiz


def open_quizzes(chapters: Sequence[str] = ()) -> list[Quiz]:
    """The quizzes of these chapters (`02`, `2` or `02_kv_cache`), or of all that are written, in the order of study.

    Raises QuizError for a chapter that does not exist or has no quiz.
    """
    there = [
        chapter for chapter in load_course().chapters if (chapters_root() / chapter.folder / "quiz.yaml").is_file()
    ]
    if not chapters:
        return [load_quiz(chapter.folder) for chapter in there if chapter.status != "planned"]
    wanted = {_find(name, there).folder for name in chapters}
    return [load_quiz(chapter.folder) for chapter in there if chapter.folder in wanted]


def _find(name: str, there: Sequence[Chapter]) -> Chapter:
    for chapter in there:
        if name == chapter.folder or (name.isdecimal() and int(name) == chapter.number):
            return chapter
    known = ", ".join(chapter.folder for chapter in there)
    raise QuizError(f"{name!r} is no chapter with a quiz. There are quizzes for: {known}. Example: inferlab quiz 02")


@functools.cache
def title(folder: str) -> str:
    """A chapter as it is shown: `02 The KV cache`."""
    found = next((chapter for chapter in load_course().chapters if chapter.folder == folder), None)
    return f"{found.number:02d} {found.title}" if found else folder


def check_tag(quizzes: Iterable[Quiz], tag: str | None) -> None:
    """Raises QuizError if no item has this tag."""
    known = sorted({tag for quiz in quizzes for item in quiz.items for tag in item.tags})
    if tag is not None and tag not in known:
        raise QuizError(f"no item has the tag {tag!r}; there are {', '.join(known)}")


def draw_all(quizzes: Iterable[Quiz], tag: str | None, seed: int) -> list[Question]:
    """All items, or all with this tag, chapter by chapter."""
    return [question for quiz in quizzes for question in quiz.draw(seed, tag)]


def draw_due(quizzes: Iterable[Quiz], due: Iterable[str], tag: str | None, seed: int) -> list[Question]:
    """The items of these keys, in the keys' order. A key whose item is gone, or of another chapter, is left out."""
    there = {question.key: question for question in draw_all(quizzes, tag, seed)}
    return [there[key] for key in due if key in there]


# Minutes a prepared learner takes, by kind. They only decide how many items an interview has.
_MINUTES = {"choice": 1.0, "multi": 1.5, "order": 1.5, "match": 1.5, "numeric": 2.0, "short": 3.0}


def draw_interview(quizzes: Iterable[Quiz], tag: str | None, seed: int, minutes: float) -> list[Question]:
    """A random set that takes about so many minutes, from each chapter in turn, so that none outweighs the others."""
    rng = random.Random(f"interview:{seed}")
    piles = [rng.sample(pile, len(pile)) for quiz in quizzes if (pile := quiz.draw(seed, tag))]
    rng.shuffle(piles)
    drawn: list[Question] = []
    needed = 0.0
    while piles and needed < minutes:
        pile = piles.pop(0)
        drawn.append(pile.pop())
        needed += _MINUTES[drawn[-1].kind]
        if pile:
            piles.append(pile)
    return drawn


@dataclass(frozen=True)
class Exported:
    """An item as it leaves the course: with fixed numbers, in more than one copy if it draws any."""

    item: Item
    copies: tuple[Question, ...]


_COPIES = (1, 2, 3)  # seeds; the same ones in every export, so that a copy stays the same card


def draw_exported(quiz: Quiz, tag: str | None) -> list[Exported]:
    """All items, or all with this tag, in the file's order. The same file gives the same copies."""
    exported = []
    for item in quiz.items:
        if tag is None or tag in item.tags:
            drawn = [quiz.question(item.id, seed) for seed in (_COPIES if item.params else _COPIES[:1])]
            exported.append(
                Exported(item, tuple({question.prompt: question for question in drawn[::-1]}.values())[::-1])
            )
    return exported
