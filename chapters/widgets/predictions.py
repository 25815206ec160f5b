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

from ipywidgets import HTML, Button, FloatText, HBox, VBox

from chapters.learner_data import append_record, data_folder
from chapters.widgets.figure import live


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
    """A question, a number to type, and a button. `predict(..., guess=3)` does the same without a mouse."""

    def __init__(self, id: str, question: str, unit: str, guess: float | None):
        self.id, self.question, self.unit = id, question, unit
        before = predictions().get(id)
        known = before.guess if before else None
        self.field = FloatText(
            value=known or 0.0, description=f"Guess ({unit})", style={"description_width": "initial"}
        )
        self.button = Button(description="Store my guess")
        self.status = HTML()
        self.button.on_click(lambda _: self.guess(self.field.value))
        self.box = VBox([HTML(f"<b>{html.escape(question)}</b>"), HBox([self.field, self.button]), self.status])
        if guess is not None:
            self.guess(guess)
        elif known is not None:
            self._say(f"Your guess so far: {known:g} {unit}.")
        else:
            self._say("Guess before you read on. Being wrong here is the point.")

    def guess(self, value: float) -> None:
        """Stores a guess. A number that is not finite is refused and nothing is stored."""
        if not math.isfinite(value):
            self._say("A guess is a finite number.")
            return
        problem = store(self.id, guess=float(value), unit=self.unit)
        self._say(problem or f"Stored: {value:g} {self.unit}. The answer comes further down.")

    def _say(self, text: str) -> None:
        self.text = text
        self.status.value = html.escape(text)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        hint = f"Without buttons: add guess=YOUR_NUMBER to the call above and run the cell. {self.text}"
        static = f"<p><b>{html.escape(self.question)}</b></p><p>{html.escape(hint)}</p>"
        return live(self.box, static, f"{self.question}\n{hint}")


def predict(id: str, question: str, unit: str, guess: float | None = None) -> Predict:
    """Asks for a number before it is shown. id: unique in the course; unit: of the guess, and of the answer."""
    return Predict(id, question, unit, guess)


@dataclass(frozen=True)
class Reveal:
    """A guess beside what was computed."""

    text: str

    def __repr__(self) -> str:
        return self.text


def reveal(id: str, answer: float) -> Reveal:
    """Shows the computed answer beside the guess, and stores it with the guess."""
    made = predictions().get(id)
    if made is None or made.guess is None:
        return Reveal(f"Computed: {answer:.4g}. You stored no guess.")
    store(id, answer=float(answer))
    ratio = f" That is {made.guess / answer:.2g} times the answer." if answer and made.guess > 0 else ""
    return Reveal(f"Computed: {answer:.4g} {made.unit}. You guessed {made.guess:g}.{ratio}")
