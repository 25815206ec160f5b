"""Metrics come from the trace: waiting counts, N tokens have N - 1 gaps, a lone token has none."""

from __future__ import annotations

import pytest

from reference_impl.interfaces import Row
from reference_impl.observe.trace import RequestArrived, RequestFinished, StepDone, Trace


def step(number: int, finished_at: float, *rows: Row) -> StepDone:
    return StepDone(number, finished_at - 0.5, finished_at, rows, (), 0, len(rows), 0)


def test_queue_time_belongs_to_ttft_and_n_tokens_have_n_minus_1_gaps():
    trace = Trace()
    trace.add(RequestArrived(10.0, "a", 5))
    trace.add(step(1, 13.0, Row("a", 0, 4, samples=False)))
    trace.add(step(2, 14.0, Row("a", 4, 1, samples=True)))
    trace.add(step(3, 14.5, Row("a", 5, 1, samples=True)))
    trace.add(step(4, 16.5, Row("a", 6, 1, samples=True)))
    metrics = trace.metrics("a")
    assert (metrics.num_output_tokens, metrics.ttft, metrics.itl) == (3, 4.0, (0.5, 2.0))
    assert (metrics.tpot, metrics.latency) == (1.25, 6.5)
    assert metrics.tokens_per_second == 3 / 6.5


def test_a_lone_token_has_no_tpot_and_no_token_has_no_ttft():
    trace = Trace(
        [RequestArrived(1.0, "a", 2), RequestArrived(1.0, "b", 2), step(1, 2.0, Row("a", 0, 2, samples=True))]
    )
    assert (trace.metrics("a").ttft, trace.metrics("a").tpot) == (1.0, None)
    assert (trace.metrics("b").ttft, trace.metrics("b").tokens_per_second) == (None, None)


def test_an_id_used_again_stands_for_the_request_that_arrived_last():
    trace = Trace()
    for start in (0.0, 100.0):
        trace.add(RequestArrived(start, "a", 1))
        trace.add(step(1, start + 2.0, Row("a", 0, 1, samples=True)))
    assert trace.metrics("a").num_output_tokens == 1
    assert trace.metrics("a").ttft == 2.0


def test_an_unknown_request_is_an_error():
    with pytest.raises(KeyError, match="'a' is not in this trace"):
        Trace([RequestArrived(0.0, "b", 1)]).metrics("a")


def test_the_wait_ends_where_the_first_step_that_computes_the_request_begins():
    trace = Trace()
    trace.add(RequestArrived(10.0, "a", 5))
    trace.add(step(1, 12.0, Row("b", 0, 4, samples=True)))
    trace.add(step(2, 13.0, Row("a", 0, 4, samples=False)))
    trace.add(step(3, 14.0, Row("a", 4, 1, samples=True)))
    metrics = trace.metrics("a")
    assert (metrics.queue, metrics.prefill, metrics.ttft) == (2.5, 1.5, 4.0)
    trace.add(RequestArrived(20.0, "a", 5))
    assert trace.metrics("a").queue is None


def test_a_workload_is_all_requests_of_the_trace_or_those_named():
    trace = Trace([RequestArrived(0.0, "a", 1), RequestArrived(1.0, "b", 1)])
    trace.add(step(1, 2.0, Row("a", 0, 1, samples=True), Row("b", 0, 1, samples=True)))
    trace.add(step(2, 3.0, Row("a", 1, 1, samples=True)))
    assert (trace.workload().throughput, trace.workload().ttft) == (1.0, (2.0, 1.0))
    assert trace.workload(["b"]).num_output_tokens == 1
    with pytest.raises(KeyError, match="'c' is not in this trace"):
        trace.workload(["c"])


def test_a_bounded_trace_forgets_what_has_ended_and_nothing_else():
    trace = Trace(keep=10)
    trace.add(RequestArrived(0.0, "stays", 1))
    for number in range(1, 200):
        name = f"r{number}" if number % 2 else "again"
        trace.add(RequestArrived(number, name, 1))
        trace.add(step(number, number + 1.0, Row(name, 0, 1, samples=True), Row("stays", 0, 1, samples=True)))
        trace.add(RequestFinished(number + 1.0, name, "length", 1))
        assert trace.metrics(name).latency == 1.0
        assert 10 <= len(trace.events) < 20 or number < 7
    assert trace.metrics("stays").num_output_tokens == 199
    assert len(trace.workload().requests) <= 8
    with pytest.raises(KeyError):
        trace.metrics("r3")


def test_a_request_that_runs_under_an_id_used_before_is_not_forgotten_with_the_first():
    trace = Trace(keep=2)
    for event in (RequestArrived(0.0, "a", 1), RequestFinished(1.0, "a", "stop", 1), RequestArrived(2.0, "a", 1)):
        trace.add(event)
    trace.add(RequestArrived(3.0, "b", 1))
    trace.add(RequestArrived(4.0, "c", 1))
    assert len(trace.events) < 4
    assert trace.arrival("a") == 2.0


def test_a_bound_of_no_events_is_refused():
    with pytest.raises(ValueError, match="at least 1"):
        Trace(keep=0)
