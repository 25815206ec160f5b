"""Where replica and engine once parted: requests that come too late, and how many blocks a number of bytes buys."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from reference_impl.config import EngineConfig
from reference_impl.models.decoder import Decoder
from reference_impl.simulation import CalibratedCost, Replica
from reference_impl.simulation.comparison import by_step, real_steps, same_plans, simulated_steps

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
