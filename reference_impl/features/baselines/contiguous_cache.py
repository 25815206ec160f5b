"""Generation with a contiguous KV cache: one buffer per sequence, as long as the longest may get.

This is what paging replaces: the buffer is reserved in full when a request starts, whether it is used or not.
Several sequences of different lengths share one tensor, each with its own length.
"""

from __future__ import annotations

import torch
from torch import Tensor

from reference_impl.core.decoder import Decoder
from reference_impl.features.baselines.ragged import ragged_batch
from reference_impl.interfaces import Batch
from reference_impl.kernels import reference


class ContiguousKVCache:
    """A preallocated buffer and a length per row. It does not grow; only the lengths do.

    data [num_layers, 2, rows, max_len, num_kv_heads, head_dim].
    """

    def __init__(self, model: Decoder, rows: int, max_len: int):
        c = model.config
        shape = (c.num_layers, 2, rows, max_len, c.num_kv_heads, c.head_dim)
        self.data = torch.zeros(shape, dtype=model.dtype, device=model.device)
        self.lengths = [0] * rows

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """The (keys, values) of a layer, each [rows, max_len, num_kv_heads, head_dim]."""
        return self.data[layer, 0], self.data[layer, 1]

    def write(self, layer: int, key: Tensor, value: Tensor, batch: Batch) -> None:
        keys, values = self.layer(layer)
        keys.flatten(0, 1)[batch.slot_mapping] = key
        values.flatten(0, 1)[batch.slot_mapping] = value


class ContiguousAttention:
    """Attention over contiguous rows: each attends to its own first `length` slots. A window hides slots, but frees
    none."""

    def __init__(self, scale: float, softcap: float | None = None):
        self.scale, self.softcap = scale, softcap

    def plan(self, batch: Batch) -> None:
        pass

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer: int, kv_cache: ContiguousKVCache, batch: Batch) -> Tensor:
        kv_cache.write(layer, k, v, batch)
        keys, values = kv_cache.layer(layer)
        queries, window = q.split(batch.query_lens), batch.groups[batch.group_of_layer[layer]].window
        return torch.cat([
            reference.attention_one_row(queries[row], keys[row, :n], values[row, :n], self.scale, window, self.softcap)
            for row, n in enumerate(batch.context_lens)
        ])  # fmt: skip


@torch.inference_mode()
def generate_contiguous_cache(model: Decoder, prompts: list[list[int]], max_new_tokens: int) -> list[list[int]]:
    """Generates greedily for all prompts together; returns the new token ids of each."""
    max_len = max(map(len, prompts)) + max_new_tokens
    cache = ContiguousKVCache(model, len(prompts), max_len)
    c = model.config
    attention = ContiguousAttention(c.attention_scale, c.attention_softcap)
    new = [list(prompt) for prompt in prompts]  # tokens whose keys and values are not in the cache yet
    outputs: list[list[int]] = [[] for _ in prompts]
    for _ in range(max_new_tokens):
        rows = list(zip(new, cache.lengths, strict=True))
        batch = ragged_batch(rows, max_len, model.device, c.layer_windows)
        chosen = model(batch, cache, attention).argmax(dim=-1).tolist()
        for row, token in enumerate(chosen):
            cache.lengths[row] += len(new[row])
            new[row] = [token]
            outputs[row].append(token)
    return outputs
