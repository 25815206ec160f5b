"""The items of quiz.yaml as pydantic models: what each kind must have, and how it becomes a question."""

from __future__ import annotations

import itertools
import math
import random
import string
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import date
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from grader.quiz.expressions import QuizError, evaluate
from grader.quiz.question import Question, Verdict, as_number, close

Text = Annotated[str, Field(min_length=1)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Span(Strict):
    """Whole numbers low, low + step, ... up to high."""

    low: int
    high: int
    step: int = Field(default=1, ge=1)


Param = Annotated[Span | list[int | float | str], Field(union_mode="left_to_right")]


class Option(Strict):
    """An answer to choose. A wrong one names the misconception it stands for."""

    text: Text
    right: bool = False
    misconception: Text | None = None

    @model_validator(mode="after")
    def _wrong_ones_say_why(self) -> Option:
        if self.right == (self.misconception is not None):
            raise ValueError(f"option {self.text!r}: expected right: true, or a misconception, and not both")
        return self


class Mistake(Strict):
    """A known wrong way to a number."""

    misconception: Text
    value: str


class _Item(Strict):
    id: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]*$")]
    prompt: Text
    difficulty: Literal[1, 2, 3]
    tags: tuple[Text, ...] = Field(min_length=1)
    source: tuple[Text, ...] = Field(min_length=1)  # items of the coverage list, e.g. 02-09, and its section tags
    why: Text
    params: dict[str, Param] = {}
    let: dict[str, str | int | float] = {}
    reviewed: date | None = None  # when the item was read a second time, looking for another defensible answer

    def values(self, chosen: Mapping[str, Any]) -> dict[str, Any]:
        """Params and everything `let` derives from them, in order."""
        names = dict(chosen)
        for name, expression in self.let.items():
            names[name] = evaluate(expression, names)
        return names

    def spaces(self) -> dict[str, list[Any]]:
        """The values each param can take."""
        return {
            name: list(range(p.low, p.high + 1, p.step)) if isinstance(p, Span) else list(p)
            for name, p in self.params.items()
        }

    def every(self, limit: int = 2000) -> Iterator[dict[str, Any]]:
        """All draws of the params; where there are more than `limit`, the corners and a fixed sample."""
        spaces = self.spaces()
        if math.prod(len(space) for space in spaces.values()) <= limit:
            tuples: Any = itertools.product(*spaces.values())
        else:
            rng = random.Random(0)
            corners = itertools.product(*((space[0], space[-1]) for space in spaces.values()))
            sample = (tuple(rng.choice(space) for space in spaces.values()) for _ in range(limit))
            tuples = itertools.chain(corners, sample)
        for values in tuples:
            yield self.values(dict(zip(spaces, values, strict=True)))

    def draw(self, seed: int = 0) -> Question:
        """The item with numbers filled in and options shuffled; the same seed gives the same question."""
        rng = random.Random(f"{self.id}:{seed}")
        names = self.values({name: rng.choice(space) for name, space in self.spaces().items()})
        return replace(self.build(names, rng), seed=seed)

    @abstractmethod
    def build(self, names: Mapping[str, Any], rng: random.Random) -> Question:
        """The question with these numbers; `rng` shuffles its options."""


class _TextItem(_Item):
    reviewed: date


class Choice(_TextItem):
    """One right option."""

    kind: Literal["choice"]
    options: tuple[Option, ...] = Field(min_length=3, max_length=6)

    @field_validator("options")
    @classmethod
    def _one_is_right(cls, options: tuple[Option, ...]) -> tuple[Option, ...]:
        if sum(option.right for option in options) != 1:
            raise ValueError(f"expected exactly one right option, got {sum(option.right for option in options)}")
        return options

    def build(self, names: Mapping[str, Any], rng: random.Random) -> Question:
        options = rng.sample(self.options, len(self.options))
        right = next(i for i, option in enumerate(options) if option.right)

        def check(given: Any) -> Verdict:
            if given is None:
                raise ValueError("choose one option")
            if given == right:
                return Verdict(True, 1.0, _fill(self.why, names))
            wrong = options[_index(given, len(options))].misconception or ""
            return Verdict(False, 0.0, f"{_fill(wrong, names)}\n{_fill(self.why, names)}")

        return _question(self, names, options=options, right=right, judge=check)


class Multi(_TextItem):
    """Any number of right options, at least one of each kind."""

    kind: Literal["multi"]
    options: tuple[Option, ...] = Field(min_length=3, max_length=8)

    @field_validator("options")
    @classmethod
    def _both_kinds(cls, options: tuple[Option, ...]) -> tuple[Option, ...]:
        if not 0 < sum(option.right for option in options) < len(options):
            raise ValueError("expected at least one right and one wrong option")
        return options

    def build(self, names: Mapping[str, Any], rng: random.Random) -> Question:
        options = rng.sample(self.options, len(self.options))
        right = frozenset(i for i, option in enumerate(options) if option.right)

        def check(given: Any) -> Verdict:
            chosen = {_index(i, len(options)) for i in given}
            if not chosen:
                raise ValueError("choose at least one option")
            # A wrong one takes away what a right one gives, so that ticking everything earns nothing by itself.
            score = max(0, len(chosen & right) - len(chosen - right)) / len(right)
            notes = [_fill(options[i].misconception or "", names) for i in sorted(chosen - right)]
            missing = [f"Also right: {_fill(options[i].text, names)}" for i in sorted(right - chosen)]
            message = "\n".join([*notes, *missing, _fill(self.why, names)])
            return Verdict(chosen == right, score, message)

        return _question(self, names, options=options, right=right, judge=check)


class Numeric(_Item):
    """A number to compute. `answer` and the mistakes are expressions; tolerance is relative."""

    kind: Literal["numeric"]
    answer: str
    unit: Text
    tolerance: float = Field(ge=0, lt=0.2)
    mistakes: tuple[Mistake, ...] = Field(min_length=1)

    def build(self, names: Mapping[str, Any], rng: random.Random) -> Question:
        right = float(evaluate(self.answer, names))
        wrong = tuple((m.misconception, float(evaluate(m.value, names))) for m in self.mistakes)

        def check(given: Any) -> Verdict:
            value = float(given)  # ValueError: not a number
            why = f"Computed: {as_number(right)} {self.unit}. {_fill(self.why, names)}"
            if close(value, right, self.tolerance):
                return Verdict(True, 1.0, why)
            fitting = [name for name, number in wrong if close(value, number, self.tolerance)]
            hint = f"That is the number you get by {fitting[0]}.\n" if fitting else ""
            return Verdict(False, 0.0, hint + why)

        return _question(self, names, right=right, judge=check, unit=self.unit, mistakes=wrong)


class Order(_TextItem):
    """Steps to bring into order; `steps` holds them in the right one."""

    kind: Literal["order"]
    steps: tuple[Text, ...] = Field(min_length=3, max_length=7)

    def build(self, names: Mapping[str, Any], rng: random.Random) -> Question:
        shuffled = rng.sample(self.steps, len(self.steps))
        right = tuple(shuffled.index(step) for step in self.steps)
        return _question(
            self, names, options=_plain(shuffled), right=right, judge=_placed(right, _fill(self.why, names))
        )


class Match(_TextItem):
    """Pairs to put together. All rights are shown for each left."""

    kind: Literal["match"]
    pairs: tuple[tuple[Text, Text], ...] = Field(min_length=3, max_length=7)

    @field_validator("pairs")
    @classmethod
    def _no_two_alike(cls, pairs: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
        for side in zip(*pairs, strict=True):
            if len(set(side)) != len(side):
                raise ValueError("expected every left and every right once; a repeated one has two defensible answers")
        return pairs

    def build(self, names: Mapping[str, Any], rng: random.Random) -> Question:
        rights = rng.sample([right for _, right in self.pairs], len(self.pairs))
        right = tuple(rights.index(pair[1]) for pair in self.pairs)
        judge = _placed(right, _fill(self.why, names))
        lefts = [left for left, _ in self.pairs]
        return _question(self, names, options=_plain(rights), right=right, judge=judge, lefts=lefts)


class Short(_TextItem):
    """A question with an answer in words, graded by the learner against a rubric."""

    kind: Literal["short"]
    model_answer: Text
    rubric: tuple[Text, ...] = Field(min_length=2)

    def build(self, names: Mapping[str, Any], rng: random.Random) -> Question:
        message = f"A model answer: {_fill(self.model_answer, names)}\n{_fill(self.why, names)}"

        def check(given: Any) -> Verdict:
            found = {_index(i, len(self.rubric)) for i in given}
            score = len(found) / len(self.rubric)
            return Verdict(score == 1, score, f"{len(found)} of {len(self.rubric)} points.\n{message}")

        right = frozenset(range(len(self.rubric)))
        return _question(self, names, options=_plain(self.rubric), right=right, judge=check)


Item = Annotated[Choice | Multi | Numeric | Order | Match | Short, Field(discriminator="kind")]


def _question(
    item: _Item, names: Mapping[str, Any], *, options: Sequence[Option] = (), lefts: Sequence[str] = (), **rest: Any
) -> Question:
    filled = tuple(_fill(option.text, names) for option in options)
    if len(set(filled)) != len(filled):
        raise QuizError(f"{item.id}: two options read the same: {filled}")
    return Question(
        id=item.id,
        kind=str(getattr(item, "kind", "")),
        prompt=_fill(item.prompt, names),
        options=filled,
        lefts=tuple(_fill(text, names) for text in lefts),
        why=_fill(item.why, names),
        notes=tuple(_fill(option.misconception or "", names) for option in options),
        **{"unit": "", **rest},
    )


def _plain(texts: Iterable[str]) -> list[Option]:
    """Texts that are all right, each in its place."""
    return [Option(text=text, right=True) for text in texts]


def _placed(right: tuple[int, ...], why: str) -> Callable[[Any], Verdict]:
    def check(given: Any) -> Verdict:
        if len(given) != len(right) or None in given:
            raise ValueError(f"expected an answer in each of {len(right)} places")
        if len(set(given)) != len(given):
            raise ValueError("each one is used once")
        hits = sum(a == b for a, b in zip(given, right, strict=True))
        return Verdict(hits == len(right), hits / len(right), f"{hits} of {len(right)} in place. {why}")

    return check


def _index(given: Any, count: int) -> int:
    if not isinstance(given, int) or not 0 <= given < count:
        raise ValueError(f"expected the number of an option, 0 to {count - 1}, got {given!r}")
    return given


def _fill(text: str, names: Mapping[str, Any]) -> str:
    """Text with {name} and {name:.1f} filled in. Attributes and subscripts are not reached."""
    parts = []
    for literal, field, spec, _ in string.Formatter().parse(text):
        parts.append(literal)
        if field is not None:
            if field not in names:
                raise QuizError(f"{{{field}}} is neither in params nor in let: {text!r}")
            parts.append(format(names[field], spec or ""))
    return "".join(parts)
