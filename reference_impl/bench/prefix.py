"""Time to the first token of a prompt whose first 1,000 tokens were computed before: found again, or computed again."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

from reference_impl.assembly.config import EngineConfig
from reference_impl.assembly.engine import Engine
from reference_impl.bench import harness
from reference_impl.bench.batching import serve
from reference_impl.core.decoder import Decoder

SHARED, OWN = 1000, 24


def run(model: Decoder, rounds: int) -> dict[str, Any]:
    """Medians and the ratio off / on of each kind of index, round by round."""
    rng = random.Random(1)
    shared = [rng.randrange(10, 4000) for _ in range(SHARED)]
    engines = {
        kind: Engine(model, EngineConfig(num_blocks=256, prefix_cache=kind)) for kind in ("off", "hash", "radix")
    }
    own = [[rng.randrange(10, 4000) for _ in range(OWN)] for _ in range(rounds + 1)]
    coming = {kind: iter(own) for kind in engines}
    cached: dict[str, int] = {}

    def first_token(kind: str) -> None:
        """Serves a request. The first one of an engine fills its cache."""
        [request] = serve(engines[kind], [([*shared, *next(coming[kind])], 1)])
        cached[kind] = request.num_cached_tokens

    candidates: dict[str, Callable[[], object]] = {kind: partial(first_token, kind) for kind in engines}
    first = harness.interleave(candidates, rounds)
    return {
        "shared_tokens": SHARED,
        "own_tokens": OWN,
        "cached_tokens": cached,
        "seconds": {kind: harness.spread(values) for kind, values in first.items()},
        "faster_than_off": {kind: harness.ratio(first["off"], first[kind]) for kind in ("hash", "radix")},
    }
