"""A question with its numbers drawn: how an answer is typed, judged and put into words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from chapters.typed_number import parse_number


@dataclass(frozen=True)
class Verdict:
    """A verdict on an answer. score: 0 to 1, with parts for multi, order and match. message: why, in words."""

    correct: bool
    score: float
    message: str


@dataclass(frozen=True)
class Question:
    """An item with its numbers drawn. What `check` takes, by kind:

    choice: index of an option · multi: set of indexes · numeric: a number
    short: the set of rubric points (its options) that the learner finds in the answer they wrote
    order: indexes of options in the right order · match: for each of `lefts`, the index of its option
    """

    id: str
    kind: str
    prompt: str
    options: tuple[str, ...]
    lefts: tuple[str, ...]
    unit: str
    right: Any
    judge: Callable[[Any], Verdict]
    why: str = ""
    notes: tuple[str, ...] = ()  # for each option the misconception it stands for, "" for a right one
    mistakes: tuple[tuple[str, float], ...] = ()  # known wrong ways to a number, and the number
    seed: int = 0  # of the draw
    tries: int = 2  # answers that are judged before what is right is shown
    key: str = ""  # chapter's folder / id, for the log of answers; "" where it was drawn outside of a quiz

    def check(self, given: Any) -> Verdict:
        """The verdict on an answer. Raises ValueError if it is not an answer at all (nothing chosen, not a number)."""
        return self.judge(given)

    def parse(self, text: str) -> Any:
        """What `check` takes, from what a learner types. Raises ValueError."""
        return parse_answer(self, text)

    def record(self, verdict: Verdict, seconds: float) -> str:
        """Adds an answer to the learner's log; returns "" or, where it cannot be written, why not."""
        from grader.quiz.review import ReviewError, record_answer

        try:
            if self.key:
                record_answer(self.key, verdict, seed=self.seed, seconds=seconds)
        except ReviewError as error:
            return str(error)
        return ""

    def as_text(self) -> str:
        """The question for a player without controls."""
        if self.kind in ("numeric", "short"):
            return self.prompt + (f" [{self.unit}]" if self.unit else "")
        rows = [f"   {letter(i)}) {text}" for i, text in enumerate(self.options)]
        lefts = [f"   {i}. {text}" for i, text in enumerate(self.lefts, 1)]
        return "\n".join([self.prompt, *lefts, *rows])

    def given_text(self, given: Any) -> list[str]:
        """An answer in words, line by line."""
        match self.kind:
            case "choice":
                return [f"{letter(given)}) {self.options[given]}"]
            case "multi" | "order" | "short":
                order = given if self.kind == "order" else sorted(given)
                return [f"{letter(i)}) {self.options[i]}" for i in order]
            case "match":
                return [f"{left}: {self.options[i]}" for left, i in zip(self.lefts, given, strict=True)]
            case _:
                return [f"{as_number(given)} {self.unit}"]

    def explained(self) -> str:
        """Why the right answer is right; with the number of a numeric item and the model answer of a short one."""
        message = self.judge(self.right).message
        match self.kind:
            case "short":
                return message.partition("\n")[2]  # without the count of points
            case "numeric":
                return message
            case _:
                return self.why

    def right_text(self) -> str:
        """What is right, in words; "" for a number, which its explanation names."""
        return "" if self.kind == "numeric" else "\n".join(self.given_text(self.right))

    def answer_text(self) -> str:
        """What is right, in words, and why."""
        return "\n".join(filter(None, [self.right_text(), self.explained()]))


def letter(index: int) -> str:
    """How an option is named where it is typed: a, b, c, …"""
    return chr(97 + index)


def parse_answer(question: Question, text: str) -> Any:
    """What a learner types for a question shown as text: letters (`b`, `ac`, `cab`), a number, or words.

    Raises ValueError.
    """
    text = text.strip()
    if question.kind == "numeric":
        return parse_number(text, question.unit)
    if question.kind == "short" and not text:
        return set()
    letters = [ord(character) - 97 for character in text.lower() if character not in " ,;.)"]
    if not letters or not all(0 <= i < len(question.options) for i in letters):
        raise ValueError(f"expected letters from a to {letter(len(question.options) - 1)}, got {text!r}")
    if question.kind == "choice":
        if len(letters) > 1:
            raise ValueError(f"expected one letter, got {text!r}")
        return letters[0]
    return set(letters) if question.kind in ("multi", "short") else letters


def as_number(value: float) -> str:
    """A number to read: 327,680 or 0.01234."""
    return f"{value:,.0f}" if value == int(value) and abs(value) < 1e15 else f"{value:.4g}"


def counted(count: int, noun: str) -> str:
    """`1 question`, `2 questions`. noun: one that takes an s."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def close(given: float, right: float, tolerance: float) -> bool:
    """Whether it is within `tolerance` of the right number, relative to it; a rounding error is always forgiven."""
    return abs(given - right) <= max(tolerance, 1e-9) * abs(right)
