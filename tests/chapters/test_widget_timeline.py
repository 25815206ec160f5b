"""The timeline: what counts as idle, and a drawing that keeps every request and every kind of segment apart."""

import sys
from typing import Any

import pytest
from matplotlib.collections import PolyCollection

from chapters.widgets.timeline import draw, segments
from reference_impl.interfaces import Row
from reference_impl.observe.trace import RequestArrived, RequestFinished, StepDone, Trace


def a_trace(*steps: tuple[str, ...]) -> Trace:
    """One prompt token and then one token per step for each request that a step names; 0.1 s between steps."""
    names = sorted({name for step in steps for name in step})
    trace, done = Trace([RequestArrived(0.0, name, 1) for name in names]), dict.fromkeys(names, 0)
    for i, step in enumerate(steps):
        rows = tuple(Row(name, done[name], 1, True) for name in step)
        trace.add(StepDone(i + 1, float(i), i + 0.9, rows, (), 0, len(names), 9))
        for name in step:
            done[name] += 1
    for name in names:
        trace.add(RequestFinished(float(len(steps)), name, "length", done[name]))
    return trace


@pytest.mark.parametrize("by", ["step", "seconds"])
def test_host_time_between_two_steps_is_not_idle(by: str) -> None:
    assert {s.kind for s in segments(a_trace(("a",), ("a",), ("a",)), by)} == {"prefill", "decode"}


@pytest.mark.parametrize("by", ["step", "seconds"])
def test_a_request_that_a_step_passed_over_is_idle_until_its_next_step(by: str) -> None:
    found = segments(a_trace(("a", "b"), ("a",), ("a", "b")), by)
    (idle,) = [s for s in found if s.kind == "idle"]
    assert idle.request_id == "b"
    assert (idle.start, idle.end) == ((1.0, 2.0) if by == "step" else (0.9, 2.0))


@pytest.mark.parametrize("by", ["step", "seconds"])
@pytest.mark.usefixtures("painted")
def test_every_segment_is_drawn_once_in_the_row_of_its_request(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []

    def keep(fig: Any, alt: str) -> Any:
        drawn.append(fig)
        return alt

    monkeypatch.setattr(
        sys.modules["chapters.widgets.timeline"], "show", keep
    )  # the package exports a function of that name
    trace = a_trace(("a", "b"), ("b",), ("a", "b"))
    draw(trace, by)
    boxes = {}
    for collection in drawn[0].axes[1].collections:
        assert isinstance(collection, PolyCollection)
        for path in collection.get_paths():
            low, high = path.get_extents().min, path.get_extents().max
            boxes[float(low[0]), float(high[0]), round((low[1] + high[1]) / 2)] = True
    expected = {(s.start, s.end, "ab".index(s.request_id)) for s in segments(trace, by)}
    assert set(boxes) == expected
    assert len(expected) == len(segments(trace, by))
