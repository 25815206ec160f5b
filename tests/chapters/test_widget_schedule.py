"""The schedule of a trace: tokens per step by kind, the limits in words, and a picture for every step."""

import re

import pytest

from chapters.widgets import schedule
from chapters.widgets.schedule import step_tokens
from reference_impl.interfaces import Row
from reference_impl.observe.trace import RequestArrived, RequestFinished, StepDone, Trace


def a_trace() -> Trace:
    """a: prompt 6 in two chunks, 3 outputs. b: waits, starts beside it, is preempted in step 4, comes back."""
    trace = Trace([RequestArrived(10.0, "a", 6), RequestArrived(10.5, "b", 2)])
    plan: list[tuple[tuple[Row, ...], tuple[str, ...]]] = [
        ((Row("a", 0, 4, False),), ()),
        ((Row("a", 4, 2, True), Row("b", 0, 2, True)), ()),
        ((Row("a", 6, 1, True), Row("b", 2, 1, True)), ()),
        ((Row("a", 7, 1, True),), ("b",)),
        ((Row("b", 0, 3, True),), ()),
    ]
    for i, (rows, preempted) in enumerate(plan):
        trace.add(StepDone(i + 1, 11.0 + i, 11.9 + i, rows, preempted, int(i in (0, 3)), 2, 5 - i))
    trace.add(RequestFinished(15.0, "a", "length", 3))
    trace.add(RequestFinished(16.0, "b", "length", 3))
    return trace


def test_tokens_of_a_step_are_decodes_and_chunks() -> None:
    assert step_tokens(a_trace()) == [(0, 4), (0, 4), (2, 0), (1, 0), (0, 3)]


def test_every_step_is_drawn_and_put_into_words() -> None:
    view = schedule(a_trace(), budget=4, seats=2)
    words = [
        "1 of 2 seats, 4 of 4 tokens (chunks: a 4); 1 waiting",
        "2 of 2 seats, 4 of 4 tokens (chunks: a 2, b 2); 0 waiting",
        "2 of 2 seats, 2 of 4 tokens (decodes only); 0 waiting",
        "1 of 2 seats, 1 of 4 tokens (decodes only); preempted b; 1 waiting",
        "1 of 2 seats, 3 of 4 tokens (chunks: b 3); 0 waiting",
    ]
    for step, expected in enumerate(words, 1):
        view.controls["step"].value = step
        assert expected in view.shown.alt
        assert re.search(r'<img [^>]*alt="[^"]{20,}"', view.picture.value)
    assert "14 tokens computed, 1 preemptions" in view.shown.alt


@pytest.mark.usefixtures("painted")
def test_an_empty_trace_is_drawn_and_limits_below_1_are_refused() -> None:
    assert "no step" in schedule(Trace(), 8, 2).shown.alt
    with pytest.raises(ValueError, match="at least 1"):
        schedule(a_trace(), budget=0, seats=2)
