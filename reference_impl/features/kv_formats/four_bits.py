"""A KV cache of 4 bits, two codes in a byte: a value is code x scale + lowest, both stored for each head of a slot.

This extends `PagedKVCache.write` and adds `scales`, see `HasScales`. kernels/reference/four_bits.py chooses the codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from reference_impl.core.kv_cache import PagedKVCache
from reference_impl.interfaces import Batch, KVSpec
from reference_impl.kernels.reference import to_four_bits

SCALE_BITS = 16  # of each of the two


class FourBitKVCache(PagedKVCache):
    """A cache of 4-bit codes: data [layers of a group, 2, num_blocks, block_size, num_kv_heads, head_dim / 2] uint8.

    scale [layers of a group, 2, num_blocks, 2 (scale, lowest), num_kv_heads, block_size] float16. Slots come last, like
    in a cache of 8 bits. dtype: uint8. ValueError for a head_dim that is odd, and for a spec of anything else.
    """

    def __init__(self, specs: Sequence[KVSpec], num_blocks: int, dtype: torch.dtype, device: torch.device):
        for spec in specs:
            _check_four_bits(spec, dtype)
        bytes_of = [replace(s, head_dim=s.head_dim // 2, bits_per_value=8, bits_per_scale=0, bits_per_zero_point=0,
                            group_size=None) for s in specs]  # fmt: skip
        super().__init__(bytes_of, num_blocks, dtype, device)
        self.specs, spec = tuple(specs), specs[0]
        self.scale = torch.zeros(
            (spec.num_layers, 2, num_blocks, 2, spec.num_kv_heads, spec.block_size), dtype=torch.float16, device=device
        )
        self.blocks = [self.data.movedim(2, 0), self.scale.movedim(2, 0)]
        self.scale_of_slots = self.scale.permute(0, 1, 2, 5, 4, 3)
        self._scales = [(keys, values) for keys, values in self.scale_of_slots]

    def scales(self, layer: int) -> tuple[Tensor, Tensor]:
        """The scales (of keys, of values) of a layer, each [num_blocks, block_size, num_kv_heads, 2] float16: (scale,
        lowest)."""
        return self._scales[self.place[layer]]

    def write(self, layer: int, key: Tensor, value: Tensor, batch: Batch) -> None:
        slots, place = batch.groups[batch.group_of_layer[layer]].slot_mapping, self.place[layer]
        at = slots // batch.block_size, slots % batch.block_size
        for stored, scale, fresh in zip(self._slots[place], self._scales[place], (key, value), strict=True):
            codes, scale[at] = to_four_bits(fresh)
            stored.index_copy_(0, slots, codes)


def _check_four_bits(spec: KVSpec, dtype: torch.dtype) -> None:
    expected = {
        "kind": "kv", "bits_per_value": 4, "bits_per_scale": SCALE_BITS, "bits_per_zero_point": SCALE_BITS,
    }  # fmt: skip
    for name, value in expected.items():
        if (found := getattr(spec, name)) != value:
            raise ValueError(f"FourBitKVCache: expected a KVSpec with {name}={value!r}, got {name}={found!r}")
    if spec.group_size not in (None, spec.head_dim):
        raise ValueError(f"FourBitKVCache: expected group_size=None, got {spec.group_size}: one scale for each head")
    if spec.head_dim % 2:
        raise ValueError(f"kv_dtype int4: expected an even head_dim, two numbers in a byte, got {spec.head_dim}")
    if dtype is not torch.uint8:
        raise ValueError(f"FourBitKVCache: expected dtype torch.uint8, two codes in a byte, got {dtype}")
