"""The quiz in a notebook. A question is whatever has the members below; `grader.quiz` makes them from quiz.yaml."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ipywidgets import HTML, Button, Checkbox, Dropdown, FloatText, HBox, Layout, RadioButtons, Textarea, VBox, Widget

from chapters.widgets.figure import live

_FULL = Layout(width="98%")
_TEXT = '<div style="line-height: 1.4">{}</div>'  # an HTML widget sets its lines as high as a button


class Verdict(Protocol):
    @property
    def correct(self) -> bool: ...
    @property
    def message(self) -> str: ...


class Question(Protocol):
    """kind: choice | multi | numeric | order | match | short. lefts: what options are matched to. check judges."""

    id: str
    kind: str
    prompt: str
    options: tuple[str, ...]
    lefts: tuple[str, ...]
    unit: str

    def check(self, given: Any) -> Verdict: ...
    def answer_text(self) -> str: ...
    def as_text(self) -> str: ...


class Card:
    """One question with its controls. `verdict` is None until the button was pressed."""

    def __init__(self, question: Question, number: int):
        self.question, self.number = question, number
        self.verdict: Verdict | None = None
        controls, self._read = _CONTROLS[question.kind](question)
        self._points: list[Widget] = []
        if question.kind == "short":
            self._points, controls = controls, [Textarea(placeholder="Your answer, in your own words", layout=_FULL)]
        self.button = Button(description="Show the answer" if question.kind == "short" else "Check")
        self.button.on_click(lambda _: self.check())
        self.result = HTML()
        prompt = HTML(_TEXT.format(f"<b>{number}.</b> {html.escape(question.prompt)}"))
        self.box = VBox([prompt, *controls, self.button, self.result], layout=Layout(margin="0 0 16px 0"))

    def check(self) -> None:
        """Judges what is entered now. A text is judged by its writer: the first press shows what to compare it with."""
        if self.question.kind == "short" and self.button.description != "Count my points":
            self.box.children = (*self.box.children[:2], *self._points, *self.box.children[2:])
            self.button.description = "Count my points"
            self._say(self.question.answer_text() + "\nTick the points that your answer has.")
            return
        try:
            self.verdict = self.question.check(self._read())
        except ValueError as error:
            self._say(str(error))
            return
        self._say(self.verdict.message, "Right." if self.verdict.correct else "Not yet.")

    def _say(self, text: str, mark: str = "") -> None:
        shown = (f"<b>{mark}</b> " if mark else "") + html.escape(text).replace("\n", "<br>")
        self.result.value = _TEXT.format(shown)


class QuizView:
    def __init__(self, questions: Sequence[Question]):
        self.cards = [Card(question, number) for number, question in enumerate(questions, 1)]
        self.box = VBox([card.box for card in self.cards])

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        parts = []
        for card in self.cards:
            text = html.escape(card.question.as_text()).replace("\n", "<br>")
            answer = html.escape(card.question.answer_text()).replace("\n", "<br>")
            parts.append(f"<p><b>{card.number}.</b> {text}</p><details><summary>Answer</summary>{answer}</details>")
        plain = "\n\n".join(f"{card.number}. {card.question.as_text()}" for card in self.cards)
        return live(self.box, "\n".join(parts), plain)


def quiz(questions: Sequence[Question]) -> QuizView:
    """The questions one below the other, each with its own button. Without a front end: text, answers folded away."""
    return QuizView(questions)


def _choice(question: Question) -> tuple[list[Widget], Callable[[], Any]]:
    radio = RadioButtons(options=[(text, i) for i, text in enumerate(question.options)], index=None, layout=_FULL)
    return [radio], lambda: radio.value


def _multi(question: Question) -> tuple[list[Widget], Callable[[], Any]]:
    boxes = [Checkbox(description=text, indent=False, layout=_FULL) for text in question.options]
    return list(boxes), lambda: {i for i, box in enumerate(boxes) if box.value}


def _numeric(question: Question) -> tuple[list[Widget], Callable[[], Any]]:
    field = FloatText(description=question.unit)
    return [field], lambda: field.value


def _places(question: Question, lefts: Sequence[str]) -> tuple[list[Widget], Callable[[], Any]]:
    """One menu for each place; the answer is the index of the option chosen there."""
    options = [("choose", None)] + [(text, i) for i, text in enumerate(question.options)]
    menus = [Dropdown(options=options, layout=Layout(width="60%")) for _ in lefts]
    rows = [
        HBox([HTML(html.escape(left), layout=Layout(width="35%")), m]) for left, m in zip(lefts, menus, strict=True)
    ]
    return rows, lambda: [menu.value for menu in menus]


def _order(question: Question) -> tuple[list[Widget], Callable[[], Any]]:
    return _places(question, [f"{i}." for i in range(1, len(question.options) + 1)])


def _match(question: Question) -> tuple[list[Widget], Callable[[], Any]]:
    return _places(question, question.lefts)


_CONTROLS: dict[str, Callable[[Question], tuple[list[Widget], Callable[[], Any]]]] = {
    "choice": _choice,
    "multi": _multi,
    "numeric": _numeric,
    "order": _order,
    "match": _match,
    "short": _multi,
}
