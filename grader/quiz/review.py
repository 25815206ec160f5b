"""When to ask an item again: FSRS cards, computed from the log of answers and from nothing else.

FSRS (Free Spaced Repetition Scheduler, version 6, package `fsrs`) estimates for each item how long the learner
remembers it, and sets the next review where the chance to recall it has fallen to 90 %.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Protocol

from fsrs import Card, Rating, Scheduler

from grader.quiz.answer_log import Answer, Grade, ReviewError, append_answer, log_path, read_answers

__all__ = ["Answer", "ReviewError", "Reviews", "grade", "record_answer", "utc_now"]

# No fuzz: the same log gives the same dates everywhere. No steps of minutes: they are for a player that repeats an item
# until it is learned, and here the answer has just been shown. So every interval is a day or more.
_SCHEDULER = Scheduler(enable_fuzzing=False, learning_steps=(), relearning_steps=())

# Intervals are whole days to the second: a learner who studies at eight today would find nothing due at seven tomorrow.
_EARLY = timedelta(hours=8)

# wrong   Again: the item was not recalled.
# partly  Hard: FSRS counts Hard as recalled, with effort. Half of the points and more is that; less is guessing.
# right   Good. Never Easy: how long an answer took says how long the sum was, not how well the idea is known.
_RATINGS = {"wrong": Rating.Again, "partly": Rating.Hard, "right": Rating.Good}
_PARTLY = 0.5


class Judged(Protocol):
    """A verdict, as far as a review needs it."""

    @property
    def correct(self) -> bool: ...
    @property
    def score(self) -> float: ...


def grade(verdict: Judged) -> Grade:
    """right, partly (at least half of the points), or wrong."""
    return "right" if verdict.correct else "partly" if verdict.score >= _PARTLY else "wrong"


def utc_now() -> datetime:
    return datetime.now(UTC)


def record_answer(
    key: str, verdict: Judged, *, seed: int, seconds: float, now: datetime | None = None, path: Path | None = None
) -> Answer:
    """Appends an answer to the log without reading it. Raises ReviewError where it cannot be written."""
    answer = Answer(key, now or utc_now(), grade(verdict), verdict.score, seed, max(0.0, seconds))
    append_answer(answer, path or log_path())
    return answer


class Reviews:
    """What the learner has answered, and what is due. Keys: `02_kv_cache/cost-without-cache`.

    An answer that another player writes meanwhile is in the file, and seen by the next `load`.
    """

    def __init__(self, path: Path, answers: list[Answer], damaged: int = 0):
        self.path = path
        self.answers = answers  # by time
        self.damaged = damaged  # lines left out
        self._cards: dict[str, Card] = {}
        for answer in answers:
            self._learn(answer)

    @classmethod
    def load(cls, path: Path | None = None) -> Reviews:
        """The learner's answers so far, from their data folder or the file given. Raises ReviewError."""
        path = path or log_path()
        return cls(path, *read_answers(path))

    def of(self, keys: Iterable[str]) -> Reviews:
        """The same, for these items only: an item that is gone from its quiz stays in the log, and is never due."""
        keys = frozenset(keys)
        return Reviews(self.path, [answer for answer in self.answers if answer.key in keys], self.damaged)

    @property
    def seen(self) -> frozenset[str]:
        """Keys of all items answered at least once."""
        return frozenset(self._cards)

    @property
    def next_due(self) -> datetime | None:
        """When the next item is due; in the past if one is due now, None if nothing was ever answered."""
        return min(map(_ready, self._cards.values()), default=None)

    def due(self, now: datetime | None = None) -> list[str]:
        """Keys of the items due at `now`, most urgent first: those least likely to be recalled."""
        now = (now or utc_now()).astimezone(UTC)
        return sorted((key for key, card in self._cards.items() if _ready(card) <= now), key=self._urgency(now))

    def due_at(self, key: str) -> datetime:
        """When an item that was seen is due. Raises KeyError for one that was not."""
        return _ready(self._cards[key])

    def recall(self, key: str, now: datetime | None = None) -> float:
        """FSRS's estimate of the chance that the item is recalled now, 0 to 1; 0 for one that was not seen."""
        card = self._cards.get(key)
        now = (now or utc_now()).astimezone(UTC)
        return float(_SCHEDULER.get_card_retrievability(card, now)) if card else 0.0

    def record(self, key: str, verdict: Judged, *, seed: int, seconds: float, now: datetime | None = None) -> Answer:
        """Stores an answer, on the disk first. Raises ReviewError where it cannot be written; nothing changes then."""
        answer = record_answer(key, verdict, seed=seed, seconds=seconds, now=now, path=self.path)
        self.answers.append(answer)
        self._learn(answer)
        return answer

    def _urgency(self, now: datetime) -> Callable[[str], tuple[float, datetime, str]]:
        return lambda key: (self.recall(key, now), _ready(self._cards[key]), key)

    def _learn(self, answer: Answer) -> None:
        # A card without an id would get one from the clock, and wait a millisecond for it.
        card = self._cards.get(answer.key) or Card(card_id=0, due=answer.time)
        self._cards[answer.key], _ = _SCHEDULER.review_card(card, _RATINGS[answer.verdict], answer.time)


def _ready(card: Card) -> datetime:
    return card.due - _EARLY
