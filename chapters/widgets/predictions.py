"""The prediction box: you guess before you see, and a later chapter shows how well calibrated you have become.

Guesses are lines of JSON in one file of the user's data folder. A line is written in one call and synced, and a line
that a crash cut short is skipped when the file is read, so no crash costs more than the guess being written.
"""

from __future__ import annotations

import html
import json
import math
import time
from dataclasses import dataclass
from typing import Any

from ipywidgets import HTML, Button, HBox, Layout, VBox

from chapters.learner_data import append_record, data_folder
from chapters.typed_number import parse_number
from chapters.widgets.entry import one_line
from chapters.widgets.figure import live

_TEXT = '<div style="line-height: 1.4">{}</div>'  # an HTML widget sets its lines as high as a button


@dataclass(frozen=True)
class Prediction:
    """What was guessed and, once seen, what was right. The latest of each counts."""

    id: str
    guess: float | None = None
    answer: float | None = None
    unit: str = ""


def predictions() -> dict[str, Prediction]:
    """All predictions by id. Empty where none were made."""
    try:
        lines = (data_folder() / "predictions.jsonl").read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    found: dict[str, Prediction] = {}
    for line in lines:
        try:
            entry = json.loads(line)
            before = found.get(entry["id"], Prediction(entry["id"]))
            found[entry["id"]] = Prediction(
                entry["id"],
                float(entry["guess"]) if "guess" in entry else before.guess,
                float(entry["answer"]) if "answer" in entry else before.answer,
                str(entry.get("unit", before.unit)),
            )
        except (ValueError, KeyError, TypeError):
            continue
    return found


def store(id: str, **values: float | str) -> str:
    """Adds one line to the file; returns "" or, where it cannot be written, why not. Never raises for a full disk."""
    path = data_folder() / "predictions.jsonl"
    try:
        append_record(path, json.dumps({"id": id, "time": round(time.time(), 1), **values}))
    except OSError as error:
        return f"not stored: {path}: {error.strerror or error}"
    return ""


class Predict:
    """A question, a field for a number, and a button; Enter in the field does what the button does.

    The field is empty until something is typed, so what was never touched is no guess. `predict(..., guess=3)` does
    the same without a mouse.
    """

    def __init__(self, id: str, question: str, unit: str, guess: float | None):
        self.id, self.question, self.unit = id, question, unit
        before = predictions().get(id)
        known = before.guess if before else None
        self.field = one_line(
            f"Guess ({unit})" if unit else "Guess",
            self.store_typed,
            value="" if known is None else _shown(known),
            placeholder="a number",
            layout=Layout(max_width="100%"),
        )
        self.button = Button(description="Store my guess")
        self.status = HTML()
        self.button.on_click(lambda _: self.store_typed())
        entry = HBox([self.field, self.button], layout=Layout(flex_flow="row wrap"))
        self.box = VBox([HTML(_TEXT.format(f"<b>{html.escape(question)}</b>")), entry, self.status])
        if guess is not None:
            self.guess(guess)
        elif known is not None:
            self._say(f"Your guess so far: {_with(known, unit)}.")
        else:
            self._say("Guess before you read on. Being wrong here is the point.")

    def store_typed(self) -> None:
        """Stores what stands in the field. An empty field, and what is no number, is said and stores nothing."""
        if not self.field.value.strip():
            self._say("Type a number first: nothing is stored yet.")
            return
        try:
            value = parse_number(self.field.value, self.unit)
        except ValueError as error:
            self._say(f"Not stored: {error}.")
            return
        self.guess(value)

    def guess(self, value: float) -> None:
        """Stores a guess in place of an earlier one. A number that is not finite is refused and nothing is stored."""
        if not math.isfinite(value):
            self._say("A guess is a finite number.")
            return
        problem = store(self.id, guess=float(value), unit=self.unit)
        self._say(problem or f"Stored: {_with(value, self.unit)}. The answer comes further down.")

    def _say(self, text: str) -> None:
        self.text = text
        self.status.value = f'<div role="status" style="line-height: 1.4">{html.escape(text)}</div>'

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        hint = f"Without buttons: add guess=YOUR_NUMBER to the call above and run the cell. {self.text}"
        static = f"<p><b>{html.escape(self.question)}</b></p><p>{html.escape(hint)}</p>"
        return live(self.box, static, f"{self.question}\n{hint}")


def _shown(value: float) -> str:
    """A guess as its writer would read it: 2,000 and not 2e+03."""
    return f"{value:,.10g}"


def _with(value: float, unit: str) -> str:
    """A guess and its unit, if it has one."""
    return f"{_shown(value)} {unit}".rstrip()


def predict(id: str, question: str, unit: str, guess: float | None = None) -> Predict:
    """Asks for a number before it is shown. id: unique in the course; unit: of the guess, and of the answer."""
    return Predict(id, question, unit, guess)


@dataclass(frozen=True)
class Reveal:
    """A guess beside what was computed. `reveal` has printed it: as the last line of a cell it shows nothing more."""

    text: str

    def __repr__(self) -> str:
        return self.text

    def _ipython_display_(self) -> None:
        pass


def reveal(id: str, answer: float) -> Reveal:
    """Prints the computed answer beside the guess, wherever in a cell it is called, and stores it with the guess."""
    made = predictions().get(id)
    if made is None or made.guess is None:
        text = f"Computed: {answer:.4g}. You stored no guess."
    else:
        store(id, answer=float(answer))
        ratio = f" That is {made.guess / answer:.2g} times the answer." if answer and made.guess > 0 else ""
        text = f"Computed: {f'{answer:.4g} {made.unit}'.rstrip()}. You guessed {_shown(made.guess)}.{ratio}"
    print(text)
    return Reveal(text)
