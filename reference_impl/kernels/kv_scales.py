"""Which scales a cache has, for the kernels that write and read it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from reference_impl.kernels.gemm_w4a16 import numbers_of_int4


@triton.jit
def column_of(place, HEAD_DIM: tl.constexpr, PACKED: tl.constexpr):
    """Which number of a head is at this place of what `unpacked` gives."""
    return place // 2 + place % 2 * (HEAD_DIM // 2) if PACKED else place


@triton.jit
def halves(codes, dtype: tl.constexpr):
    """(low, high): the numbers of the first half of a head and of its second, of the bytes' shape."""
    if dtype == tl.float32:
        low, high = (codes & 15).to(tl.float32), (codes >> 4).to(tl.float32)
    else:
        low, high = numbers_of_int4(codes, 0.0, dtype)
    return low, high


@triton.jit
def unpacked(codes, dtype: tl.constexpr):
    """Bytes [N, D / 2] of two codes each -> [N, D] of that dtype: of each byte its low half, then its high one. So
    nothing passes between threads."""
    low, high = halves(codes, dtype)
    return tl.join(low, high).reshape(codes.shape[0], 2 * codes.shape[1])


def strides_of_scales(keys: Tensor, key_scale: Tensor | None, value_scale: Tensor | None) -> tuple[int, int, int, int]:
    """Strides of the scales: (block, slot, head, from scale to lowest number), zeros where there are none. Raises
    ValueError for scales that do not fit the cache or each other."""
    quantized, packed = keys.element_size() == 1, keys.dtype is torch.uint8
    if quantized != (key_scale is not None) or quantized != (value_scale is not None):
        raise ValueError(
            f"expected key_scale and value_scale with a cache of 8 or 4 bits, and only then; it is {keys.dtype}"
        )
    if key_scale is None or value_scale is None:
        return 0, 0, 0, 0
    if value_scale.stride() != key_scale.stride():
        raise ValueError("expected key_scale and value_scale with the same strides")
    if key_scale.dim() != 3 + packed:
        raise ValueError(
            "expected scales [num_blocks, block_size, num_kv_heads], and of a cache of 4 bits one dimension more, "
            f"(scale, lowest); got {key_scale.dim()} dimensions for a cache of {keys.dtype}"
        )
    block, slot, head, *lowest = key_scale.stride()
    return block, slot, head, lowest[0] if packed else 0
