"""Time to the first token of a prompt whose first 1,000 tokens were computed before: found again, or computed again."""

from __future__ import annotations

import random
import time
from typing import Any

from reference_impl.assembly.config import EngineConfig
from reference_impl.assembly.engine import Engine
from reference_impl.bench import harness
from reference_impl.core.decoder import Decoder
from reference_impl.interfaces import SamplingParams

SHARED, OWN = 1000, 24


def run(model: Decoder, rounds: int) -> dict[str, Any]:
    """Medians and the ratio off / on of each kind of index, round by round."""
    rng = random.Random(1)
    shared = [rng.randrange(10, 4000) for _ in range(SHARED)]
    engines = {
        kind: Engine(model, EngineConfig(num_blocks=256, prefix_cache=kind)) for kind in ("off", "hash", "radix")
    }
    first: dict[str, list[float]] = {kind: [] for kind in engines}
    cached: dict[str, int] = {}
    for turn in range(rounds + 1):  # the first fills the caches and warms up
        own = [rng.randrange(10, 4000) for _ in range(OWN)]
        for kind in (*list(engines)[turn % 3 :], *list(engines)[: turn % 3]):
            engine = engines[kind]
            began = time.perf_counter()
            request = engine.add([*shared, *own], SamplingParams(max_tokens=1, temperature=0))
            while engine.has_work():
                engine.step()
            if turn:
                first[kind].append(time.perf_counter() - began)
                cached[kind] = request.num_cached_tokens
    return {
        "shared_tokens": SHARED,
        "own_tokens": OWN,
        "cached_tokens": cached,
        "seconds": {kind: harness.spread(values) for kind, values in first.items()},
        "faster_than_off": {kind: harness.ratio(first["off"], first[kind]) for kind in ("hash", "radix")},
    }
