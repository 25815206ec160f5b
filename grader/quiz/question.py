"""A question with its numbers drawn, and the player that asks it as text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Verdict:
    """score: 0 to 1, with parts for multi, order and match. message: why, in words."""

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

    def check(self, given: Any) -> Verdict:
        """Raises ValueError for what is no answer at all (nothing chosen, not a number)."""
        return self.judge(given)

    def as_text(self) -> str:
        """The question for a player without controls."""
        if self.kind in ("numeric", "short"):
            return self.prompt + (f" [{self.unit}]" if self.unit else "")
        rows = [f"   {chr(97 + i)}) {text}" for i, text in enumerate(self.options)]
        lefts = [f"   {i}. {text}" for i, text in enumerate(self.lefts, 1)]
        return "\n".join([self.prompt, *lefts, *rows])

    def answer_text(self) -> str:
        """What is right, in words, and why."""
        verdict = self.judge(self.right)
        match self.kind:
            case "choice":
                head = f"{chr(97 + self.right)}) {self.options[self.right]}\n"
            case "multi" | "order" | "short":
                order = self.right if self.kind == "order" else sorted(self.right)
                head = "".join(f"{chr(97 + i)}) {self.options[i]}\n" for i in order)
            case "match":
                head = "".join(f"{left}: {self.options[i]}\n" for left, i in zip(self.lefts, self.right, strict=True))
            case _:
                head = ""
        return head + verdict.message


def parse_answer(question: Question, text: str) -> Any:
    """What a learner types for a question shown as text: letters (`b`, `ac`, `cab`), a number, or words.

    Raises ValueError.
    """
    text = text.strip()
    if question.kind == "numeric":
        try:
            return float(text.replace(",", "").split()[0])
        except (ValueError, IndexError):
            raise ValueError(f"expected a number in {question.unit}, got {text!r}") from None
    letters = [ord(letter) - 97 for letter in text.lower() if letter.isalpha()]
    if question.kind == "short" and not letters:
        return set()
    if not letters or max(letters) >= len(question.options):
        raise ValueError(f"expected letters from a to {chr(96 + len(question.options))}, got {text!r}")
    if question.kind == "choice":
        if len(letters) > 1:
            raise ValueError(f"expected one letter, got {text!r}")
        return letters[0]
    return set(letters) if question.kind in ("multi", "short") else letters


def play(questions: list[Question], ask: Callable[[str], str] = input, say: Callable[[str], None] = print) -> float:
    """Asks the questions as text, one after the other; returns the mean score."""
    scores = []
    for number, question in enumerate(questions, 1):
        say(f"\n{number}. {question.as_text()}")
        if question.kind == "short":  # the learner judges: first write, then compare
            ask("> ")
            say(question.answer_text() + "\nWhich of these points does your answer have? (letters)")
        while True:
            try:
                verdict = question.check(parse_answer(question, ask("> ")))
                break
            except ValueError as error:
                say(str(error))
        say(f"{'Right.' if verdict.correct else 'Not yet.'} {verdict.message}")
        scores.append(verdict.score)
    return sum(scores) / len(scores) if scores else 0.0


def close(given: float, right: float, tolerance: float) -> bool:
    """Within `tolerance` of the right number, relative to it; a rounding error is always forgiven."""
    return abs(given - right) <= max(tolerance, 1e-9) * abs(right)
