"""`inferlab quiz ...`: what is due, a chapter, an interview, and exports to a phone or to Anki."""

from __future__ import annotations

import random
import shlex
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from grader.saying import install, why
from grader.saying import stop as _stop


class _Asks(TyperGroup):
    """`inferlab quiz 02` is `inferlab quiz ask 02`: what is no name of a command is meant for `ask`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        named = args and (args[0] in self.commands or args[0] in ctx.help_option_names)
        return super().parse_args(ctx, args if named else ["ask", *args])


app = typer.Typer(
    name="quiz",
    cls=_Asks,
    help="Questions on the chapters: what is due for review, a chapter, or an interview against the clock. "
    "Without a command: ask.",
    epilog="Examples: inferlab quiz · inferlab quiz 02 --tag memory · inferlab quiz --interview --minutes 20 · "
    "inferlab quiz export --html quiz.html",
)

Chapters = Annotated[
    list[str] | None,
    typer.Argument(
        help="Numbers or folders of chapters, such as 02. None: all chapters of the course that are written."
    ),
]
Tag = Annotated[str | None, typer.Option(help="Only items with this tag, such as memory.")]


@app.command(epilog="Example: inferlab quiz ask 02 --tag memory; or shorter: inferlab quiz 02 --tag memory")
def ask(
    chapters: Chapters = None,
    tag: Tag = None,
    seed: Annotated[
        int | None, typer.Option(help="Draw the same numbers and the same order again; else new ones.", min=0)
    ] = None,
    interview: Annotated[
        bool, typer.Option("--interview", "--exam", help="Against the clock; answers are explained at the end.")
    ] = False,
    minutes: Annotated[int | None, typer.Option(help="Time of an interview; 20 if not given.", min=1, max=240)] = None,
) -> None:
    """Ask what is due for review; with chapters, all of their items; with --interview, a drawn set against the clock.

    Answers are kept in your data folder and decide when an item is due again. Type ? at a question for help.
    """
    from grader.quiz.expressions import QuizError
    from grader.quiz.quizzes import check_tag, draw_all, draw_due, open_quizzes
    from grader.quiz.review import ReviewError, Reviews
    from grader.study.manifest import ManifestError

    if minutes is not None and not interview:
        raise typer.BadParameter(
            f"it is the time of an interview: inferlab quiz --interview --minutes {minutes}", param_hint="--minutes"
        )
    drawn_with = random.randrange(1_000_000) if seed is None else seed
    try:
        finished = open_quizzes()
        quizzes = open_quizzes(chapters) if chapters else finished
        check_tag(quizzes, tag)
        reviews = Reviews.load().of(quiz.key(item) for quiz in (*finished, *quizzes) for item in quiz.items)
        if interview:
            _interview(quizzes, tag, drawn_with, minutes or 20, reviews, _source(quizzes, bool(chapters)))
        elif chapters:
            _practise(draw_all(quizzes, tag, drawn_with), reviews, _now())
        else:
            questions = draw_due(quizzes, reviews.due(_now()), tag, drawn_with)
            if questions:
                _practise(questions, reviews, _now())
            else:
                _nothing_due(reviews, [quiz.chapter for quiz in quizzes], tag)
    except (QuizError, ReviewError, ManifestError) as error:
        _stop(error)


@app.command(epilog="Example: inferlab quiz export 02 --html quiz.html --anki quiz.apkg")
def export(
    chapters: Chapters = None,
    anki: Annotated[
        Path | None, typer.Option(help="A package for Anki; importing a newer one updates its cards.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="One page for a phone; needs no network.")] = None,
    tag: Tag = None,
) -> None:
    """Write the questions to a page for your phone (--html), to a package for Anki (--anki), or to both."""
    from grader.quiz.expressions import QuizError
    from grader.quiz.quizzes import check_tag, open_quizzes
    from grader.study.manifest import ManifestError

    if anki is None and html is None:
        raise typer.BadParameter(
            "nothing to write. Name a file: inferlab quiz export --html quiz.html, or --anki quiz.apkg",
            param_hint="--html or --anki",
        )
    try:
        quizzes = open_quizzes(chapters or ())
        check_tag(quizzes, tag)
    except (QuizError, ManifestError) as error:
        _stop(error)
    if anki is not None:
        try:
            from grader.quiz.export_anki import write_anki
        except ImportError as error:
            _stop(f"{error}. To write for Anki: {install('learn')}")
        print(f"{_written(write_anki, quizzes, tag, anki)} cards: {anki}. In Anki: File, Import.")
    if html is not None:
        from grader.quiz.export_html import write_html

        print(f"{_written(write_html, quizzes, tag, html)} questions: {html}. Open it in any browser.")


def _written(
    write: Callable[[list[Any], str | None, Path], int], quizzes: list[Any], tag: str | None, path: Path
) -> int:
    if not path.absolute().parent.is_dir():  # a mistyped folder is not made
        folder = path.parent
        if folder.exists():
            _stop(f"cannot write {path}: {folder} is a file and no folder")
        _stop(f"cannot write {path}: there is no folder {folder}. Make it first: mkdir -p {shlex.quote(str(folder))}")
    try:
        return write(quizzes, tag, path)
    except OSError as error:
        _stop(f"cannot write {path}: {why(error)}. Name a file in a folder that is yours")


def _practise(questions: list[Any], reviews: Any, now: datetime) -> None:
    from grader.quiz.practice import Recorder, practise, say_next
    from grader.quiz.screen import Screen

    screen = Screen()
    _say_damaged(screen, reviews)
    practise(screen, questions, Recorder(screen, reviews))
    say_next(screen, reviews, now)


def _interview(quizzes: list[Any], tag: str | None, seed: int, minutes: int, reviews: Any, source: str) -> None:
    from grader.quiz.exam import judge_texts, report, sit
    from grader.quiz.practice import Recorder
    from grader.quiz.question import counted
    from grader.quiz.quizzes import draw_interview
    from grader.quiz.screen import Screen

    tags = {quiz.key(item): item.tags for quiz in quizzes for item in quiz.items}
    questions = [(question, tags[question.key]) for question in draw_interview(quizzes, tag, seed, minutes)]
    screen = Screen()
    record = Recorder(screen, reviews)
    _say_damaged(screen, reviews)
    screen.say(
        f"Interview: {counted(len(questions), 'question')} in {counted(minutes, 'minute')} (seed {seed}). "
        f"{source} Explanations come at the end."
    )
    exam = sit(screen, questions, minutes, record)
    judge_texts(screen, exam, record)
    report(screen, exam)


def _source(quizzes: list[Any], chosen: bool) -> str:
    """A sentence that says where the questions of an interview come from. chosen: the learner named the chapters."""
    numbers = ", ".join(quiz.chapter[:2] for quiz in quizzes)
    if chosen:
        return f"Drawn from {'chapter' if len(quizzes) == 1 else 'chapters'} {numbers}."
    return f"Drawn from every chapter of the course that is written ({numbers}), whether you studied it or not."


def _say_damaged(screen: Any, reviews: Any) -> None:
    from grader.quiz.question import counted

    if reviews.damaged:
        were = "was" if reviews.damaged == 1 else "were"
        screen.warn(f"{reviews.path}: {counted(reviews.damaged, 'damaged line')} {were} left out.")


def _nothing_due(reviews: Any, chapters: list[str], tag: str | None) -> None:
    from grader.quiz.practice import say_next
    from grader.quiz.screen import Screen

    screen = Screen()
    example = f"inferlab quiz {chapters[0][:2]}" if chapters else "inferlab quiz 02"
    if not reviews.seen:
        screen.say(f"Nothing is due: you have not answered any question yet. Start with a chapter: {example}")
        return
    screen.say(f"Nothing with the tag {tag!r} is due for review." if tag else "Nothing is due for review.")
    say_next(screen, reviews, _now())
    screen.say(f"All items of a chapter, due or not: {example}")


def _now() -> datetime:
    return datetime.now(UTC)
