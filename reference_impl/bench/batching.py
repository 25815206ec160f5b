"""Continuous against static, dynamic and Orca-style batching: the same engine, model and kernels, another scheduler.

The workload is published here, because the ratio depends on it: with outputs of different lengths static batching waits
for the longest, with equal lengths it does not. Requests come in one burst, so nothing here measures waiting for
arrivals.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from reference_impl.assembly.config import EngineConfig
from reference_impl.assembly.engine import Engine
from reference_impl.assembly.parts import Parts
from reference_impl.bench import harness
from reference_impl.core.block_pool import BlockPool
from reference_impl.core.decoder import Decoder
from reference_impl.core.kv_manager import KVManager
from reference_impl.features.baselines.orca_batching import OrcaBatching
from reference_impl.features.baselines.static_batching import StaticBatching
from reference_impl.interfaces import Request, SamplingParams, Scheduler

NUM_REQUESTS, MAX_NUM_SEQS, NUM_BLOCKS, SEED = 32, 8, 256, 7


def workload(kind: str, num_requests: int = NUM_REQUESTS) -> list[tuple[list[int], int]]:
    """(prompt, output tokens) pairs. "skewed": 16, or for every fourth request 128; "equal": 44, the same mean."""
    rng = random.Random(SEED)
    lengths = {"skewed": [128 if i % 4 == 0 else 16 for i in range(num_requests)], "equal": [44] * num_requests}[kind]
    rng.shuffle(lengths)
    return [([rng.randrange(10, 4000) for _ in range(rng.randint(8, 64))], length) for length in lengths]


def _engine(model: Decoder, make: Callable[[KVManager], Scheduler] | None) -> Engine:
    config = EngineConfig(num_blocks=NUM_BLOCKS, max_num_seqs=MAX_NUM_SEQS, prefix_cache="off")
    if make is None:
        return Engine(model, config)
    pool = BlockPool(NUM_BLOCKS)
    kv = KVManager(pool, config.block_size)
    return Engine(model, config, Parts(block_pool=pool, kv_manager=kv, scheduler=make(kv)))


def serve(engine: Engine, requests: Iterable[tuple[list[int], int]]) -> list[Request]:
    """Runs all requests, (prompt, output tokens) each, greedily to their end."""
    added = [engine.add(p, SamplingParams(max_tokens=n, temperature=0, ignore_eos=True)) for p, n in requests]
    while engine.has_work():
        engine.step()
    return added


SCHEDULERS: dict[str, Callable[[KVManager], Scheduler] | None] = {
    "continuous": None,
    "static": lambda kv: StaticBatching(kv, MAX_NUM_SEQS),
    "orca": lambda kv: OrcaBatching(kv, MAX_NUM_SEQS),
}


def run(model: Decoder, rounds: int) -> dict[str, Any]:
    result: dict[str, Any] = {"requests": NUM_REQUESTS, "max_num_seqs": MAX_NUM_SEQS, "seed": SEED, "workloads": {}}
    for kind in ("skewed", "equal"):
        requests = workload(kind)
        steps: dict[str, int] = {}

        def work(name: str, requests: Any = requests, steps: dict[str, int] = steps) -> None:
            engine = _engine(model, SCHEDULERS[name])
            serve(engine, requests)
            steps[name] = len(engine.trace.steps())

        candidates: dict[str, Callable[[], object]] = {name: partial(work, name) for name in SCHEDULERS}
        seconds = harness.interleave(candidates, rounds)
        result["workloads"][kind] = {
            "steps": steps,
            "faster_than": {
                name: harness.ratio(seconds[name], seconds["continuous"]) for name in SCHEDULERS if name != "continuous"
            },
        }
    return result
