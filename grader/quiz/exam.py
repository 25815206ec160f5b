"""The interview: a drawn set, a time budget, nothing said until the end, then a report.

Time is looked at when an answer arrives: one that comes late does not count, and ends the interview. However it ends
(done, out of time, q, Ctrl-C, end of input), what was answered is in the log and in the report. Leaving shows no
answer to what was not answered: it can be asked again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from grader.quiz.question import Question, Verdict
from grader.quiz.quizzes import title
from grader.quiz.screen import Left, Screen, Skipped

Record = Callable[[Question, Verdict, float], None]


@dataclass
class Entry:
    """A question of the interview. given: None as long as it is not answered; for a short answer, its text."""

    question: Question
    tags: tuple[str, ...]
    given: Any = None
    verdict: Verdict | None = None  # of a short answer: None until the learner has counted its points
    seconds: float = 0.0

    @property
    def chapter(self) -> str:
        return self.question.key.split("/")[0]

    @property
    def open_text(self) -> bool:
        """Whether it is a written answer that is not judged yet."""
        return self.given is not None and self.verdict is None


@dataclass
class Exam:
    """An interview. minutes: the budget; used: minutes taken; ended: why it is over."""

    entries: list[Entry]
    minutes: float
    used: float = 0.0
    ended: Literal["done", "time", "left", "cut"] = "done"
    late: bool = field(default=False)  # the last answer came after the time was up

    @property
    def counted(self) -> list[Entry]:
        """The entries that the score is made of: everything but texts that were not judged."""
        return [entry for entry in self.entries if not entry.open_text]

    @property
    def score(self) -> float:
        """Points, one per question; what was not answered has none."""
        return points(self.counted)


def points(entries: Sequence[Entry]) -> float:
    return sum(entry.verdict.score for entry in entries if entry.verdict)


def sit(
    screen: Screen,
    questions: Sequence[tuple[Question, tuple[str, ...]]],
    minutes: float,
    record: Record,
    clock: Callable[[], float] = time.monotonic,
) -> Exam:
    """Asks the questions (each with its tags) until they are done, time is up, or the learner leaves."""
    exam = Exam([Entry(question, tags) for question, tags in questions], minutes)
    begin = clock()
    for number, entry in enumerate(exam.entries, 1):
        start = clock()
        left = minutes - (start - begin) / 60
        if left <= 0:
            exam.ended = "time"
            break
        try:
            screen.head(number, len(exam.entries), f"{title(entry.chapter)} · {_minutes(left)} left")
            screen.show(entry.question)
            given = screen.answer(entry.question)
        except Skipped:
            given = None
        except (Left, KeyboardInterrupt) as stop:
            exam.ended = "left" if type(stop) is Left else "cut"
            break
        if clock() - begin > minutes * 60:
            exam.ended, exam.late = "time", given is not None
            break
        if given is not None:
            _note(entry, given, clock() - start, record)
    exam.used = (clock() - begin) / 60
    return exam


def _note(entry: Entry, given: Any, seconds: float, record: Record) -> None:
    entry.given, entry.seconds = given, seconds
    if entry.question.kind != "short":
        entry.verdict = entry.question.check(given)
        record(entry.question, entry.verdict, seconds)


def judge_texts(screen: Screen, exam: Exam, record: Record) -> None:
    """Lets the learner count the points of what they wrote, after the interview. Leaving here leaves the rest
    unjudged."""
    for entry in exam.entries:
        if not entry.open_text or exam.ended == "cut":
            continue
        screen.say()
        screen.say("You wrote an answer. Compare it with a model answer:", style="bold cyan")
        screen.say(entry.question.prompt)
        screen.say(entry.given, lead="Your answer: ")
        try:
            entry.verdict = screen.points(entry.question)
        except Skipped:
            continue
        except Left:
            return
        record(entry.question, entry.verdict, entry.seconds)


def report(screen: Screen, exam: Exam) -> None:
    """Says how it ended, the score by chapter and tag, and what is right and why for all that was wrong.

    It does so too for what was not answered, unless the learner left.
    """
    screen.say()
    screen.say(_ending(exam), style="bold")
    screen.say(f"Score: {_share(exam.counted)}", style="bold")
    _table(screen, "By chapter", exam.counted, lambda entry: [title(entry.chapter)])
    several = len({entry.chapter for entry in exam.entries}) > 1
    _table(
        screen, "By tag", exam.counted,
        lambda entry: [f"{entry.chapter[:2]} {tag}" if several else tag for tag in entry.tags],
    )  # fmt: skip
    wrong = [entry for entry in exam.entries if entry.verdict and not entry.verdict.correct]
    _section(screen, "Wrong or partly right", wrong, _explain)
    _section(screen, "Written, but not judged: not in the score", [e for e in exam.entries if e.open_text], _yours)
    missing = [entry for entry in exam.entries if entry.given is None]
    if exam.ended not in ("left", "cut"):
        _section(screen, "Not answered: 0 points each", missing, _answer)
    elif missing:
        screen.say()
        screen.say(f"Not answered: 0 points each ({len(missing)})", style="bold")
        screen.say("Their answers are not shown, since you left: an interview or a quiz can ask them again.")


def _ending(exam: Exam) -> str:
    answered = sum(entry.given is not None for entry in exam.entries)
    of = f"{answered} of {len(exam.entries)} answered in {_minutes(min(exam.used, exam.minutes))}"
    if exam.ended == "time":
        late = " Your last answer came after that and does not count." if exam.late else ""
        return f"Time ran out after {_minutes(exam.minutes)}: {of}.{late}"
    return f"You left early: {of}." if exam.ended in ("left", "cut") else f"The interview is over: {of}."


def _share(entries: Sequence[Entry]) -> str:
    if not entries:
        return "nothing to count"
    share = points(entries) / len(entries)
    return f"{points(entries):.4g} of {len(entries)} ({share:.0%})"


def _table(screen: Screen, name: str, entries: Sequence[Entry], groups: Callable[[Entry], list[str]]) -> None:
    names = list(dict.fromkeys(group for entry in entries for group in groups(entry)))
    if not names:
        return
    screen.say()
    screen.say(name, style="bold")
    for group in names:
        screen.say(f"{group}: {_share([entry for entry in entries if group in groups(entry)])}", lead="  ")


def _section(screen: Screen, name: str, entries: Sequence[Entry], show: Callable[[Screen, Entry], None]) -> None:
    if not entries:
        return
    screen.say()
    screen.say(f"{name} ({len(entries)})", style="bold")
    for number, entry in enumerate(entries, 1):
        screen.say()
        screen.say(entry.question.prompt, lead=f"{number}. ")
        show(screen, entry)


def _explain(screen: Screen, entry: Entry) -> None:
    assert entry.verdict is not None
    question = entry.question
    if question.kind == "short":  # its model answer and points were shown when the learner counted them
        _yours(screen, entry)
        screen.say(entry.verdict.message.partition("\n")[0], lead="   ")
        return
    screen.listed("   Yours: ", question.given_text(entry.given))
    if question.kind != "numeric":
        screen.listed("   Right: ", question.given_text(question.right))
    screen.say(entry.verdict.message, lead="   ")


def _yours(screen: Screen, entry: Entry) -> None:
    screen.say(entry.given, lead="   Yours: ")


def _answer(screen: Screen, entry: Entry) -> None:
    question = entry.question
    if question.kind not in ("numeric", "short"):  # their explanation holds the answer
        screen.listed("   Right: ", question.given_text(question.right))
    screen.say(question.explained(), lead="   ")


def _minutes(minutes: float) -> str:
    seconds = max(0, round(minutes * 60))
    return f"{seconds // 60}:{seconds % 60:02d} min"
