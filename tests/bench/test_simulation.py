"""A load on a GPU that is not there: times are the formula's, order and blocks are the engine's."""

from __future__ import annotations

import numpy as np
import pytest

from reference_impl.assembly.config import EngineConfig
from reference_impl.bench.simulation import Arrival, poisson, simulate
from reference_impl.features.baselines.dynamic_batching import DynamicBatching
from reference_impl.observe.trace import RequestFinished
from reference_impl.theory.deployment import Deployment
from reference_impl.theory.hardware import device
from reference_impl.theory.model_shapes import model

H100 = Deployment(model("llama-3-8b"), device("H100"), mfu=0.5, mbu=0.8)


def test_a_lone_request_takes_what_the_formula_says() -> None:
    seen = simulate(H100, [Arrival(3.0, 1000, 50)]).metrics("0")
    assert seen.queue == 0
    assert seen.ttft == pytest.approx(H100.prefill_seconds(1000))
    steps = [H100.tpot(1000 + i) for i in range(1, 50)]
    assert seen.itl == pytest.approx(steps)


def test_an_arrival_is_stamped_with_its_own_second_although_a_step_runs() -> None:
    trace = simulate(H100, [Arrival(0.0, 8000, 2, name="a"), Arrival(0.01, 100, 2, name="b")])
    assert trace.arrival("b") == 0.01
    assert trace.metrics("b").queue == pytest.approx(trace.token_times("a")[0] - 0.01, rel=0.5)


def test_a_request_ends_at_its_length_and_not_at_max_tokens() -> None:
    trace = simulate(H100, [Arrival(0.0, 10, 5, max_tokens=100, name="a"), Arrival(0.0, 10, 7, name="b")])
    ended = {e.request_id: (e.reason, e.num_output_tokens) for e in trace.events if isinstance(e, RequestFinished)}
    assert ended == {"a": ("stop", 5), "b": ("length", 7)}


def test_the_clock_jumps_over_idle_time_and_waits_for_a_window_to_close() -> None:
    trace = simulate(H100, [Arrival(0.0, 10, 2), Arrival(100.0, 10, 2)])
    assert trace.metrics("1").queue == 0
    config = EngineConfig(max_num_seqs=4)
    trace = simulate(H100, [Arrival(1.0, 10, 2)], config, scheduler=lambda kv: DynamicBatching(kv, 4, window=0.5))
    assert trace.metrics("0").queue == pytest.approx(0.5)


def test_blocks_are_those_of_the_machine_unless_fewer_are_given() -> None:
    assert simulate(H100, [Arrival(0.0, 10, 1)]).steps()[-1].num_free_blocks == H100.cache_tokens() // 16
    load = [Arrival(0.0, 100, 100) for _ in range(8)]
    trace = simulate(H100, load, EngineConfig(num_blocks=40))
    assert sum(len(s.preempted) for s in trace.steps()) > 0
    assert all(trace.metrics(str(i)).num_output_tokens == 100 for i in range(8))


def test_swapped_blocks_cost_the_link() -> None:
    load = [Arrival(0.0, 100, 100) for _ in range(8)]
    config = EngineConfig(num_blocks=40, preemption="swap")
    steps = simulate(H100, load, config).steps()
    moving = [s for s in steps if s.transfers.swap_out and s.rows]
    assert moving
    for s in moving:
        blocks = len(s.transfers.swap_out) + len(s.transfers.swap_in)
        copied = blocks * 16 * H100.bytes_per_token / 55e9
        computed = H100.step_seconds([r.num_tokens for r in s.rows], [r.start for r in s.rows])
        assert s.finished_at - s.started_at == pytest.approx(copied + computed)


def test_poisson_arrivals_have_the_rate_the_shares_and_the_mean_that_were_asked_for() -> None:
    load = poisson(20, 200, 0, (100, 5000), (0.9, 0.1), 150, max_tokens=1000)
    assert len(load) / load[-1].second == pytest.approx(20, rel=0.1)
    assert np.mean([a.prompt == 5000 for a in load]) == pytest.approx(0.1, abs=0.02)
    assert np.mean([a.output for a in load]) == pytest.approx(150, rel=0.1)
    assert all(1 <= a.output <= 1000 == a.max_tokens for a in load)
    assert [a.second for a in load] == sorted(a.second for a in load)
    assert load == poisson(20, 200, 0, (100, 5000), (0.9, 0.1), 150, max_tokens=1000)
