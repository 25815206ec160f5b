"""How a quiz looks in a terminal, and how it reads: through rich, and as plain text where there is no terminal.

What colour says is always said in words too. Everything is wrapped to the width there is, with hanging indents.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console

from chapters.typed_number import NUMBERS
from grader.quiz.question import Question, Verdict, letter, parse_answer
from grader.quiz.review import grade

_HOW = {
    "choice": "one letter, such as b",
    "multi": "all letters that apply, such as ac",
    "numeric": "a number in {unit}",
    "order": "the letters in the right order, such as cab",
    "match": "a letter for each number, in the numbers' order, such as cab",
    "short": "your answer in your own words, on one line; then you compare it with a model answer",
}
_COMMANDS = "q leaves; what you answered is kept. s skips this one. ? shows this."
_POINTS = "Which of these points does your answer have? Type their letters, or nothing for none."
_MARKS = {"right": ("Right.", "green"), "partly": ("Partly right.", "yellow"), "wrong": ("Not yet.", "red")}


class Left(Exception):
    """The learner wants to stop: q."""


class Cut(Left):
    """There will be no more answers: Ctrl-C, or the end of the input."""


class Skipped(Exception):
    """The learner wants the next question."""


class Screen:
    """A console to write to and a source of lines. read: given the prompt, returns a line or raises EOFError."""

    def __init__(self, console: Console | None = None, read: Callable[[str], str] | None = None):
        self.console = console or Console(highlight=False)
        self._read = read or _read_line

    def say(self, text: str = "", style: str | None = None, lead: str = "") -> None:
        """Writes text, wrapped; line breaks stay. lead: what stands before it, such as `a) `; other lines are
        indented."""
        indent = " " * len(lead)
        for paragraph in text.split("\n"):
            width = max(20, min(self.console.width, 100))
            lines = textwrap.wrap(
                paragraph, width, initial_indent=lead, subsequent_indent=indent,
                break_long_words=False, break_on_hyphens=False,
            )  # fmt: skip
            for line in lines or [""]:
                self.console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)
            lead = indent

    def head(self, number: int, count: int, about: str) -> None:
        """Writes the line above a question."""
        self.say()
        self.say(f"[{number}/{count}] {about}", style="bold cyan")

    def show(self, question: Question) -> None:
        """Writes the question, and what can be typed."""
        self.say(question.prompt, style="bold")
        self.say()
        for i, text in enumerate(question.lefts, 1):
            self.say(text, lead=f"  {i}. ")
        if question.lefts:
            self.say()
        for i, text in enumerate(question.options if question.kind != "short" else ()):
            self.say(text, lead=f"  {letter(i)}) ")
        self.say(f"Type {_how(question)}. ? for help", style="dim")

    def ask(self, help: str) -> str:
        """Reads one line of the learner's. Raises Left, Cut or Skipped where it asks for that."""
        while True:
            try:
                line = self._read("> ").strip()
            except (EOFError, KeyboardInterrupt):
                self.say()
                raise Cut from None
            match line.lower():
                case "q":
                    raise Left
                case "s":
                    raise Skipped
                case "?":
                    self.say(f"Type {help}.")
                    self.say(_COMMANDS)
                case _:
                    return line

    def answer(self, question: Question) -> Any:
        """Reads what `question.check` takes; for a short answer, the text. Asks again for what is no answer."""
        while True:
            line = self.ask(_how(question) + (f", {NUMBERS}" if question.kind == "numeric" else ""))
            try:
                if question.kind == "short":
                    if not line:
                        raise ValueError("type a few words, s to skip, or q to leave")
                    return line
                given = parse_answer(question, line)
                question.check(given)
            except ValueError as error:
                self.say(f"{error}. ? for help", style="yellow")
            else:
                return given

    def points(self, question: Question) -> Verdict:
        """Lets the learner compare their answer with the model answer and count its points."""
        self.say(question.explained())
        self.say()
        self.say(_POINTS, style="bold")
        for i, text in enumerate(question.options):
            self.say(text, lead=f"  {letter(i)}) ")
        while True:
            try:
                return question.check(
                    parse_answer(question, self.ask("the letters of the points, or nothing for none"))
                )
            except ValueError as error:
                self.say(f"{error}. ? for help", style="yellow")

    def once_more(self, left: int) -> None:
        """Says that an answer is wrong, and nothing about the right one."""
        more = "One more try" if left == 1 else f"{left} more tries"
        self.say("Not yet.", style="bold red")
        self.say(f"{more}, or s to see the answer.")

    def verdict(self, question: Question, verdict: Verdict) -> None:
        """Says whether it is right, what is right, and why."""
        word, style = _MARKS[grade(verdict)]
        self.say(word, style=f"bold {style}")
        if not verdict.correct and question.kind not in ("numeric", "short"):
            self.listed("Right: ", question.given_text(question.right))
        if question.kind == "short":  # the model answer was shown before
            self.say(verdict.message.partition("\n")[0])
        else:
            self.say(verdict.message)

    def listed(self, lead: str, lines: Sequence[str]) -> None:
        """Writes lines under each other, the first after `lead`."""
        for line in lines:
            self.say(line, lead=lead)
            lead = " " * len(lead)

    def warn(self, text: str) -> None:
        self.say(text, style="bold yellow")


def _how(question: Question) -> str:
    return _HOW[question.kind].format(unit=question.unit)


def _read_line(prompt: str) -> str:
    if sys.stdin.isatty():
        return input(prompt)
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    print(prompt + line.rstrip("\n"))  # a pipe shows nothing of what it sends; a transcript should
    return line
