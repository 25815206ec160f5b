"""Where replica and engine once parted: requests that come too late, and how many blocks a number of bytes buys."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from reference_impl.assembly.config import EngineConfig
from reference_impl.assembly.engine import Engine
from reference_impl.assembly.parts import Parts
from reference_impl.core.decoder import Decoder
from reference_impl.interfaces import SamplingParams
from reference_impl.simulation import CalibratedCost, Replica
from reference_impl.simulation.comparison import by_step, real_steps, same_plans, simulated_steps
from reference_impl.simulation.executor import SimulatedGPU, hollow_model

from .loads import load, request

TICK = CalibratedCost(0.125, 0, 0, 0, 0, 0, 0, 4096, 2048)


pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_step_that_has_begun_does_not_take_who_is_offered_too_late() -> None:
    replica = Replica(TICK, EngineConfig(num_blocks=9))
    replica.offer(request("a", 0.0, 10, 9), 0.0)
    replica.run(0.3)
    with pytest.raises(ValueError, match="has run to 0.25"):
        replica.offer(request("b", 0.2, 10, 5), 0.2)
    replica.offer(request("c", 0.25, 10, 5), 0.25)


@pytest.mark.parametrize("num_host_blocks", [1, 6, 12])
def test_the_host_holds_as_many_swapped_blocks_as_swap_bytes_pays_for(
    random_model: Callable[..., Decoder], num_host_blocks: int
) -> None:
    """Who finds no room there computes again: so the plans depend on it, and on the size of a block of the model."""
    model = random_model(max_position_embeddings=512)
    c = model.config
    per_token = 2 * c.num_layers * c.num_kv_heads * c.head_dim * model.dtype.itemsize
    cost = CalibratedCost(7e-3, 4e-4, 1.2e-6, 3e-4, 7e-5, 2e-6, 6e-8, per_token, 512)
    config = EngineConfig(
        block_size=8, num_blocks=40, preemption="swap", swap_bytes=num_host_blocks * 8 * per_token, prefix_cache="off"
    )
    arrivals = by_step(load(30, 1, 10.0, 200, 40), 0.02)
    simulated, real = simulated_steps(arrivals, cost, config, 512), real_steps(model, arrivals, config)
    assert any(step.preempted for step in real)
    assert same_plans(simulated, real) is None
    assert Replica(cost, config).engine.num_host_blocks == num_host_blocks


def test_blocks_that_are_not_counted_are_what_the_budget_pays_for_in_both_engines(
    random_model: Callable[..., Decoder],
) -> None:
    model = random_model(max_position_embeddings=512)
    c = model.config
    per_token = 2 * c.num_layers * c.num_kv_heads * c.head_dim * model.dtype.itemsize
    cost = CalibratedCost(7e-3, 4e-4, 1.2e-6, 3e-4, 7e-5, 2e-6, 6e-8, per_token, 512)
    config = EngineConfig(block_size=8, kv_cache_bytes=40 * 8 * per_token)
    arrivals = by_step(load(30, 1, 10.0, 200, 40), 0.02)
    assert same_plans(simulated_steps(arrivals, cost, config, 512), real_steps(model, arrivals, config)) is None


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("prefix_cache", ["hash", "radix"])
def test_samples_of_a_prompt_that_compute_again_find_their_own_blocks_and_not_each_other_s(
    random_model: Callable[..., Decoder], prefix_cache: str, temperature: float
) -> None:
    """Drawn samples differ, greedy ones are alike: one that is let in again finds what the cache has of it."""
    model, nothing = random_model(max_position_embeddings=512), object()
    config = EngineConfig(block_size=4, num_blocks=40, preemption="recompute", prefix_cache=prefix_cache)  # type: ignore[arg-type]
    gpu = SimulatedGPU(TICK, block_size=4)
    parts = Parts(executor=gpu, clock=gpu, kv_cache=nothing, attention=nothing)  # type: ignore[arg-type]
    sampling = SamplingParams(max_tokens=30, temperature=temperature, n=6, seed=1, ignore_eos=True)
    plans = []
    for engine in (Engine(hollow_model(model.config.vocab_size, 512, 4096), config, parts), Engine(model, config)):
        for number in range(3):
            engine.add([20 + number] * 8, sampling, str(number))
            gpu.time += 0.001  # as on a real clock, nobody arrives at once with another
        while engine.has_work():
            engine.step()
        plans.append([(step.rows, step.admitted, step.preempted) for step in engine.trace.steps()])
    assert plans[0] == plans[1]
    assert any(preempted for _, _, preempted in plans[1])
    assert any(cached > 8 for _, admitted, _ in plans[1] for _, cached in admitted)
