"""The quiz in a notebook: how each kind is answered, what is recorded, what stands there without a front end."""

import asyncio
import html
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from ipywidgets import Checkbox, RadioButtons, Text, Textarea

from chapters.widgets import quiz
from chapters.widgets.quiz import _CARDS, Card, QuizView
from grader.quiz import load_quiz
from grader.quiz.question import letter
from grader.quiz.review import Reviews

KV = load_quiz("02_kv_cache")


@pytest.fixture(autouse=True)
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("INFERLAB_DATA", str(tmp_path / "data"))
    _CARDS.clear()
    yield tmp_path / "data" / "reviews.jsonl"
    _CARDS.clear()


@dataclass
class Verdict:
    correct: bool
    message: str


@dataclass
class Asked:
    """A question as the widget sees one."""

    kind: str
    right: Any
    id: str = "q"
    key: str = ""
    seed: int = 0
    prompt: str = "Which <one>?"
    options: tuple[str, ...] = ("a", "b", "c")
    lefts: tuple[str, ...] = ()
    unit: str = "GB"
    tries: int = 2
    recorded: list[tuple[bool, float]] = field(default_factory=list)

    def parse(self, text: str) -> Any:
        return float(text) if self.kind == "numeric" else ["abc".index(character) for character in text]

    def check(self, given: Any) -> Verdict:
        if given is None:
            raise ValueError("choose one option")
        return Verdict(given == self.right, "because")

    def record(self, verdict: Any, seconds: float) -> str:
        self.recorded.append((verdict.correct, seconds))
        return "not stored: no room" if self.id == "full" else ""

    def right_text(self) -> str:
        return "the right one"

    def explained(self) -> str:
        return "the model answer"

    def answer_text(self) -> str:
        return "the answer"

    def as_text(self) -> str:
        return self.prompt


def inside(card: Card, kind: type) -> list[Any]:
    return [widget for widget in card.box.children if isinstance(widget, kind)]


def type_and_press_enter(field: Text, text: str) -> None:
    async def press() -> None:
        field._handle_custom_msg({"event": "submit"}, [])  # the key comes before the text, as from a browser
        field.value = text

    asyncio.run(press())


def enter(card: Card, given: Any) -> None:
    """Sets the controls as a learner would."""
    if card.question.kind == "choice":
        inside(card, RadioButtons)[given].index = 0
    elif card.question.kind == "multi":
        for i, box in enumerate(inside(card, Checkbox)):
            box.value = i in given
    else:
        text = str(given) if card.question.kind == "numeric" else "".join(map(letter, given))
        inside(card, Text)[0].value = text


KINDS: dict[str, Any] = {"choice": 1, "multi": {0, 2}, "numeric": 2.5, "order": [2, 0, 1], "match": [1, 2, 0]}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_answered_by_its_controls(kind: str) -> None:
    asked = Asked(kind, KINDS[kind])
    card = quiz([asked]).cards[0]
    enter(card, KINDS[kind])
    card.button.click()
    assert card.verdict is not None
    assert card.verdict.correct
    assert "Right." in card.result.value
    assert [correct for correct, _ in asked.recorded] == [True]


def test_nothing_chosen_is_said_and_not_recorded() -> None:
    asked = Asked("choice", 1)
    card = quiz([asked]).cards[0]
    card.button.click()
    assert "choose one" in card.result.value
    assert card.verdict is None
    assert asked.recorded == []


def test_of_the_radio_buttons_of_a_choice_one_stays_chosen() -> None:
    card = quiz([Asked("choice", 1)]).cards[0]
    buttons = inside(card, RadioButtons)
    assert [button.index for button in buttons] == [None, None, None]
    buttons[0].index = 0
    buttons[2].index = 0
    assert [button.index for button in buttons] == [None, None, 0]
    assert [button.options for button in buttons] == [("a",), ("b",), ("c",)]


def test_a_wrong_answer_reveals_nothing_until_the_tries_are_used_up() -> None:
    card = quiz([Asked("choice", 1)]).cards[0]
    card.question.check = lambda given: Verdict(given == 1, f"because {given}")  # type: ignore[method-assign]
    assert card.give_up.layout.display == "none"
    enter(card, 0)
    for _ in range(3):  # the same answer again is no second try
        card.button.click()
        assert "Not yet." in card.result.value
        assert "One more try, or show the answer." in card.result.value
        assert "because" not in card.result.value
        assert "the right one" not in card.result.value
    assert card.give_up.layout.display is None
    enter(card, 2)
    card.button.click()
    assert "because 2" in card.result.value
    assert "Right: the right one" in card.result.value
    assert card.give_up.layout.display == "none"


def test_the_answer_is_shown_to_a_learner_who_gives_up_after_a_try() -> None:
    asked = Asked("numeric", 2.5)
    card = quiz([asked]).cards[0]
    enter(card, 7)
    card.button.click()
    assert "because" not in card.result.value
    card.give_up.click()
    assert "Right: the right one" in card.result.value
    assert "because" in card.result.value
    assert [correct for correct, _ in asked.recorded] == [False]


def test_enter_in_a_field_checks_it_and_every_control_has_a_name() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)
        cards = {kind: quiz([Asked(kind, right)]).cards[0] for kind, right in (*KINDS.items(), ("short", {0}))}
    field = inside(cards["numeric"], Text)[0]
    type_and_press_enter(field, "2.5")
    assert cards["numeric"].verdict is not None
    for card in cards.values():
        assert all(control.description for kind in (Checkbox, Text, Textarea) for control in inside(card, kind))
        assert all(len(button.options) == 1 for button in inside(card, RadioButtons))  # named by its option
        assert "question 1" in card.button.tooltip


def test_only_the_first_answer_is_recorded_for_after_it_the_explanation_is_known() -> None:
    asked = Asked("choice", 1)
    view = quiz([asked])
    for given in (0, 1):
        enter(view.cards[0], given)
        view.cards[0].button.click()
    assert [correct for correct, _ in asked.recorded] == [False]
    assert "Right." in view.cards[0].result.value
    assert "1 of 1 answered, 0 right at the first try" in view.count.value


def test_an_answer_that_cannot_be_stored_is_judged_and_the_reason_shown() -> None:
    card = quiz([Asked("choice", 1, id="full")]).cards[0]
    enter(card, 1)
    card.button.click()
    assert "Right." in card.result.value
    assert "no room" in card.result.value


def test_a_text_is_judged_by_its_writer_after_the_answer_was_shown() -> None:
    asked = Asked("short", {0, 1, 2})
    card = quiz([asked]).cards[0]
    boxes = inside(card, Checkbox)
    assert {box.layout.display for box in boxes} == {"none"}
    card.button.click()
    assert "the model answer" in card.result.value
    assert "the answer" not in card.result.value  # it would repeat the points that stand in the boxes
    assert {box.layout.display for box in boxes} == {None}
    assert card.verdict is None
    for box in boxes:
        box.value = True
    card.button.click()
    assert card.verdict is not None
    assert card.verdict.correct
    assert len(asked.recorded) == 1


def test_the_quiz_without_a_front_end_folds_its_answers_away() -> None:
    data = quiz([Asked("choice", 1)])._repr_mimebundle_()
    assert "<details>" in data["text/html"]
    assert "Which &lt;one&gt;?" in data["text/html"]
    assert "the answer" not in data["text/plain"]
    assert "inferlab quiz" in data["text/plain"]


# ---------------------------------------------------------------- with the course's own questions


def chapter() -> QuizView:
    return quiz(KV.draw(seed=1))


def test_a_notebook_writes_into_the_log_that_the_terminal_reads(log: Path) -> None:
    view = chapter()
    for card in view.cards:
        if card.question.kind == "short":
            card.button.click()
            for box in card._points:
                box.value = True  # type: ignore[attr-defined]
        else:
            enter(card, card.question.right)  # type: ignore[attr-defined]
        card.button.click()
        assert "Right." in card.result.value, card.question.id
    answers = Reviews.load(log).answers
    assert [answer.key for answer in answers] == [f"02_kv_cache/{item.id}" for item in KV.items]
    assert {(answer.verdict, answer.seed) for answer in answers} == {("right", 1)}


def test_showing_a_quiz_records_nothing(log: Path) -> None:
    chapter()._repr_mimebundle_()
    assert not log.exists()


def test_running_the_cell_again_keeps_what_was_answered_and_records_nothing_twice(log: Path) -> None:
    card = chapter().cards[0]
    enter(card, (card.question.right + 1) % 4)  # type: ignore[attr-defined]
    card.button.click()
    again = chapter()
    assert "Not yet." in again.cards[0].result.value
    assert f"1 of {len(KV.items)} answered" in again.count.value
    again.cards[0].button.click()
    assert len(Reviews.load(log).answers) == 1
    other = quiz(KV.draw(seed=2))
    assert other.cards[0].verdict is None


def test_a_wrong_option_says_which_misconception_it_is() -> None:
    card = chapter().cards[0]
    question: Any = card.question
    enter(card, (question.right + 1) % 4)
    card.button.click()
    card.give_up.click()
    assert html.escape(question.notes[(question.right + 1) % 4]) in card.result.value
    assert html.escape(question.options[question.right]) in card.result.value


def test_a_mistyped_number_is_asked_again(log: Path) -> None:
    card = next(card for card in chapter().cards if card.question.kind == "numeric")
    for text in ("", "many", "1,5"):
        inside(card, Text)[0].value = text
        card.button.click()
        assert "expected a number" in card.result.value
    assert not log.exists()
