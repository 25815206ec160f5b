"""What a learner reads of an exception that ended a check."""

from __future__ import annotations

import pytest

from grader.examination.verdict import explain
from grader.labs.lab import Cell


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        (
            "verify changed its argument drafts, which belongs to the caller: expected [1], saw [2]",
            "verify changed its argument drafts, which belongs to the caller: expected [1], saw [2]",
        ),
        ("k must be positive", "your code raised AssertionError: k must be positive"),  # the learner's own
    ],
)
def test_that_an_argument_was_changed_is_not_called_an_error_of_the_learners_code(said: str, shown: str) -> None:
    """`unchanging` of a check runs in the learner's process, around their function: its assertion comes from there."""
    error = AssertionError(said)
    error.learner_type, error.learner_traceback = "AssertionError", ""  # type: ignore[attr-defined]
    assert explain(error, Cell("check_a", "check", "")) == ("failed", shown)
