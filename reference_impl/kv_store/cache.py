"""The tensors in which keys and values live, cut into blocks (PagedAttention, Kwon et al. 2023)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from reference_impl.interfaces import Batch, BlockPair, KVSpec, Transfers


class PagedKVCache:
    """Keys and values: data [layers of a group, 2, num_blocks, block_size, num_kv_heads, head_dim].

    Each block belongs to one KV group at a time, and holds its tokens for all layers of that group.
    Positions come before heads (the layout called NHD): one token's keys of all heads lie side by side,
    so writing a token is one contiguous copy. num_host_blocks: room in host memory for blocks that are swapped out.
    """

    def __init__(
        self,
        specs: Sequence[KVSpec],
        num_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
        num_host_blocks: int = 0,
    ):
        self.specs, self.num_blocks = tuple(specs), num_blocks
        spec = self.specs[0]
        block = (spec.block_size, spec.num_kv_heads, spec.head_dim)
        # Zeros, not empty: the pages are touched now, so a machine without the memory fails here.
        self.data = torch.zeros((spec.num_layers, 2, num_blocks, *block), dtype=dtype, device=device)
        self.host = torch.zeros((spec.num_layers, 2, num_host_blocks, *block), dtype=dtype)
        self._place = {layer: place for s in specs for place, layer in enumerate(s.layers or range(s.num_layers))}
        self._slots = [(layer[0].flatten(0, 1), layer[1].flatten(0, 1)) for layer in self.data]

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """(keys, values), each [num_blocks, block_size, num_kv_heads, head_dim]."""
        pages = self.data[self._place[layer]]
        return pages[0], pages[1]

    def write(self, layer: int, key: Tensor, value: Tensor, batch: Batch) -> None:
        """Stores new keys and values, each [num_tokens, num_kv_heads, head_dim], in the slots of the layer's group."""
        keys, values = self._slots[self._place[layer]]
        slots = batch.groups[batch.group_of_layer[layer]].slot_mapping
        keys.index_copy_(0, slots, key)
        values.index_copy_(0, slots, value)

    def transfer(self, transfers: Transfers) -> None:
        """To the host first, then copies, then back: a block given up may be written anew in the same step."""
        _copy_blocks(self.data, self.host, transfers.swap_out)
        _copy_blocks(self.data, self.data, transfers.copies)
        _copy_blocks(self.host, self.data, transfers.swap_in)


def _copy_blocks(source: Tensor, target: Tensor, pairs: Sequence[BlockPair]) -> None:
    """All sources are read before any target is written, so a block may be both."""
    if pairs:
        src = torch.tensor([pair.src for pair in pairs], device=source.device)
        dst = torch.tensor([pair.dst for pair in pairs], device=target.device)
        target.index_copy_(2, dst, source.index_select(2, src).to(target.device))
