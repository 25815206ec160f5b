"""What batch_invariant=True costs: the same model and requests, each token by itself or all of a step together."""

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

# (requests, tokens of each prompt, tokens of each answer)
CASES = {"one stream": (1, 8, 64), "16 requests": (16, 8, 32), "a prompt of 512 tokens": (1, 512, 1)}


def run(model: Decoder, rounds: int) -> dict[str, Any]:
    """Measures each case: tokens computed per second of both, and how many times as long it takes, round by round."""
    rng, found = random.Random(1), {}
    for name, (requests, prompt, answer) in CASES.items():
        prompts = [[rng.randrange(10, model.config.vocab_size) for _ in range(prompt)] for _ in range(requests)]
        ways: dict[str, Callable[[], object]] = {}
        for way, invariant in (("together", False), ("each by itself", True)):
            engine = Engine(model, EngineConfig(num_blocks=256, prefix_cache="off", batch_invariant=invariant))
            ways[way] = partial(serve, engine, [(tokens, answer) for tokens in prompts])
        seconds = harness.interleave(ways, rounds)
        found[name] = {
            "requests": requests, "prompt_tokens": prompt, "new_tokens": answer,
            "seconds": {way: harness.spread(s) for way, s in seconds.items()},
            "times_as_long": harness.ratio(seconds["each by itself"], seconds["together"]),
        }  # fmt: skip
    return found
