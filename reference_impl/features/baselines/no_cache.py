"""Generation without a KV cache: every step runs the whole sequence again. Slow on purpose.

Step t computes prompt + t tokens, so N tokens after a prompt of S cost N·S + N(N - 1)/2 tokens of linear
layers, where a cache needs S + N - 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from reference_impl.core.decoder import Decoder
from reference_impl.features.baselines.ragged import ragged_batch
from reference_impl.interfaces import Batch, KVCache
from reference_impl.kernels import reference


class RecomputeAttention:
    """Attention without a cache: keys and values are used in one pass and forgotten."""

    def __init__(self, scale: float, softcap: float | None = None):
        self.scale, self.softcap = scale, softcap

    def plan(self, batch: Batch) -> None:
        pass

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer: int, kv_cache: KVCache | None, batch: Batch) -> Tensor:
        window = batch.groups[batch.group_of_layer[layer]].window
        return reference.attention_one_row(q, k, v, self.scale, window, self.softcap)


@torch.inference_mode()
def generate_no_cache(model: Decoder, prompt: list[int], max_new_tokens: int) -> list[int]:
    """Generates greedily; returns the new token ids. prompt: token ids."""
    c = model.config
    attention = RecomputeAttention(c.attention_scale, c.attention_softcap)
    tokens = list(prompt)
    for _ in range(max_new_tokens):
        batch = ragged_batch([(tokens, 0)], len(tokens), model.device, c.layer_windows)
        logits = model(batch, None, attention)
        tokens.append(int(logits[0].argmax()))
    return tokens[len(prompt) :]
