"""Seats over steps: who sat where, what was in vain, and a picture for every load and step."""

import re

import pytest

from chapters.widgets import batching
from chapters.widgets.batching import Stay, stays
from reference_impl.interfaces import Row
from reference_impl.observe.trace import RequestArrived, RequestFinished, StepDone, Trace


def trace_of(outputs: dict[str, int], seats: int, static: bool) -> Trace:
    """One prompt token each. Static: rows go on in vain until the longest has ended, and finish together."""
    trace = Trace([RequestArrived(0.0, name, 1) for name in outputs])
    waiting, running, done, step = list(outputs), [], dict.fromkeys(outputs, 0), 0
    while waiting or running:
        if not static or not running:
            while waiting and len(running) < seats:
                running.append(waiting.pop(0))
        rows = tuple(
            Row(n, done[n], 1, True) if done[n] < outputs[n] else Row(n, done[n] - 1, 1, False) for n in running
        )
        for row in rows:
            done[row.request_id] += row.samples
        step += 1
        trace.add(StepDone(step, step - 1.0, step - 0.1, rows, (), len(waiting), len(running), 9))
        ended = [n for n in running if done[n] == outputs[n]]
        leaving = ended if not static or len(ended) == len(running) else []
        for n in leaving:
            trace.add(RequestFinished(step - 0.1, n, "length", outputs[n]))
        running = [n for n in running if n not in leaving]
    return trace


OUTPUTS = {"a": 4, "b": 1, "c": 2}


def test_a_static_row_sits_in_vain_until_the_longest_has_ended() -> None:
    assert stays(trace_of(OUTPUTS, 2, static=True)) == [
        Stay("a", 0, 0, 4, 4),
        Stay("b", 1, 0, 1, 4),
        Stay("c", 0, 4, 6, 6),
    ]


def test_a_continuous_seat_is_given_on_in_the_next_step() -> None:
    assert stays(trace_of(OUTPUTS, 2, static=False)) == [
        Stay("a", 0, 0, 4, 4),
        Stay("b", 1, 0, 1, 1),
        Stay("c", 1, 1, 3, 3),
    ]


def test_a_preempted_request_leaves_its_seat_and_comes_back_to_a_free_one() -> None:
    trace = Trace([RequestArrived(0.0, "a", 1), RequestArrived(0.0, "b", 1)])
    plan = [(("a", 0), ("b", 0)), (("a", 1),), (("a", 2),), (("b", 0),)]
    for i, rows in enumerate(plan):
        gone = ("b",) if i == 1 else ()
        trace.add(StepDone(i + 1, float(i), i + 0.9, tuple(Row(n, s, 1, True) for n, s in rows), gone, 0, 1, 9))
        if i == 2:
            trace.add(RequestFinished(2.9, "a", "length", 3))
    assert stays(trace) == [Stay("a", 0, 0, 3, 3), Stay("b", 1, 0, 1, 1), Stay("b", 0, 3, 4, 4)]


@pytest.mark.usefixtures("painted")
def test_every_control_works_at_both_ends_and_the_words_count() -> None:
    loads = {"mixed": OUTPUTS, "equal": {"a": 3, "b": 3, "c": 3, "d": 3}, "one": {"a": 1}}
    view = batching({n: {k: trace_of(o, 2, k == "static") for k in ("static", "continuous")} for n, o in loads.items()})
    assert "static: 6 steps, 58% of the seats useful, 3 seat-steps in vain" in view.shown.alt
    assert "continuous: 4 steps, 88% of the seats useful, 0 seat-steps in vain" in view.shown.alt
    for name in loads:
        view.controls["load"].value = name
        for step in (view.controls["step"].min, view.controls["step"].max):
            view.controls["step"].value = step
            assert re.search(r'<img [^>]*alt="[^"]{20,}"', view.picture.value)
            assert "nan" not in view.shown.alt


@pytest.mark.usefixtures("painted")
def test_an_empty_trace_is_drawn_and_no_trace_is_refused() -> None:
    assert "0 steps" in batching({"none": {"static": Trace()}}).shown.alt
    with pytest.raises(ValueError, match="at least one load"):
        batching({})
