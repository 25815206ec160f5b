"""Many replicas: each as if alone, what follows what, closed loops, and streams that cannot be served."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from reference_impl.assembly.config import EngineConfig
from reference_impl.simulation import CalibratedCost, Result, replicas, simulate, simulate_replicas
from reference_impl.simulation.replicas import Router
from reference_impl.simulation.workloads import ClosedLoop, WorkloadRequest, workload

from .loads import load, request

COST = CalibratedCost(7e-3, 4e-4, 1.2e-6, 3e-4, 7e-5, 2e-6, 6e-8, 4096, 8192)
CONFIG = EngineConfig(num_blocks=2000)


def same(a: list[Result], b: list[Result]) -> bool:
    names = ("arrival", "queue", "ttft", "tpot", "latency")
    return len(a) == len(b) and all(
        np.array_equal(getattr(x, n), getattr(y, n), equal_nan=True) for x, y in zip(a, b, strict=True) for n in names
    )


def test_each_replica_serves_the_requests_that_were_sent_to_it_as_if_alone() -> None:
    requests = load(60, 1, 12.0)
    together = simulate_replicas(requests, 3, COST, config=CONFIG)
    alone = [simulate(requests[i::3], COST, CONFIG) for i in range(3)]
    assert same(together, alone)


def test_routers_send_in_turn_or_to_whom_the_fewest_tokens_went() -> None:
    sizes = [500, 10, 10, 10, 10]
    requests = [request(i, 0.1 * i, n, 1) for i, n in enumerate(sizes)]
    turns = simulate_replicas(requests, 2, COST, "round_robin", CONFIG)
    assert [r.prompt_tokens for r in turns] == [520, 20]
    least = simulate_replicas(requests, 2, COST, "least_tokens", CONFIG)
    assert [r.prompt_tokens for r in least] == [500, 40]
    with pytest.raises(ValueError, match="one of round_robin, least_tokens, prefix, got 'best'"):
        simulate_replicas(requests, 2, COST, "best")

    def beyond(num: int) -> Router:
        return lambda request: num

    with pytest.raises(ValueError, match="chose replica 2 of 2"):
        simulate_replicas(requests, 2, COST, beyond, CONFIG)


def test_the_stream_is_read_as_it_is_served() -> None:
    """A million requests must not lie in memory: when the last is read, almost all have finished."""
    open_at_once: list[int] = []
    alive: set[int] = set()

    class Watched(WorkloadRequest):
        def __del__(self) -> None:
            alive.discard(id(self))

    def stream() -> Iterator[WorkloadRequest]:
        for i in range(600):
            made = Watched(str(i), 0.05 * i, 10, 3, ())
            alive.add(id(made))
            open_at_once.append(len(alive))
            yield made

    results = simulate_replicas(stream(), 4, COST, config=CONFIG)
    assert sum(r.num_requests for r in results) == 600
    assert max(open_at_once) < 20


def test_who_follows_arrives_when_the_one_before_has_ended_and_paused() -> None:
    first = request("a", 1.0, 100, 10)
    second = request("b", 0.0, 100, 10, after="a", think=2.5)
    third = request("c", 0.0, 100, 10, after="b", think=0.0)
    found = simulate([first, second, third], COST, CONFIG)
    ends = found.arrival + found.latency
    assert found.arrival[0] == 1.0
    assert found.arrival[1] == pytest.approx(ends[0] + 2.5)
    assert found.arrival[2] == pytest.approx(ends[1])


def test_who_follows_goes_to_the_same_replica_and_finds_its_prefix() -> None:
    others = [request(i, 0.01 * i, 64, 2) for i in range(3)]
    chat = [request("a", 0.04, 640, 2, prefix=9), request("b", 0.0, 700, 2, prefix=9, after="a", think=1.0)]
    # "a" is fourth, so at replica 0; "b" would be at 1 if it were its turn.
    found = simulate_replicas([*others, *chat], 3, COST, config=CONFIG)
    assert [r.cached_tokens for r in found] == [640, 0, 0]


@pytest.mark.parametrize("held", [5, 20])
def test_a_closed_loop_is_the_same_however_little_of_it_is_held(held: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> list[Result]:
        stream = workload("chat", num_requests=120, arrivals=ClosedLoop(num_users=9, think=0.2))
        return simulate_replicas(stream, 2, COST, config=CONFIG)

    expected = run()
    monkeypatch.setattr(replicas, "HELD", held)
    assert same(run(), expected)


def test_in_a_closed_loop_no_more_than_the_users_are_in_the_system() -> None:
    found = simulate(workload("chat", num_requests=150, arrivals=ClosedLoop(num_users=6, think=0.0)), COST, CONFIG)
    arrived, ended = np.sort(found.arrival), np.sort(found.arrival + found.latency)
    # A moment later: who ended has gone, and its follower is there.
    present = [np.searchsorted(arrived, t) - np.searchsorted(ended, t) for t in arrived + 1e-9]
    assert max(present) == 6
    assert set(present[5:100]) == {6}, "until the first user has sent its last"


def test_several_may_follow_one_that_has_ended() -> None:
    """The second was said to wait for somebody that never comes."""
    stream = [request("a", 0.0, 9, 5), request("later", 90.0, 9, 5)]
    stream += [request(f"b{i}", 0.0, 9, 5, after="a", think=100.0 + i) for i in range(3)]
    found = simulate(stream, COST, CONFIG)
    assert found.arrival[2:] - found.latency[0] == pytest.approx([100.0, 101.0, 102.0])


def test_a_refused_request_does_not_hold_up_who_follows() -> None:
    found = simulate([request("a", 0.0, 9000, 5), request("b", 0.0, 10, 5, after="a", think=1.0)], COST, CONFIG)
    assert (found.refused, found.num_requests) == (1, 1)
    assert found.arrival[0] == 1.0


def test_a_stream_out_of_order_or_with_unknown_names_is_an_error() -> None:
    with pytest.raises(ValueError, match="'late' arrives at 0.0"):
        simulate([request("a", 0.0, 9, 5), request("b", 9.0, 9, 5), request("late", 0.001, 9, 5)], COST, CONFIG)
    with pytest.raises(ValueError, match="'b' follows 'nobody'"):
        simulate([request("b", 0.0, 9, 5, after="nobody")], COST, CONFIG)
    with pytest.raises(ValueError, match="at least one replica"):
        simulate_replicas([], 0, COST)


def test_no_requests_are_no_result() -> None:
    assert [r.num_requests for r in simulate_replicas([], 3, COST)] == [0, 0, 0]
