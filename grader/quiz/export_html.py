"""The quiz as one page for a phone: no network, no script. An option opens and says what it stands for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from grader.quiz.question import as_number, letter
from grader.quiz.quizzes import Quiz, draw_exported, title
from grader.study.manifest import load_course
from grader.study.workspace import write_atomically

HOW = {
    "choice": "One is right.",
    "multi": "All that apply.",
    "numeric": "A number ({unit}).",
    "order": "Bring them into order.",
    "match": "Each number goes with one letter.",
    "short": "Answer in your own words, then count the points you have.",
}


def environment() -> Environment:
    """Templates beside this file; everything put into them is escaped, and a name that is missing is an error."""
    loader = FileSystemLoader(Path(__file__).parent)
    found = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    found.globals.update(letter=letter, as_number=as_number, how=HOW)
    return found


def write_html(quizzes: Sequence[Quiz], tag: str | None, path: Path) -> int:
    """Writes the page and returns how many questions it has. The same quizzes give the same bytes. Raises OSError."""
    chapters = [(quiz.chapter, title(quiz.chapter), draw_exported(quiz, tag)) for quiz in quizzes]
    chapters = [chapter for chapter in chapters if chapter[2]]
    count = sum(len(items) for *_, items in chapters)
    page = environment().get_template("page.html")
    text = page.render(course=load_course().title, count=count, chapters=chapters)
    write_atomically(path, text.lstrip().encode())
    return count
