"""A KV cache of 8 bits: each head of a slot has a scale, and a stored code times this scale is the value.

This extends `PagedKVCache.write` and adds `scales`, see `HasScales`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from reference_impl.core.kv_cache import PagedKVCache
from reference_impl.interfaces import Batch, KVSpec
from reference_impl.kernels.reference import to_eight_bits


class EightBitKVCache(PagedKVCache):
    """A cache of 8-bit codes. dtype: that of the codes, int8, float8_e4m3fn or float8_e5m2.

    scale [layers of a group, 2, num_blocks, num_kv_heads, block_size] float32. Slots come last: the scales of one head
    of a block lie side by side.
    """

    bits_per_scale = 32

    def __init__(self, specs: Sequence[KVSpec], num_blocks: int, dtype: torch.dtype, device: torch.device):
        super().__init__(specs, num_blocks, dtype, device)
        spec = self.specs[0]
        self.scale = torch.zeros(
            (spec.num_layers, 2, num_blocks, spec.num_kv_heads, spec.block_size), dtype=torch.float32, device=device
        )
        codes = self.data.view(torch.uint8)  # torch cannot index float8 on the left
        self.blocks = [codes.movedim(2, 0), self.scale.movedim(2, 0)]
        self._slots = [(keys.flatten(0, 1), values.flatten(0, 1)) for keys, values in codes]
        self.scale_of_slots = self.scale.mT  # [layers of a group, 2, num_blocks, block_size, num_kv_heads]
        self._scales = [(keys, values) for keys, values in self.scale_of_slots]

    def scales(self, layer: int) -> tuple[Tensor, Tensor]:
        """The scales (of keys, of values) of a layer, each [num_blocks, block_size, num_kv_heads] float32."""
        return self._scales[self.place[layer]]

    def write(self, layer: int, key: Tensor, value: Tensor, batch: Batch) -> None:
        slots, place = batch.groups[batch.group_of_layer[layer]].slot_mapping, self.place[layer]
        at = slots // batch.block_size, slots % batch.block_size
        for stored, scale, fresh in zip(self._slots[place], self._scales[place], (key, value), strict=True):
            codes, scale[at] = to_eight_bits(fresh, self.data.dtype)
            stored.index_copy_(0, slots, codes.view(torch.uint8))
