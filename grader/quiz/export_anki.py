"""The quiz as a package for Anki (.apkg), written by the package `genanki`.

Why not Anki's text format: it names a note type that must exist already, and the built-in ones have another name in
every language; a phone imports no text. A package brings its own note type, with colours for the night. Note type,
decks and notes have ids that never change, so importing a newer package updates the cards and keeps their reviews.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence
from pathlib import Path

import genanki

from grader.quiz.export_html import environment
from grader.quiz.question import Question
from grader.quiz.quizzes import Quiz, draw_exported, title
from grader.study.workspace import write_atomically

MODEL_ID = 1_497_302_118  # chosen once; another one would be another note type
_FIELDS = ("Key", "Question", "Answer")
_CSS = """
.card { font: 18px/1.45 system-ui, sans-serif; text-align: left; max-width: 40em; margin: 0 auto; padding: 0 0.5em;
  color: #1a1a1a; background: #fff; }
.card.nightMode, .night_mode .card { color: #ececec; background: #14161a; }
.how { opacity: 0.75; font-size: 0.9em; }
.lines { white-space: pre-line; }
.right { font-weight: 600; }
li { margin: 0.3em 0; }
"""


def write_anki(quizzes: Sequence[Quiz], tag: str | None, path: Path) -> int:
    """Writes the package and returns how many cards it has: a deck per chapter, copies of items with other numbers.

    Raises OSError.
    """
    model = genanki.Model(
        MODEL_ID,
        "inferlab quiz",
        fields=[{"name": name} for name in _FIELDS],
        templates=[{"name": "Card", "qfmt": "{{Question}}", "afmt": "{{FrontSide}}<hr id=answer>{{Answer}}"}],
        css=_CSS,
    )
    decks = []
    for quiz in quizzes:
        deck = genanki.Deck(_deck_id(quiz.chapter), f"inferlab::{title(quiz.chapter)}")
        for exported in draw_exported(quiz, tag):
            tags = ["inferlab", *(one.replace(" ", "_") for one in exported.item.tags)]
            for question in exported.copies:
                deck.add_note(_note(model, question, tags))
        decks.append(deck)
    package = io.BytesIO()
    genanki.Package([deck for deck in decks if deck.notes]).write_to_file(package)
    write_atomically(path, package.getvalue())
    return sum(len(deck.notes) for deck in decks)


def _note(model: genanki.Model, question: Question, tags: list[str]) -> genanki.Note:
    card = environment().get_template("question.html").module
    name = f"{question.key}#{question.seed}"
    fields = [name, str(card.front(question)), str(card.back(question))]  # type: ignore[attr-defined]
    return genanki.Note(model=model, fields=fields, tags=tags, guid=genanki.guid_for("inferlab", name))


def _deck_id(chapter: str) -> int:
    """The id of a chapter's deck: always the same for a chapter's folder, whatever its title."""
    digest = hashlib.sha256(f"inferlab/{chapter}".encode()).digest()
    return (1 << 30) + int.from_bytes(digest[:4], "big") % (1 << 30)
