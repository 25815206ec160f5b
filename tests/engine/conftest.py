"""A tap on the engine: the logits of every token it computes, and a KV cache in which a stale read cannot hide."""

from __future__ import annotations

import dataclasses
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from reference_impl.config import EngineConfig
from reference_impl.engine import Engine, Parts
from reference_impl.interfaces import Batch, SamplingParams
from reference_impl.kv.block_pool import BlockPool
from reference_impl.models.decoder import Decoder


class TappedModel:
    """The model, with a note of the logits of every token: logits[request id][position] is a list, one per pass."""

    def __init__(self, model: Decoder):
        self.model = model
        self.logits: dict[str, dict[int, list[torch.Tensor]]] = defaultdict(lambda: defaultdict(list))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, batch: Batch, kv_cache: Any, attention: Any) -> torch.Tensor:
        everything = torch.arange(batch.num_tokens)
        logits = self.model(dataclasses.replace(batch, logits_indices=everything), kv_cache, attention)
        row = 0
        for request_id, query_len in zip(batch.request_ids, batch.query_lens, strict=True):
            for token in range(row, row + query_len):
                self.logits[request_id][int(batch.positions[token])].append(logits[token])
            row += query_len
        return logits[batch.logits_indices]


class ShuffledPool(BlockPool):
    """Hands out blocks in a random order."""

    def __init__(self, num_blocks: int, seed: int):
        super().__init__(num_blocks)
        self.random = random.Random(seed)
        self.random.shuffle(self._free)

    def decref(self, ids: Sequence[int]) -> list[int]:
        freed = super().decref(ids)
        self.random.shuffle(self._free)
        return freed


def poison_free_blocks(engine: Engine) -> None:
    """From now on a block that nobody owns when a step begins to write holds NaN, and host memory likewise."""
    cache, transfer = engine.kv_cache, engine.kv_cache.transfer

    def transfer_and_poison(transfers: Any) -> None:
        transfer(transfers)
        cache.data[:, :, [b for b in range(engine.num_blocks) if engine.block_pool.ref_count(b) == 0]] = torch.nan
        host = engine.kv.host_pool
        if host is not None:
            cache.host[:, :, [b for b in range(engine.num_host_blocks) if host.ref_count(b) == 0]] = torch.nan

    cache.data.fill_(torch.nan)
    cache.host.fill_(torch.nan)
    cache.transfer = transfer_and_poison


@pytest.fixture(scope="session")
def tapped_engine() -> Callable[..., tuple[Engine, dict[str, dict[int, list[torch.Tensor]]]]]:
    """tapped_engine(model, seed, parts, **engine options) -> (engine, its logits).

    Blocks come in an order that depends on the seed, and a block that nobody owns holds NaN.
    """

    def make(model: Decoder, seed: int = 0, parts: Parts | None = None, **options: Any) -> tuple[Engine, Any]:
        tap = TappedModel(model)
        parts = dataclasses.replace(parts or Parts(), block_pool=ShuffledPool(options["num_blocks"], seed))
        engine = Engine(tap, EngineConfig(**options), parts)  # type: ignore[arg-type]
        poison_free_blocks(engine)
        return engine, tap.logits

    return make


@pytest.fixture(scope="session")
def one_shot() -> Callable[[Decoder, Sequence[int]], torch.Tensor]:
    """Logits [len(tokens), vocab_size] of a sequence alone, in one pass, without a cache."""
    from reference_impl.baselines.no_cache import RecomputeAttention
    from reference_impl.baselines.ragged import ragged_batch

    def logits(model: Decoder, tokens: Sequence[int]) -> torch.Tensor:
        c = model.config
        batch = ragged_batch([(tokens, 0)], len(tokens), model.device, c.layer_windows)
        batch.logits_indices = torch.arange(len(tokens))
        with torch.inference_mode():
            return model(batch, None, RecomputeAttention(c.attention_scale, c.attention_softcap))

    return logits


@pytest.fixture(scope="session")
def run_alone() -> Callable[..., list[int]]:
    """Output tokens of one request that has an engine to itself and reads its prompt at once."""

    def run(model: Decoder, prompt: list[int], sampling: SamplingParams) -> list[int]:
        engine = Engine(model, EngineConfig(block_size=128, num_blocks=1))
        request = engine.add(prompt, sampling)
        while engine.has_work():
            engine.step()
        return request.output_tokens

    return run
