"""Replicas at their edges: what wrong versions got wrong, and the other tests let live."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from reference_impl.assembly.config import EngineConfig
from reference_impl.features.policies import EarliestDeadline, FairShare, ShortestFirst
from reference_impl.interfaces import Policy, Reply, Step
from reference_impl.simulation import CalibratedCost, Replica, Result, Roofline, simulate, simulate_replicas
from reference_impl.simulation import replicas as replicas_module
from reference_impl.simulation.workloads import ClosedLoop, WorkloadRequest, workload
from reference_impl.theory.deployment import Deployment
from reference_impl.theory.hardware import device
from reference_impl.theory.model_shapes import model

from .loads import load, request

COURSE = CalibratedCost(7e-3, 4e-4, 1.2e-6, 3e-4, 7e-5, 2e-6, 6e-8, 4096, 2048)
TICK = CalibratedCost(0.125, 0, 0, 0, 0, 0, 0, 4096, 2048)  # every step an eighth of a second, exact in binary
H100 = Deployment(model("llama-3-8b"), device("H100"), mfu=0.5, mbu=0.8)
PER_REQUEST = ("arrival", "queue", "ttft", "tpot", "latency")
SUMS = ("num_steps", "request_steps", "preemptions", "cached_tokens", "prompt_tokens", "num_output_tokens")


def served(requests: list[WorkloadRequest], replica: Replica) -> Result:
    for r in requests:
        replica.run(r.arrival)
        replica.offer(r, r.arrival)
    replica.run()
    return replica.result()


def equal(a: Result, b: Result) -> None:
    for name in PER_REQUEST:
        assert np.array_equal(getattr(a, name), getattr(b, name), equal_nan=True), name
    for name in SUMS:
        assert getattr(a, name) == getattr(b, name), name
    for name in ("busy_seconds", "waiting_seconds", "running_seconds"):
        assert getattr(a, name) == pytest.approx(getattr(b, name)), name


# --- replica.py -------------------------------------------------------------------------------------------------------


def test_who_arrives_in_the_last_step_of_another_waits_for_its_end() -> None:
    found = served([request("a", 0.0, 10, 1), request("b", 0.05, 10, 1)], Replica(TICK, EngineConfig(num_blocks=9)))
    assert found.queue.tolist() == pytest.approx([0.0, 0.075])
    assert found.ended == 0.25


@pytest.mark.parametrize("leaps", [True, False])
def test_who_arrives_at_the_moment_a_step_begins_is_in_it_however_long_the_leap(leaps: bool) -> None:
    requests = [request("a", 0.0, 10, 50), request("b", 1.25, 10, 2), request("c", 2.0, 10, 2), request("d", 2.0, 9, 1)]
    found = served(requests, Replica(TICK, EngineConfig(num_blocks=50), leaps=leaps))
    assert sorted(zip(found.arrival.tolist(), found.queue.tolist(), strict=True)) == [
        (0.0, 0.0), (1.25, 0.0), (2.0, 0.0), (2.0, 0.0)
    ]  # fmt: skip
    assert found.num_steps == 50


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("longest_prompt", [1, 60])
def test_leaps_change_nothing_where_requests_overtake_and_more_run_than_a_step_has_tokens(
    longest_prompt: int, preemption: str
) -> None:
    """Long requests go first here, and take the place of shorter ones: then more may run than have a row, and with
    prompts of one token all of them decode."""
    config = EngineConfig(num_blocks=60, max_num_batched_tokens=4, max_num_seqs=9, preemption=preemption)  # type: ignore[arg-type]
    requests = load(40, 8, 12.0, longest_prompt, 60)
    slow, fast = (
        Replica(COURSE, config, EarliestDeadline(100.0, 0.5, preemptive=True), 0.001, leaps=leaps)
        for leaps in (False, True)
    )
    most = 0
    schedule = slow.engine.scheduler.schedule

    def watched(now: float) -> object:
        nonlocal most
        plan = schedule(now)
        most = max(most, slow.engine.scheduler.num_running)
        return plan

    slow.engine.scheduler.schedule = watched  # type: ignore[method-assign, assignment]
    equal(served(requests, slow), served(requests, fast))
    assert most > 4


def test_the_hosts_seconds_are_in_every_step_of_a_leap_and_in_every_replica() -> None:
    config = EngineConfig(num_blocks=400)
    requests = load(30, 3, 2.0)
    a, b = (served(requests, Replica(COURSE, config, host_seconds=0.004, leaps=leaps)) for leaps in (False, True))
    equal(a, b)
    one = [request("a", 0.0, 10, 21)]
    for result in (served(one, Replica(TICK, config, host_seconds=0.5)), simulate(one, TICK, config, None, 0.5)):
        assert result.latency[0] == 21 * 0.625


@pytest.mark.parametrize("size", [16, 32])
def test_blocks_are_those_that_the_memory_of_the_deployment_or_the_budget_pays_for(size: int) -> None:
    config = EngineConfig(block_size=size, kv_cache_bytes=10_000_000)
    assert Replica(H100, config).engine.num_blocks == H100.cache_tokens() // size
    assert Replica(Roofline(H100), config).engine.num_blocks == H100.cache_tokens() // size
    assert Replica(COURSE, config).engine.num_blocks == 10_000_000 // (4096 * size)
    assert Replica(COURSE, replace(config, num_blocks=7, kv_cache_bytes=None)).engine.num_blocks == 7


def test_a_request_may_be_as_long_as_the_model_that_was_measured() -> None:
    config = EngineConfig(num_blocks=1000)
    found = served([request(n, 0.0, n, 9) for n in (2047, 2048)], Replica(COURSE, config))
    assert (found.num_requests, found.refused, found.num_output_tokens) == (1, 1, 1)


def test_those_who_wait_and_run_are_counted_in_leaps_too() -> None:
    """Two seats, three requests: one waits for the whole of the first two, 40 steps and what is left of them."""
    config = EngineConfig(num_blocks=50, max_num_seqs=2)
    found = served([request(i, 0.0, 10, 40) for i in range(3)], Replica(TICK, config))
    assert (found.waiting_seconds, found.running_seconds) == (40 * 0.125, 120 * 0.125)
    assert found.mean_in_system == (40 + 120) / 80


def test_equal_arrivals_go_in_the_order_of_the_stream() -> None:
    found = served(
        [request(i, 0.0, 10, 2 + i) for i in range(4)], Replica(TICK, EngineConfig(num_blocks=9, max_num_seqs=1))
    )
    assert found.latency.tolist() == [0.25, 0.625, 1.125, 1.75]
    assert found.tpot.tolist() == [0.125] * 4


def test_a_swapped_block_is_as_large_as_the_config_says() -> None:
    """The link is slow, so what is moved shows: blocks of 32 tokens carry twice as much as blocks of 16."""
    seconds = []
    for size, blocks in ((16, 12), (32, 6)):
        config = EngineConfig(num_blocks=blocks, block_size=size, preemption="swap", prefix_cache="off")
        replica = Replica(TICK, config)
        replica.gpu.host_link = 4096 * 16 / 0.25  # a quarter of a second for 16 tokens
        moved = 0
        submit = replica.gpu.submit

        def watched(step: Step, submit: Callable[..., Reply] = submit) -> Reply:
            nonlocal moved
            moved += len(step.transfers.swap_out) + len(step.transfers.swap_in)
            return submit(step)

        replica.gpu.submit = watched  # type: ignore[method-assign]
        found = served([request(i, 0.0, 60, 60) for i in range(3)], replica)
        assert moved
        seconds.append((found.busy_seconds - 0.125 * found.num_steps) / moved)
    assert seconds == pytest.approx([0.25, 0.5])


# --- replicas.py ------------------------------------------------------------------------------------------------------


def waits(tenants: list[str], policy: Callable[[], Policy] | None = None) -> list[list[float]]:
    """One seat per replica; two replicas get every second request. Longest first, then shorter and shorter ones."""
    config = EngineConfig(num_blocks=50, max_num_seqs=1)
    requests = [request(i, i / 1024, 10, 30 - i, tenant=tenant) for i, tenant in enumerate(tenants)]
    found = simulate_replicas(requests, 2, TICK, config=config, policy=policy)
    return [np.argsort(r.arrival).tolist() for r in found]


def test_every_replica_has_a_policy_of_its_own_and_keeps_to_it() -> None:
    """Order of arrival of those who finished first, second, ...: the first is in its seat when the others come."""
    assert waits([""] * 8) == [[0, 1, 2, 3]] * 2
    assert waits([""] * 8, ShortestFirst) == [[0, 3, 2, 1]] * 2


def test_tenants_are_known_to_the_policy() -> None:
    """Fair shares: the tenant with one request goes before the other's second."""
    tenants = ["a", "a", "a", "a", "a", "a", "b", "b"]
    assert waits(tenants)[0] == [0, 1, 2, 3]
    assert waits(tenants, FairShare)[0] == [0, 2, 3, 1]


def test_who_follows_one_that_ended_long_ago_still_thinks() -> None:
    """Of "a" nobody knew a follower when it ended: the stream names "c" only after "b" has made the replica run on."""
    first, long_after = request("a", 0.0, 10, 8), request("b", 20.0, 10, 8)
    late = request("c", 0.0, 10, 8, after="a", think=30.0)
    found = simulate([first, long_after, late], TICK, EngineConfig(num_blocks=50))
    assert found.arrival.tolist() == [0.0, 20.0, 31.0]


def test_the_router_forgets_who_came_long_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas_module, "HOMES", 5)
    requests = [request(i, 0.1 * i, 10, 2) for i in range(6)]
    config = EngineConfig(num_blocks=50)
    assert simulate([*requests, request("x", 0.0, 9, 2, after="1", think=9.0)], TICK, config).num_requests == 7
    with pytest.raises(ValueError, match="'x' follows '0', none of the last 5"):
        simulate([*requests, request("x", 0.0, 9, 2, after="0", think=9.0)], TICK, config)


@pytest.mark.parametrize("held", [4, 9])
def test_a_closed_loop_is_not_read_further_than_it_is_held(held: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A million requests of a closed loop must not lie in memory, and what is held is given back."""
    monkeypatch.setattr(replicas_module, "HELD", held)
    monkeypatch.setattr(replicas_module, "READ_ON", 3)
    alive, most = set(), 0

    class Watched(WorkloadRequest):
        def __del__(self) -> None:
            alive.discard(id(self))

    def stream() -> Iterator[WorkloadRequest]:
        nonlocal most
        for r in workload("chat", num_requests=300, arrivals=ClosedLoop(num_users=4, think=0.0)):
            made = Watched(r.id, r.arrival, 10, 3, (), after=r.after, think=r.think)
            alive.add(id(made))
            most = max(most, len(alive))
            yield made

    found = simulate(stream(), TICK, EngineConfig(num_blocks=50))
    assert found.num_requests == 300
    assert most <= 3 * held + 4 + 3  # what is read on, the users, and those in hand
