"""The lives of requests, looked for in a long trace."""

from __future__ import annotations

import dataclasses

import pytest

from reference_impl.interfaces import Row
from reference_impl.observe.timeline import lives, lives_of
from reference_impl.observe.trace import RequestArrived, RequestFinished, StepDone, Trace


def long_trace(num_requests: int = 50) -> Trace:
    """Request i arrives at i, is computed in the steps that end at i + 1, i + 2 and i + 3, and ends then."""
    trace = Trace()
    for i in range(num_requests + 3):
        rows = tuple(Row(str(j), 4 if i == j + 1 else 3 + i - j, 1, True) for j in range(max(0, i - 3), i))
        trace.add(StepDone(i, i - 0.5, float(i), rows, (), 0, len(rows), 9, admitted=((str(i - 1), 0),)))
        if i >= 3:
            trace.add(RequestFinished(float(i), str(i - 3), "length", 3))
        if i < num_requests:
            trace.add(RequestArrived(float(i), str(i), 5))
    return trace


@pytest.mark.parametrize("wanted", [["0"], ["17"], ["49"], ["3", "4", "40"]])
def test_some_lives_are_those_of_the_whole(wanted: list[str]) -> None:
    trace = long_trace()
    found = lives_of(trace, wanted)
    assert found == [life for life in lives(trace.events) if life.request_id in wanted]
    assert [life.request_id for life in found] == wanted
    assert [life.token_times for life in found] == [trace.token_times(i) for i in wanted]
    assert all(life.finished is not None for life in found)


def test_nothing_before_the_arrival_or_after_the_end_of_the_last_one_is_looked_at() -> None:
    trace = long_trace()
    expected = lives_of(trace, ["17"])
    strange = StepDone(99, 5.0, 5.0, (Row("17", 0, 1, True),), (), 0, 1, 9)
    trace.events.insert(trace.events.index(trace.steps()[5]), strange)
    trace.events.append(dataclasses.replace(strange, started_at=60.0, finished_at=60.0))
    assert lives_of(trace, ["17"]) == expected
    assert [life for life in lives(trace.events) if life.request_id == "17"] != expected


def test_who_is_not_finished_is_looked_for_to_the_end() -> None:
    trace = long_trace()
    trace.add(RequestArrived(60.0, "waits", 5))
    assert [life.request_id for life in lives_of(trace, ["17", "waits"])] == ["17", "waits"]


def test_a_request_that_the_trace_does_not_know_is_a_key_error() -> None:
    with pytest.raises(KeyError, match="nobody"):
        lives_of(long_trace(), ["17", "nobody"])
