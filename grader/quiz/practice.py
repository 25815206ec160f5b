"""Practice: a question, an answer, and what is right and why once it is found, given up, or the tries are used up.

The first answer to a question goes to the log as it is given; what is said before the last try does not help.
"""

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
        answered.append((question, verdict))
        try:
            screen.verdict(question, _tried_again(screen, question, verdict))
        except (Left, KeyboardInterrupt):
            break
    _summary(screen, answered, len(questions))
    return answered


def _tried_again(screen: Screen, question: Question, verdict: Verdict) -> Verdict:
    """The verdict on the last try: it is right, none is left, or the learner wants the answer. Raises Left."""
    tries = 1
    while not verdict.correct and question.kind != "short" and tries < question.tries:
        screen.once_more(question.tries - tries)
        try:
            verdict = question.check(screen.answer(question))
        except Skipped:
            break
        tries += 1
    return verdict


def _summary(screen: Screen, answered: Sequence[tuple[Question, Verdict]], count: int) -> None:
    screen.say()
    right = sum(verdict.correct for _, verdict in answered)
    screen.say(f"{len(answered)} of {count} answered, {right} right at the first try.", style="bold")


def say_next(screen: Screen, reviews: Reviews, now: datetime) -> None:
    """Says when there is something to review again."""
    if (due := reviews.next_due) is None:
        return
    if due <= now:
        count = len(reviews.due(now))
        screen.say(f"Due for review now: {count}. Ask for {'it' if count == 1 else 'them'} with: inferlab quiz")
    else:
        screen.say(f"Next review: {due.astimezone():%A, %d %B %Y, %H:%M}. Ask for it with: inferlab quiz")
