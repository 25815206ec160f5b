"""Practice: a question, an answer, and at once what is right and why. Every answer goes to the log as it is given."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import datetime

from grader.quiz.question import Question, Verdict
from grader.quiz.quizzes import title
from grader.quiz.review import ReviewError, Reviews
from grader.quiz.screen import Left, Screen, Skipped


class Recorder:
    """Writes answers to the log. Where that fails, says so once and lets the quiz continue."""

    def __init__(self, screen: Screen, reviews: Reviews):
        self._screen, self._reviews, self._failed = screen, reviews, False

    def __call__(self, question: Question, verdict: Verdict, seconds: float) -> None:
        try:
            self._reviews.record(question.key, verdict, seed=question.seed, seconds=seconds)
        except ReviewError as error:
            if not self._failed:
                self._screen.warn(f"{error}. The quiz continues without recording answers.")
            self._failed = True


def practise(
    screen: Screen,
    questions: Sequence[Question],
    record: Callable[[Question, Verdict, float], None],
    clock: Callable[[], float] = time.monotonic,
) -> list[tuple[Question, Verdict]]:
    """Asks until all are asked or the learner leaves; returns what was answered."""
    answered = []
    for number, question in enumerate(questions, 1):
        start = clock()
        try:
            screen.head(number, len(questions), title(question.key.split("/")[0]))
            screen.show(question)
            given = screen.answer(question)
            verdict = screen.points(question) if question.kind == "short" else question.check(given)
        except Skipped:
            screen.say("Skipped.")
            continue
        except (Left, KeyboardInterrupt):
            break
        record(question, verdict, clock() - start)
        screen.verdict(question, verdict)
        answered.append((question, verdict))
    _summary(screen, answered, len(questions))
    return answered


def _summary(screen: Screen, answered: Sequence[tuple[Question, Verdict]], count: int) -> None:
    screen.say()
    right = sum(verdict.correct for _, verdict in answered)
    screen.say(f"{len(answered)} of {count} answered, {right} right.", style="bold")


def say_next(screen: Screen, reviews: Reviews, now: datetime) -> None:
    """When there is something to review again."""
    if (due := reviews.next_due) is None:
        return
    if due <= now:
        count = len(reviews.due(now))
        screen.say(f"Due for review now: {count}. Ask for {'it' if count == 1 else 'them'} with: inferlab quiz")
    else:
        screen.say(f"Next review: {due.astimezone():%A, %d %B %Y, %H:%M}. Ask for it with: inferlab quiz")
