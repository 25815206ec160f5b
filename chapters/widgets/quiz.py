"""The quiz in a notebook: a question, controls to answer it, a button, and what the answer means.

A question knows what is right and says why; this file only shows it, and tells it what to remember. Any object with
the members below will do; `grader.quiz` makes them from quiz.yaml.
"""

from __future__ import annotations

import html
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ipywidgets import HTML, Button, Checkbox, HBox, Layout, RadioButtons, Textarea, VBox, Widget

from chapters.widgets.entry import one_line
from chapters.widgets.figure import GREEN, ORANGE, live

_WIDE = {"description_width": "initial"}
_TEXT = '<div style="line-height: 1.4">{}</div>'  # an HTML widget sets its lines as high as a button
# Right and wrong are words; the line beside them only repeats it. A screen reader says the text as it comes.
_RESULT = '<div role="status" style="line-height: 1.4; border-left: 4px solid {}; padding-left: 8px">{}</div>'

# ipywidgets cuts a label to one line; an option must be read to its end.
_CLASS = "inferlab-quiz"
_STYLE = (
    f"<style>.{_CLASS} .widget-checkbox, .{_CLASS} .widget-radio {{ height: auto; min-height: 24px }}"
    f" .{_CLASS} .widget-checkbox .widget-label-basic"
    " { white-space: normal; line-height: 1.4; height: auto }"
    f" .{_CLASS} .widget-radio-box {{ width: 100%; margin-bottom: 0 }}"
    f" .{_CLASS} .widget-radio-box label"
    " { white-space: normal; line-height: 1.4; height: auto; display: flex; align-items: flex-start; gap: 8px;"
    " flex-direction: row-reverse; justify-content: flex-end }"  # last in the page, first to the eye
    f" .{_CLASS} .widget-radio-box input {{ position: static; flex: none; margin: 0; height: 1.4em }}"
    f" .{_CLASS} .widget-text {{ flex-wrap: wrap; height: auto }}"  # on a phone the field stands below its label
    f" .{_CLASS} .widget-text input {{ min-width: 8em }}</style>"
)


class Verdict(Protocol):
    @property
    def correct(self) -> bool: ...
    @property
    def message(self) -> str: ...


class Question(Protocol):
    """kind: choice | multi | numeric | order | match | short. lefts: what options are matched to.

    parse reads a typed number, check judges, and both raise ValueError for what is no answer. record keeps an answer
    and returns "" or why it could not. key and seed: which item it is, and which numbers it drew; key may be "".
    tries: how many answers are judged before what is right is shown.
    """

    id: str
    key: str
    seed: int
    kind: str
    prompt: str
    options: tuple[str, ...]
    lefts: tuple[str, ...]
    unit: str
    tries: int

    def parse(self, text: str) -> Any: ...
    def check(self, given: Any) -> Verdict: ...
    def record(self, verdict: Any, seconds: float) -> str: ...
    def right_text(self) -> str: ...
    def explained(self) -> str: ...
    def answer_text(self) -> str: ...
    def as_text(self) -> str: ...


_CUES = {"choice": "One is right.", "multi": "Tick all that apply."}


class Card:
    """One question with its controls. `verdict` is None until the button was pressed.

    A wrong answer is said to be wrong and nothing else, until the tries are used up or the learner asks for the answer.
    Only the first answer is recorded.
    """

    def __init__(self, question: Question, number: int):
        self.question, self.number = question, number
        self.verdict: Verdict | None = None
        self.first: Verdict | None = None
        self.judged: Callable[[], None] = lambda: None  # the view that shows the card puts its count here
        self.begin = time.monotonic()
        self._judged: list[Any] = []  # the answers so far, each counted once
        controls, self._read = _CONTROLS[question.kind](question, self.check)
        self._points: list[Widget] = []
        if question.kind == "short":
            self._points = controls
            controls = [Textarea(description="In your own words:", style=_WIDE, layout=Layout(width="98%"))]
            self._show_points(False)
        self.button = Button(
            description="Show the answer" if question.kind == "short" else "Check", tooltip=f"Check question {number}"
        )
        self.button.on_click(lambda _: self.check())
        self.give_up = Button(description="Show the answer", tooltip=f"Show the answer to question {number}")
        self.give_up.layout.display = "none"  # until there was an answer
        self.give_up.on_click(lambda _: self.reveal())
        self.result = HTML()
        cue = f" <i>{_CUES[question.kind]}</i>" if question.kind in _CUES else ""
        prompt = HTML(_TEXT.format(f"<b>{number}.</b> {html.escape(question.prompt)}{cue}"))
        self.controls = controls
        buttons = HBox([self.button, self.give_up], layout=Layout(flex_flow="row wrap"))
        inside = [prompt, *controls, *self._points, buttons, self.result]
        self.box = VBox(inside, layout=Layout(margin="0 0 16px 0"))

    def check(self) -> None:
        """Judges what is entered now. A text is judged by its writer: the first press shows what to compare it with."""
        if self.question.kind == "short" and self.button.description != "Count my points":
            self._show_points(True)
            self.button.description = "Count my points"
            self._say(self.question.explained() + "\nTick the points that your answer has.")
            return
        try:
            given = self._read()
            self.verdict = self.question.check(given)
        except ValueError as error:
            self._say(str(error))
            return
        if given not in self._judged:
            self._judged.append(given)
        problem = ""
        if self.first is None:
            self.first = self.verdict
            problem = self.question.record(self.verdict, time.monotonic() - self.begin)
        left = self.question.tries - len(self._judged)
        if self.verdict.correct or self.question.kind == "short" or left <= 0:
            self.reveal(problem)
        else:
            more = "One more try" if left == 1 else f"{left} more tries"
            self._say(f"{more}, or show the answer." + ("\n" + problem if problem else ""), ORANGE, "Not yet.")
            self.give_up.layout.display = None
        self.judged()

    def reveal(self, problem: str = "") -> None:
        """Says what is right and why, with what the last answer shows to be misunderstood."""
        assert self.verdict is not None
        right = "" if self.verdict.correct or self.question.kind == "short" else self.question.right_text()
        text = "\n".join(filter(None, [f"Right: {right}" if right else "", self.verdict.message, problem]))
        colour, mark = (GREEN, "Right.") if self.verdict.correct else (ORANGE, "Not yet.")
        self._say(text, colour, mark)
        self._judged += [None] * self.question.tries  # the answer is known from here on
        self.give_up.layout.display = "none"

    def _show_points(self, shown: bool) -> None:
        for box in self._points:  # made now and hidden: a box that came later would take the focus from the button
            box.layout.display = None if shown else "none"

    def _say(self, text: str, colour: str = "transparent", mark: str = "") -> None:
        shown = (f"<b>{mark}</b> " if mark else "") + html.escape(text).replace("\n", "<br>")
        self.result.value = _RESULT.format(colour, shown)


class QuizView:
    def __init__(self, questions: Sequence[Question]):
        self.cards = [_card(question, number) for number, question in enumerate(questions, 1)]
        self.count = HTML()
        self.box = VBox([*(card.box for card in self.cards), self.count, HTML(_STYLE)])
        self.box.add_class(_CLASS)
        for card in self.cards:
            card.judged = self._count
        self._count()

    def _count(self) -> None:
        for card in self.cards:
            card.begin = time.monotonic()  # the time for the next answer runs from the last one
        firsts = [card.first for card in self.cards if card.first is not None]
        right = sum(first.correct for first in firsts)
        self.count.value = _TEXT.format(
            f"{len(firsts)} of {len(self.cards)} answered, {right} right at the first try. "
            "<code>inferlab quiz</code> in a terminal asks each again when it is due."
        )

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        parts = []
        for card in self.cards:
            text = html.escape(card.question.as_text()).replace("\n", "<br>")
            answer = html.escape(card.question.answer_text()).replace("\n", "<br>")
            parts.append(f"<p><b>{card.number}.</b> {text}</p><details><summary>Answer</summary>{answer}</details>")
        plain = "\n\n".join(f"{card.number}. {card.question.as_text()}" for card in self.cards)
        return live(self.box, "\n".join(parts), plain + "\n\nTo answer them in a terminal: inferlab quiz")


# Cards by what they show, so that running a cell again keeps what was answered in it.
_CARDS: dict[tuple[Any, ...], Card] = {}


def _card(question: Question, number: int) -> Card:
    if not question.key:
        return Card(question, number)
    shown = (question.key, question.seed, number, question.prompt, question.options, question.lefts)
    if shown not in _CARDS:
        _CARDS[shown] = Card(question, number)
    return _CARDS[shown]


def quiz(questions: Sequence[Question]) -> QuizView:
    """The questions one below the other, each with its own button. Without a front end: text, answers folded away."""
    return QuizView(questions)


# JupyterLab takes arrow keys and letters for itself unless a field of text has the focus, and a group of radio buttons
# and menus need them: without a mouse one could not choose. So each radio button is a group of its own, and of several
# this file keeps one: they work with Tab and Space, as boxes do; fields of text work with every key.


def _boxes(question: Question) -> list[Checkbox]:
    return [Checkbox(description=text, indent=False, layout=Layout(width="98%")) for text in question.options]


def _choice(question: Question, enter: Callable[[], None]) -> tuple[list[Widget], Callable[[], Any]]:
    buttons = [RadioButtons(options=[text], index=None, layout=Layout(width="98%")) for text in question.options]

    def alone(change: Any) -> None:
        if change["new"] is not None:
            for button in buttons:
                if button is not change["owner"]:
                    button.index = None

    for button in buttons:
        button.observe(alone, "index")
    return list(buttons), lambda: next((i for i, button in enumerate(buttons) if button.index is not None), None)


def _multi(question: Question, enter: Callable[[], None]) -> tuple[list[Widget], Callable[[], Any]]:
    boxes = _boxes(question)
    return list(boxes), lambda: {i for i, box in enumerate(boxes) if box.value}


def _typed(label: str) -> Callable[[Question, Callable[[], None]], tuple[list[Widget], Callable[[], Any]]]:
    """A field of text; above it what its letters stand for."""

    def controls(question: Question, enter: Callable[[], None]) -> tuple[list[Widget], Callable[[], Any]]:
        field = one_line(label.format(unit=question.unit), enter)
        lefts = [f"{i}. {text}" for i, text in enumerate(question.lefts, 1)]
        options = [f"{chr(97 + i)}) {text}" for i, text in enumerate(question.options)]
        listed = [HTML(_TEXT.format("<br>".join(map(html.escape, lines)))) for lines in (lefts, options) if lines]
        return [*listed, field], lambda: question.parse(field.value)

    return controls


# From a question, and what Enter does, to its controls and a function that reads the answer from them.
_CONTROLS: dict[str, Callable[[Question, Callable[[], None]], tuple[list[Widget], Callable[[], Any]]]] = {
    "choice": _choice,
    "multi": _multi,
    "numeric": _typed("A number ({unit}):"),
    "order": _typed("Letters in the right order, such as cab:"),
    "match": _typed("A letter for each number, such as cab:"),
    "short": _multi,
}
