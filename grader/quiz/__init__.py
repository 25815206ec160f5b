"""Quizzes: chapters/NN_slug/quiz.yaml, checked by a pydantic model, with answers that are computed.

An item may draw numbers (`params`) and name what follows from them (`let`); its texts use both as {name} or {name:.1f}.
`let`, a numeric item's `answer` and its `mistakes` are expressions over `reference_impl.theory`, so no number is typed
in. `Item.draw(seed)` gives the Question that a player shows: in a notebook (chapters.widgets.quiz) or in a terminal
(grader.quiz.practice, grader.quiz.exam). Answers go to one log, from which grader.quiz.review computes what is due.
"""

from grader.quiz.expressions import QuizError, evaluate
from grader.quiz.items import Choice, Match, Multi, Numeric, Order, Short
from grader.quiz.question import Question, Verdict, close, parse_answer
from grader.quiz.quizzes import Quiz, load_quiz

__all__ = [
    "Choice",
    "Match",
    "Multi",
    "Numeric",
    "Order",
    "Question",
    "Quiz",
    "QuizError",
    "Short",
    "Verdict",
    "close",
    "evaluate",
    "load_quiz",
    "parse_answer",
]
