"""Static, dynamic and Orca's batching in the engine: other steps, the same texts."""

from __future__ import annotations

import random
from typing import Any

from reference_impl.assembly.config import EngineConfig
from reference_impl.assembly.engine import Engine
from reference_impl.assembly.parts import Parts
from reference_impl.core.block_pool import BlockPool
from reference_impl.core.kv_manager import KVManager
from reference_impl.features.baselines.contiguous_manager import ContiguousKVManager
from reference_impl.features.baselines.dynamic_batching import DynamicBatching
from reference_impl.features.baselines.orca_batching import OrcaBatching
from reference_impl.features.baselines.static_batching import StaticBatching
from reference_impl.interfaces import SamplingParams


class StepClock:
    """A virtual clock that the test moves."""

    time = 0.0

    def now(self) -> float:
        return self.time


def texts(model: Any, make: Any = None, contiguous: bool = False) -> list[list[int]]:
    """Greedy outputs of twelve requests, of which two come a second and one step takes a second.

    make(kv) is the scheduler, if not the engine's own.
    """
    clock, chance = StepClock(), random.Random(5)
    coming = [
        (i // 2, chance.choices(range(61), k=chance.choice((1, 5, 17, 40))), chance.randint(1, 9)) for i in range(12)
    ]
    config = EngineConfig(block_size=4, num_blocks=64, max_num_seqs=3, max_num_batched_tokens=16)
    pool = BlockPool(64)
    kv: Any = ContiguousKVManager(64, 4) if contiguous else KVManager(pool, 4)
    engine = Engine(model, config, Parts(clock=clock, block_pool=pool, kv_manager=kv, scheduler=make and make(kv)))
    requests = []
    while coming or engine.has_work():
        while coming and coming[0][0] <= clock.time:
            _, prompt, max_tokens = coming.pop(0)
            requests.append(engine.add(prompt, SamplingParams(max_tokens=max_tokens, temperature=0)))
        if not hasattr(engine.scheduler, "next_event") or engine.scheduler.next_event(clock.time) is None:
            engine.step()
        clock.time += 1.0
    assert kv.num_available == 64
    return [request.output_tokens for request in requests]


SCHEDULERS = (
    lambda kv: StaticBatching(kv, 3),
    lambda kv: DynamicBatching(kv, 3, window=3.0),
    lambda kv: OrcaBatching(kv, 3),
)


def test_they_give_the_texts_of_continuous_batching(random_model) -> None:
    model = random_model("float64")
    expected = texts(model)
    assert len({tuple(text) for text in expected}) > 8
    for make in SCHEDULERS:
        assert texts(model, make) == expected


def test_contiguous_memory_gives_the_texts_of_paged_memory(random_model) -> None:
    model = random_model("float64")
    expected = texts(model)
    for make in (None, *SCHEDULERS):
        assert texts(model, make, contiguous=True) == expected
