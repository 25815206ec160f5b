"""What the kernels for a cache by channel (KIVI, Liu et al. 2024) share: how its memory is laid out, and how a full
block is cut into pieces.

A block's keys have a scale and a lowest number for each channel, [2, head_dim] of a head, side by side. So a tile of
keys is [blocks, slots], and the scales of a block serve all its slots. Where block_size is no power of two, or larger
than a tile, a block is some pieces of PIECE slots, the last of which may not be full.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from reference_impl.kernels.reference.by_channel import ByChannel


@triton.jit
def by_channel(codes, scale, lowest, PIECE: tl.constexpr, dtype: tl.constexpr):
    """codes [pieces x PIECE, columns] x scale + lowest, [pieces, columns] float16 each, rounded once to dtype."""
    PIECES: tl.constexpr = codes.shape[0] // PIECE
    COLUMNS: tl.constexpr = codes.shape[1]
    number = codes.to(tl.float32).reshape(PIECES, PIECE, COLUMNS)
    number = number * scale.to(tl.float32)[:, None, :] + lowest.to(tl.float32)[:, None, :]
    return number.reshape(PIECES * PIECE, COLUMNS).to(dtype)


@triton.jit
def either(old, new, at_old, at_new, is_old, inside):
    """What lies at at_old in `old` where is_old, elsewhere at at_new in `new`; 0 outside."""
    from_old = tl.load(old + at_old, mask=inside & is_old, other=0.0)
    from_new = tl.load(new + at_new, mask=inside & ~is_old, other=0.0)
    return tl.where(is_old, from_old, from_new)


@triton.jit
def row_of_token(query_start_loc, num_rows, token):
    """The last row that begins at this token or before it: of rows that begin there together all but it are empty."""
    low, high = 0, num_rows
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_start_loc + middle) <= token:
            low = middle
        else:
            high = middle
    return low


def piece_of(block_size: int, block_n: int) -> int:
    """Slots of a piece, for tiles of block_n keys."""
    return int(min(triton.next_power_of_2(block_size), block_n))


def check_memory(cache: ByChannel, *strided: Tensor) -> None:
    """ValueError for a cache that lies in memory otherwise, or tensors whose last dimension is not contiguous."""
    keys, values, key_scale, value_scale, open_keys, open_values, _ = cache
    lying = (keys, values, key_scale.mT, value_scale.permute(0, 3, 2, 1), open_keys, open_values)
    if not all(t.is_contiguous() for t in lying):
        raise ValueError(
            "expected contiguous codes and open blocks, and scales that lie as [num_blocks, num_kv_heads, 2, head_dim] "
            "(keys) and [num_blocks, 2, num_kv_heads, block_size] (values), as ByChannelKVCache has them"
        )
    if any(t.stride(-1) != 1 for t in strided):
        raise ValueError("expected head_dim contiguous in q, k and v")
