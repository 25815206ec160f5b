"""The tensors in which keys and values live, cut into blocks (PagedAttention, Kwon et al. 2023)."""

from __future__ import annotations

import torch
from torch import Tensor

from reference_impl.interfaces import Batch, KVSpec


class PagedKVCache:
    """Keys and values of all layers: [num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim].

    Positions come before heads (the layout called NHD): one token's keys of all heads lie side by side,
    so writing a token is one contiguous copy.
    """

    def __init__(self, spec: KVSpec, num_blocks: int, dtype: torch.dtype, device: torch.device):
        self.spec, self.num_blocks = spec, num_blocks
        shape = (
            spec.num_layers,
            2,
            num_blocks,
            spec.block_size,
            spec.num_kv_heads,
            spec.head_dim,
        )
        # Zeros, not empty: the pages are touched now, so a machine without the memory fails here.
        self.data = torch.zeros(shape, dtype=dtype, device=device)
        self._slots = [(layer[0].flatten(0, 1), layer[1].flatten(0, 1)) for layer in self.data]

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """(keys, values), each [num_blocks, block_size, num_kv_heads, head_dim]."""
        return self.data[layer, 0], self.data[layer, 1]

    def write(self, layer: int, key: Tensor, value: Tensor, batch: Batch) -> None:
        """Stores new keys and values, each [num_tokens, num_kv_heads, head_dim], at batch.slot_mapping."""
        keys, values = self._slots[layer]
        keys.index_copy_(0, batch.slot_mapping, key)
        values.index_copy_(0, batch.slot_mapping, value)
