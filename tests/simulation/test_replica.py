"""One replica: leaps change nothing, metrics are those of the trace, prefixes are found again."""

from __future__ import annotations

import math

import numpy as np
import pytest

from reference_impl.assembly.config import EngineConfig
from reference_impl.bench.simulation import Arrival
from reference_impl.bench.simulation import simulate as simulate_trace
from reference_impl.features.policies import ByPriority, FairShare, ShortestFirst
from reference_impl.features.prefix.hash_index import HashIndex
from reference_impl.interfaces import Policy
from reference_impl.observe.metrics import WorkloadMetrics
from reference_impl.simulation import CalibratedCost, Replica, Result
from reference_impl.simulation import replica as replica_module
from reference_impl.simulation.prompts import PromptIndex
from reference_impl.simulation.workloads import WorkloadRequest
from reference_impl.theory.deployment import Deployment
from reference_impl.theory.hardware import device
from reference_impl.theory.model_shapes import model

from .loads import load, request

COURSE = CalibratedCost(7e-3, 4e-4, 1.2e-6, 3e-4, 7e-5, 2e-6, 6e-8, 4096, 2048)
H100 = Deployment(model("llama-3-8b"), device("H100"), mfu=0.5, mbu=0.8)
PER_REQUEST = ("arrival", "queue", "ttft", "tpot", "latency")


def serve(
    requests: list[WorkloadRequest], config: EngineConfig, leaps: bool = True, policy: Policy | None = None
) -> Replica:
    replica = Replica(COURSE, config, policy, leaps=leaps)
    for r in requests:
        replica.run(r.arrival)
        replica.offer(r, r.arrival)
    replica.run()
    return replica


TIGHT = {  # name -> (config, requests per second)
    "room for all": (EngineConfig(num_blocks=4096), 3),
    "idle between": (EngineConfig(num_blocks=4096), 0.5),
    "few seats": (EngineConfig(num_blocks=4096, max_num_seqs=3), 6),
    "few blocks": (EngineConfig(num_blocks=90), 8),
    "few blocks, no cache": (EngineConfig(num_blocks=90, prefix_cache="off"), 8),
    "few blocks, swap": (EngineConfig(num_blocks=90, preemption="swap"), 8),
    "worst case": (EngineConfig(num_blocks=90, admission="worst_case"), 8),
    "radix": (EngineConfig(num_blocks=150, prefix_cache="radix"), 8),
    "small budget": (EngineConfig(num_blocks=200, max_num_batched_tokens=7, max_num_seqs=9), 1),
    "blocks of 5": (EngineConfig(num_blocks=400, block_size=5), 8),
}


@pytest.mark.parametrize("name", TIGHT)
@pytest.mark.parametrize("policy", [None, ByPriority, ShortestFirst, FairShare], ids=lambda p: p.__name__ if p else "")
def test_leaps_give_the_result_of_single_steps_to_the_last_bit(name: str, policy: type[Policy] | None) -> None:
    config, rate = TIGHT[name]
    requests = load(45, 5, rate)
    slow, fast = (serve(requests, config, leaps, policy() if policy else None) for leaps in (False, True))
    a, b = slow.result(), fast.result()
    for field in PER_REQUEST:
        assert np.array_equal(getattr(a, field), getattr(b, field), equal_nan=True), field
    for field in ("num_steps", "request_steps", "preemptions", "cached_tokens", "prompt_tokens", "num_output_tokens"):
        assert getattr(a, field) == getattr(b, field), field
    assert b.busy_seconds == pytest.approx(a.busy_seconds)
    assert b.mean_in_system == pytest.approx(a.mean_in_system)
    assert fast.engine.kv.num_available == slow.engine.kv.num_available == config.num_blocks
    if "few blocks" in name and policy is None:
        assert a.preemptions > 0


@pytest.mark.parametrize("size", [5, 16, 64])
def test_names_of_blocks_find_what_hashes_of_tokens_find(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts with and without a tail, some of them equal as a whole, while blocks are evicted."""
    requests = [r for r in load(120, 2, 6.0) if r.arrival < 20]
    requests += [request(f"whole {i}", 20 + 0.2 * i, 64 * (i % 5 + 1), 40, i % 3) for i in range(40)]
    config = EngineConfig(num_blocks=3200 // size, block_size=size)
    names = serve(requests, config).result()
    monkeypatch.setattr(replica_module, "PromptIndex", HashIndex)
    replica = serve(requests, config)
    assert type(replica.engine.kv.index) is HashIndex  # type: ignore[attr-defined]
    hashes = replica.result()
    assert names.cached_tokens == hashes.cached_tokens > 1000
    assert all(np.array_equal(getattr(names, f), getattr(hashes, f), equal_nan=True) for f in PER_REQUEST)


def test_the_name_of_a_block_is_the_last_token_of_the_prompt_up_to_its_end() -> None:
    def pairs(tokens: list[int]) -> list[tuple[int, int]]:
        return [(name >> 32, name & 0xFFFFFFFF) for name in PromptIndex(4).digests(tokens, b"")]

    assert pairs([100] * 4 + [200] * 3 + [7] * 6) == [(100, 4), (200, 8), (200, 12)]
    assert pairs([100] * 4 + [7] * 4) == [(100, 4), (100, 8)]


def test_a_replica_leaps_at_all() -> None:
    seen: list[int] = []
    replica = Replica(COURSE, EngineConfig(num_blocks=100))
    step = replica.engine.step
    replica.engine.step = lambda: (seen.append(1), step())[1]  # type: ignore[method-assign]
    replica.offer(request("a", 0.0, 10, 200), 0.0)
    replica.run()
    assert replica.result().num_steps == 200
    assert len(seen) < 5


def test_the_ledger_has_the_metrics_of_the_full_trace() -> None:
    requests = load(50, 3, 40.0, 3000, 150)
    config = EngineConfig(num_blocks=700, max_num_seqs=16, prefix_cache="off")
    replica = Replica(H100, config)
    for r in requests:
        replica.run(r.arrival)
        replica.offer(r, r.arrival)
    replica.run()
    found = replica.result()
    arrivals = [Arrival(r.arrival, r.num_prompt_tokens, r.num_output_tokens, name=r.id) for r in requests]
    trace = simulate_trace(H100, arrivals, config)
    expected: WorkloadMetrics = trace.workload()
    assert sum(len(s.preempted) for s in trace.steps()) == found.preemptions > 0
    assert sorted(found.ttft) == pytest.approx(sorted(expected.ttft))
    assert sorted(found.latency) == pytest.approx(sorted(expected.latency))
    assert sorted(found.tpot[~np.isnan(found.tpot)]) == pytest.approx(sorted(expected.tpot))
    assert sorted(found.queue) == pytest.approx(sorted(m.queue for m in expected.requests if m.queue is not None))
    assert found.duration == pytest.approx(expected.duration)
    assert found.throughput == pytest.approx(expected.throughput)
    assert found.attainment(0.5, 0.02) == expected.attainment(0.5, 0.02)
    assert 0 < found.attainment(0.5, 0.02) < 1
    assert found.goodput(0.5, 0.02) == pytest.approx(expected.goodput(0.5, 0.02))
    assert found.num_steps == len(trace.steps())
    assert found.request_steps == sum(len(s.rows) for s in trace.steps())


def test_equal_pages_are_found_in_the_prefix_cache_and_tails_are_not() -> None:
    """200 tokens are 3 pages and a tail of 8: 12 blocks of 16 are everybody's, and the last is one's own."""
    config = EngineConfig(num_blocks=200)
    same = [request("a", 0.0, 200, 3, prefix=1), request("b", 5.0, 200, 3, prefix=1), request("c", 9.0, 200, 3)]
    assert serve(same, config).result().cached_tokens == 192
    whole = [request("a", 0.0, 192, 3, prefix=1), request("b", 5.0, 192, 3, prefix=1)]
    assert serve(whole, config).result().cached_tokens == 176, "the last token is always computed"
    assert serve(same, EngineConfig(num_blocks=200, prefix_cache="off")).result().cached_tokens == 0


def test_a_prompt_that_can_never_fit_is_refused_and_counted() -> None:
    config = EngineConfig(num_blocks=20)
    found = serve([request(n, 0.0, n, 5) for n in (321, 320, 300)], config).result()  # 320 leaves one token of output
    assert (found.refused, found.num_requests, found.num_output_tokens) == (1, 2, 6)


def test_a_request_that_comes_too_late_in_the_stream_is_an_error() -> None:
    replica = Replica(COURSE, EngineConfig(num_blocks=50))
    replica.offer(request("a", 1.0, 10, 5), 1.0)
    replica.run()
    with pytest.raises(ValueError, match="'b' arrives at 0.5.* in order of arrival"):
        replica.offer(request("b", 0.5, 10, 5), 0.5)


def test_the_wrong_number_of_pages_is_an_error() -> None:
    replica = Replica(COURSE, EngineConfig(num_blocks=50))
    replica.offer(WorkloadRequest("a", 0.0, 100, 5, ()), 0.0)
    with pytest.raises(ValueError, match="1 full pages of 64, got 0"):
        replica.run()


def test_results_of_replicas_fold_into_one() -> None:
    parts = [serve(load(10, seed, 2.0), EngineConfig(num_blocks=200)).result() for seed in (1, 2)]
    both = Result.fold(parts)
    assert both.num_requests == 20
    assert both.num_steps == parts[0].num_steps + parts[1].num_steps
    assert both.began == min(p.began for p in parts)
    assert both.ended == max(p.ended for p in parts)
    assert sorted(both.ttft) == sorted([*parts[0].ttft, *parts[1].ttft])
    empty = Result.fold([])
    assert (empty.num_requests, empty.duration, empty.throughput, empty.hit_rate) == (0, 0.0, 0.0, 0.0)
    assert empty.percentiles() == {"queue": [], "ttft": [], "tpot": [], "latency": []}
    with pytest.raises(ValueError, match="at least one request"):
        empty.attainment(1, 1)


def test_nothing_is_kept_of_requests_that_finished() -> None:
    replica = serve(load(50, 1, 5.0), EngineConfig(num_blocks=300))
    assert replica.ledger.events == []
    assert not replica.ledger._open
    assert not replica.ledger._tokenless
    assert not replica.engine.requests
    assert replica.next_time == math.inf
