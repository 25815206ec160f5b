"""Errata of batching and scheduling on the engine itself: plans and texts on a small model, times on a simulated GPU.

Every test states the claim in its docstring. Formulas alone are in test_chapter_03.py, the load of E03.8 in
test_ch03_register_load.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from reference_impl.assembly.config import EngineConfig
from reference_impl.assembly.engine import Engine
from reference_impl.assembly.parts import Parts
from reference_impl.bench.simulation import Arrival, poisson, simulate
from reference_impl.core.decoder import Decoder
from reference_impl.core.ranking import FirstCome
from reference_impl.core.scheduler import Scheduler as EngineScheduler
from reference_impl.features.baselines.contiguous_manager import ContiguousKVManager
from reference_impl.features.baselines.orca_batching import OrcaBatching
from reference_impl.features.baselines.static_batching import StaticBatching
from reference_impl.features.policies import ShortestFirst
from reference_impl.interfaces import KVManager, SamplingParams, Scheduler, StepPlan
from reference_impl.observe.metrics import percentile
from reference_impl.observe.trace import Trace
from reference_impl.theory import latency
from reference_impl.theory.deployment import Deployment
from reference_impl.theory.hardware import device
from reference_impl.theory.model_shapes import model

H100 = Deployment(model("llama-3-8b"), device("H100"), mfu=0.5, mbu=0.8)
Make = Callable[[KVManager], Scheduler] | None


class Alternating(EngineScheduler):
    """A step computes chunks or decodes, in turn."""

    chunks_now = False

    def schedule(self, now: float) -> StepPlan:
        plan = super().schedule(now)
        chunks = tuple(row for row in plan.rows if row.num_tokens > 1)
        decodes = tuple(row for row in plan.rows if row.num_tokens == 1)
        self.chunks_now = bool(chunks) and (not self.chunks_now or not decodes)
        return dataclasses.replace(plan, rows=chunks if self.chunks_now else decodes)


def beside_decodes(prompt: int, budget: int, make: Make = None) -> tuple[Trace, np.ndarray]:
    """16 requests decode, then a long prompt comes. -> (trace, gaps of the 16 that overlap with reading it)."""
    arrivals = [Arrival(0.0, 500, 400) for _ in range(16)] + [Arrival(1.0, prompt, 5, name="long")]
    trace = simulate(H100, arrivals, EngineConfig(max_num_seqs=64, max_num_batched_tokens=budget), scheduler=make)
    steps = [s for s in trace.steps() if any(r.request_id == "long" and r.start < prompt for r in s.rows)]
    times = [trace.token_times(str(i)) for i in range(16)]
    first, last = steps[0].started_at, steps[-1].finished_at
    return trace, np.array([b - a for t in times for a, b in pairwise(t) if b > first and a < last])


def test_e03_01_a_whole_prompt_stalls_every_decode_for_its_step_and_chunks_do_not() -> None:
    """Claim: mixing halves the throughput of both. Seen in the gaps: the stall is latency, and chunks bound it."""
    whole, stalled = beside_decodes(8192, 16_384)
    chunked, smooth = beside_decodes(8192, 512)
    assert stalled.max() == pytest.approx(H100.step_seconds([8192, *[1] * 16], [0, *[640] * 16]), rel=0.02)
    assert smooth.max() < stalled.max() / 10
    durations = [trace.workload().duration for trace in (whole, chunked)]
    assert durations[1] < 1.1 * durations[0], "the work takes about as long"


def test_e03_02_the_engines_plan_holds_all_decodes_and_a_chunk_in_one_step() -> None:
    """Claim: chunked prefill alternates chunks and decode steps."""
    trace, _ = beside_decodes(8192, 512)
    mixed = [s for s in trace.steps() if any(r.request_id == "long" and r.start < 8192 for r in s.rows)]
    assert len(mixed) == -(-8192 // (512 - 16))
    for step in mixed:
        assert [r.num_tokens for r in step.rows[:-1]] == [1] * 16, "decodes first"
        assert sum(r.num_tokens for r in step.rows) <= 512
    assert mixed[0].rows[-1].num_tokens == 512 - 16


def test_e03_02_alternation_makes_both_sides_wait_longer_than_mixing() -> None:
    """Each decode waits for a chunk step and its own, and the prompt for a decode step after each chunk."""
    mixed, gaps = beside_decodes(8192, 512)
    turns, longer = beside_decodes(8192, 512, lambda kv: Alternating(kv, 64, 512))
    assert longer.max() > 1.2 * gaps.max()
    assert turns.metrics("long").ttft > 1.2 * mixed.metrics("long").ttft  # type: ignore[operator]


def test_e03_03_a_freed_seat_is_taken_in_the_very_next_step() -> None:
    """Claim: a seat freed in one step stands empty in the next."""
    arrivals = [Arrival(0.0, 10, n) for n in (6, 5, 7, 2, 5, 4, 9, 3)]
    steps = simulate(H100, arrivals, EngineConfig(max_num_seqs=4)).steps()
    assert any(s.num_waiting for s in steps)
    for before, after in pairwise(steps):
        if before.num_waiting:
            assert len(after.rows) == 4 or after.num_waiting == 0


def test_e03_04_captured_batch_sizes_pad_even_a_ragged_batch() -> None:
    """Claim: continuous batching has no padding. A graph captured for 1, 2, 4, 8, 16 ... rows runs just these."""
    captured = [1, 2, 4, *range(8, 257, 8)]
    padding = {n: 1 - n / min(c for c in captured if c >= n) for n in range(1, 257)}
    assert padding[9] == pytest.approx(7 / 16)
    assert np.mean([padding[n] for n in range(9, 65)]) == pytest.approx(0.11, abs=0.01)
    assert padding[16] == 0


def test_e03_06_the_same_engine_beats_each_baseline_by_another_factor() -> None:
    """Claim: continuous batching is 3-10, 5 or 20 times faster. 64 outputs, exponential, mean 100, one burst."""
    arrivals = [dataclasses.replace(a, second=0.0) for a in poisson(1, 64, 0, (200,), mean_output=100)]

    def rate(seats: int, make: Make = None) -> float:
        return simulate(H100, arrivals, EngineConfig(max_num_seqs=seats), scheduler=make).workload().throughput

    continuous = rate(8)
    assert 4 < continuous / rate(1) < 8
    assert 1.5 < continuous / rate(8, lambda kv: StaticBatching(kv, 8)) < 3
    assert continuous / rate(8, lambda kv: OrcaBatching(kv, 8)) == pytest.approx(1, abs=0.05)
    assert continuous / rate(32) < 0.6


def test_e03_07_continuous_batching_runs_over_contiguous_memory(
    random_model: Callable[..., Any],
) -> None:
    """Claim: paging enables continuous batching. It raises how many requests fit; the texts are the same."""
    decoder: Decoder = random_model()
    blocks, texts, together = 24, [], []
    for contiguous in (True, False):
        kv = ContiguousKVManager(blocks, 4)
        parts = Parts(kv_manager=kv, scheduler=EngineScheduler(kv, 32, 2048)) if contiguous else Parts()
        config = EngineConfig(num_blocks=blocks, block_size=4, max_num_seqs=32, prefix_cache="off")
        engine = Engine(decoder, config, parts)
        params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
        added = [engine.add([5 + i, 9, 11, 3], params) for i in range(8)]
        while engine.has_work():
            engine.step()
        texts.append([r.output_tokens for r in added])
        together.append(max(len(s.rows) for s in engine.trace.steps()))
        joins = {s.admitted for s in engine.trace.steps() if s.admitted}
        assert len(joins) > 1, "requests join while others run"
    assert texts[0] == texts[1]
    assert together[0] < together[1]


def test_e03_09_each_kind_of_blocking_has_its_own_remedy() -> None:
    """Claim: continuous batching means no head-of-line blocking.

    It removes the waiting for long outputs, chunks the stall by long prompts, and an order of the queue the waiting
    behind a prompt that does not fit yet. Seen by the short requests; the long ones pay for the last.
    """
    load = poisson(8, 20, 6, (300, 8000, 30_000), (0.87, 0.11, 0.02), 150)
    short = [str(i) for i, a in enumerate(load) if a.prompt == 300]
    long = [str(i) for i, a in enumerate(load) if a.prompt > 300]
    whole = EngineConfig(num_blocks=2500, max_num_seqs=32, max_num_batched_tokens=131_072)
    pieces = dataclasses.replace(whole, max_num_batched_tokens=512)
    static = simulate(H100, load, whole, scheduler=lambda kv: StaticBatching(kv, 32))
    orca = simulate(H100, load, whole, scheduler=lambda kv: OrcaBatching(kv, 32))
    chunks = simulate(H100, load, pieces)
    order = simulate(H100, load, pieces, ShortestFirst(aging=500))
    ttft = [percentile(t.workload(short).ttft, 95) for t in (static, orca, chunks, order)]
    gap = [max(t.workload(short).itl) for t in (static, orca, chunks, order)]
    assert ttft[1] < ttft[0] / 3, "long outputs no longer block"
    assert gap[2] < gap[1] / 5, "long prompts no longer stall a step"
    assert ttft[3] < ttft[2] / 2, "the queue no longer blocks the short ones"
    assert percentile(order.workload(long).ttft, 95) > percentile(chunks.workload(long).ttft, 95)


# ---------------------------------------------------------------- what the chapter says besides


def test_static_and_continuous_agree_where_all_are_equal_and_arrive_together() -> None:
    """E00.10: unequal lengths, not shared weights, are why continuous batching exists."""
    equal = [Arrival(0.0, 100, 50) for _ in range(16)]
    unequal = [Arrival(0.0, 100, n) for n in (10, 90) * 8]
    steps = {}
    for name, load in (("equal", equal), ("unequal", unequal)):
        for kind, make in (("static", lambda kv: StaticBatching(kv, 4)), ("continuous", None)):
            steps[name, kind] = len(simulate(H100, load, EngineConfig(max_num_seqs=4), scheduler=make).steps())
    assert steps["equal", "static"] == steps["equal", "continuous"] == 200
    assert steps["unequal", "static"] == 360
    assert steps["unequal", "continuous"] < 0.75 * 360


def burst(lengths: list[int]) -> list[Arrival]:
    return [Arrival(0.0, 100, n, max_tokens=2000, name=str(i)) for i, n in enumerate(lengths)]


def test_shortest_first_shortens_the_mean_and_lengthens_the_wait_of_the_longest() -> None:
    lengths = np.maximum(1, np.random.default_rng(2).exponential(200, 80).astype(int)).tolist()
    config = EngineConfig(max_num_seqs=8)
    first_come = simulate(H100, burst(lengths), config, FirstCome())
    shortest = simulate(H100, burst(lengths), config, ShortestFirst(lambda r: lengths[int(r.id)], aging=0))
    longest = [str(i) for i in np.argsort(lengths)[-8:]]
    assert np.mean(shortest.workload().ttft) < 0.7 * np.mean(first_come.workload().ttft)
    assert np.mean(shortest.workload(longest).ttft) > np.mean(first_come.workload(longest).ttft)
    assert shortest.workload().duration == pytest.approx(first_come.workload().duration, rel=0.15)


def test_a_guess_that_is_off_by_one_factor_gives_the_schedule_of_the_oracle() -> None:
    lengths = np.maximum(1, np.random.default_rng(3).exponential(200, 40).astype(int)).tolist()
    config = EngineConfig(max_num_seqs=8)
    exact, twice = (
        simulate(H100, burst(lengths), config, ShortestFirst(lambda r, f=factor: f * lengths[int(r.id)], aging=0))
        for factor in (1, 2)
    )
    assert [s.rows for s in exact.steps()] == [s.rows for s in twice.steps()]


def test_the_worst_case_preempts_nobody_and_lets_fewer_in() -> None:
    load = poisson(10, 15, 3, (500,), mean_output=200, max_tokens=1024)
    seen = {}
    for admission in ("worst_case", "fill"):
        config = EngineConfig(num_blocks=500, max_num_seqs=256, max_num_batched_tokens=1024, admission=admission)
        seen[admission] = simulate(H100, load, config)
    preempted = {name: sum(len(s.preempted) for s in trace.steps()) for name, trace in seen.items()}
    running = {name: np.mean([s.num_running for s in trace.steps()]) for name, trace in seen.items()}
    assert preempted["worst_case"] == 0 < preempted["fill"]
    assert running["worst_case"] < 0.7 * running["fill"]
    assert max(seen["worst_case"].workload().itl) < 0.1 < max(seen["fill"].workload().itl)


def test_swapping_computes_nothing_twice_and_moves_what_recomputing_computes_again() -> None:
    load = poisson(10, 12, 3, (500,), mean_output=200, max_tokens=1024)
    for preemption in ("recompute", "swap"):
        config = EngineConfig(
            num_blocks=500, max_num_seqs=256, max_num_batched_tokens=1024, preemption=preemption, swap_bytes=2**31
        )
        trace = simulate(H100, load, config)
        steps = trace.steps()
        needed = sum(a.prompt + a.output - 1 for a in load)
        again = sum(r.num_tokens for s in steps for r in s.rows) - needed
        moved = sum(len(s.transfers.swap_out) for s in steps)
        assert sum(len(s.preempted) for s in steps) > 0
        assert (again > 0, moved > 0) == ((True, False) if preemption == "recompute" else (False, True))


def test_more_seats_raise_throughput_and_tpot_and_shorten_the_queue() -> None:
    load = [Arrival(0.0, 500, 60) for _ in range(64)]
    few, many = (simulate(H100, load, EngineConfig(max_num_seqs=n)).workload() for n in (4, 32))
    assert many.throughput > 3 * few.throughput
    assert percentile(many.tpot, 50) > percentile(few.tpot, 50)
    assert np.mean(many.ttft) < np.mean(few.ttft) / 3
    one = simulate(H100, load[:1], EngineConfig(max_num_seqs=1)).metrics("0")
    assert one.tpot == pytest.approx(H100.tpot(530), rel=0.01)


def test_a_budget_below_the_free_ride_reads_the_weights_more_often_for_nothing() -> None:
    """Documents of 4,000 tokens with short answers: 128 tokens a step serve fewer than 512, and 512 as many as 2048."""
    load = poisson(6, 12, 4, (4000,), mean_output=40)
    free = latency.flat_prefill_tokens(H100.device, mfu=0.5) / H100.mbu
    assert 128 < free < 512
    rates, tpot = {}, {}
    for budget in (128, 512, 2048):
        w = simulate(H100, load, EngineConfig(max_num_seqs=256, max_num_batched_tokens=budget)).workload()
        rates[budget], tpot[budget] = len(w.requests) / w.duration, percentile(w.tpot, 99)
    assert rates[128] < 0.97 * rates[512]
    assert rates[2048] == pytest.approx(rates[512], rel=0.03)
    assert tpot[128] < tpot[512] < tpot[2048]


def test_host_work_one_after_the_other_lengthens_every_gap_by_itself() -> None:
    load = [Arrival(0.0, 100, 50) for _ in range(16)]
    quick, slow = (simulate(H100, load, host_seconds=seconds).workload() for seconds in (0.0, 0.003))
    assert percentile(slow.tpot, 50) - percentile(quick.tpot, 50) == pytest.approx(0.003, rel=0.01)
