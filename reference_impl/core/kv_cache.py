"""The tensors in which keys and values live, cut into blocks (PagedAttention, Kwon et al. 2023)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from reference_impl.interfaces import Batch, BlockId, KVSpec, Transfers


class PagedKVCache:
    """Keys and values: data [layers of a group, 2, num_blocks, block_size, num_kv_heads, head_dim].

    Each block belongs to one KV group at a time, and holds its tokens for all layers of that group.
    Positions come before heads (the layout called NHD): one token's keys of all heads lie side by side,
    so writing a token is one contiguous copy.

    ValueError for a spec of anything else: a latent, a state, values of another width, scales.
    """

    bits_per_scale = 0  # beside each head of a slot

    def __init__(self, specs: Sequence[KVSpec], num_blocks: int, dtype: torch.dtype, device: torch.device):
        for each in specs:
            self._check(each, dtype)
        spec, self.specs, self.num_blocks = specs[0], tuple(specs), num_blocks
        # Zeros, not empty: the pages are touched now, so a machine without the memory fails here.
        self.data = torch.zeros(
            (spec.num_layers, 2, num_blocks, spec.block_size, spec.num_kv_heads, spec.head_dim),
            dtype=dtype, device=device,
        )  # fmt: skip
        self.blocks = [self.data.movedim(2, 0)]  # all that a block holds: each [num_blocks, layers of a group, 2, ...]
        # Of each layer its place in the tensors of its group.
        self.place = {layer: place for s in specs for place, layer in enumerate(s.layers or range(s.num_layers))}
        self.host: Any = None  # where blocks are swapped out to: features/swap/cache.py
        self._pages = [(keys, values) for keys, values in self.data]
        self._slots = [(keys.flatten(0, 1), values.flatten(0, 1)) for keys, values in self.data]

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """The (keys, values) of a layer, each [num_blocks, block_size, num_kv_heads, head_dim]."""
        return self._pages[self.place[layer]]

    def write(self, layer: int, key: Tensor, value: Tensor, batch: Batch) -> None:
        """Stores new keys and values, each [num_tokens, num_kv_heads, head_dim], in the slots of the layer's group."""
        slots = batch.groups[batch.group_of_layer[layer]].slot_mapping
        keys, values = self._slots[self.place[layer]]
        keys.index_copy_(0, slots, key)
        values.index_copy_(0, slots, value)

    def transfer(self, transfers: Transfers) -> None:
        """Moves blocks to the host first, then makes copies, then moves blocks back: a block that was given up may be
        written again in the same step. All sources of copies are read before any target is written, so a block may be
        both. On a GPU the host does not wait: all is queued in the stream."""
        if self.host is not None:
            self.host.swap_out(transfers.swap_out)
        if transfers.copies:
            sources, targets = ([pair[end] for pair in transfers.copies] for end in (0, 1))
            for blocks in self.blocks:
                found = blocks.index_select(0, block_ids(sources, blocks.device))
                blocks.index_copy_(0, block_ids(targets, blocks.device), found)
        if self.host is not None:
            self.host.swap_in(transfers.swap_in)

    def _check(self, spec: KVSpec, dtype: torch.dtype) -> None:
        expected = {
            "kind": "kv", "bits_per_value": 8 * dtype.itemsize, "bits_per_scale": self.bits_per_scale,
            "bits_per_zero_point": 0,
        }  # fmt: skip
        if spec.group_size not in (None, spec.head_dim):
            expected["group_size"] = None
        for name, value in expected.items():
            if (found := getattr(spec, name)) != value:
                raise ValueError(
                    f"{type(self).__name__} in {dtype}: expected a KVSpec with {name}={value!r}, got {name}={found!r}: "
                    "such a cache is one of your own, see Parts.kv_cache"
                )


def block_ids(blocks: Iterable[BlockId], device: torch.device) -> Tensor:
    """The block ids as a tensor [blocks] int64 on the device; does not wait for the device."""
    ids = torch.tensor(list(blocks))
    return ids.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else ids.to(device)
