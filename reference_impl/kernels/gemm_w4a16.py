"""A linear layer with a weight of 4 bits: y = x W^T, W = (code - zero) x scale, in groups of 32, 64 or 128 along `in`.

The method is that of Marlin (Frantar et al. 2024) and gpt-fast: codes come from memory, become 16-bit numbers in
registers, and go to the matrix units. Three ideas:
(1) A group's first half lies in the low nibbles, its second half in the high ones: two products with the two halves of
x, and nothing to interleave. A step along `in` is a group.
(2) A code becomes a number without a conversion: 0x6400 | code is the fp16 number 1024 + code, 0x4300 | code the bf16
number 128 + code. Subtracting 1024 + zero is exact; then the scale multiplies a group's sums, not each weight. Integer
instructions per weight set the pace here: the bits of the other nibble are set, not cleared, which saves one.
(3) The tile is computed as W x^T: weights then go from registers into the matrix instruction, and few tokens are its
small side. Weights are read once: the L2 may evict them first.

FLOPs: 2 tokens in out. Bytes: in out / 2 + 2 in out / group for scales + 2 tokens (in + out); 4.1 bits per weight at
group 128, so at best 3.9 times as fast as 16 bits. On an H200 memory-bound up to 47 tokens, then compute-bound; from
184 tokens on, 16 bits are as fast.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from reference_impl.kernels.eight_bits import finite_or_nan
from reference_impl.kernels.gemm import (
    Tile,
    check_operands,
    choose,
    grid_of,
    room_for,
    steps_of_split,
    tile_of_program,
    write_tile,
)
from reference_impl.kernels.launch import architecture, launch
from reference_impl.kernels.reference.linear import pack_int4

__all__ = ["gemm_w4a16", "pack_int4"]


@triton.jit
def numbers_of_int4(codes, zero, dtype: tl.constexpr):
    """(low, high) nibbles of bytes, minus zero, in 16 bits. All of it is exact; zero is of that dtype."""
    wide = codes.to(tl.int16)
    if dtype == tl.float16:
        low = (wide | 0x64F0).to(tl.float16, bitcast=True) - (zero + 1264)  # 1024 + 240 + nibble
        high = (wide | 0x640F).to(tl.float16, bitcast=True) * 0.0625 - (zero + 64.9375)  # 1024 + 16 nibble + 15
    else:
        low = (wide | 0x43F0).to(tl.bfloat16, bitcast=True) * 0.5 - (zero + 240)  # 480 + 2 nibble
        high = ((wide >> 4) | 0x4300).to(tl.bfloat16, bitcast=True) - (zero + 128)  # 128 + nibble
    return low, high


@triton.jit(do_not_specialize=["num_tokens"])
def _gemm_w4a16(
    x, packed, scales, zeros, out, partial, tickets,
    num_tokens, in_features, out_features, stride_x, stride_packed, stride_out,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = x.dtype.element_ty
    HALF: tl.constexpr = BLOCK_K // 2
    m_tile, n_tile = tile_of_program(num_tokens, out_features, BLOCK_M, BLOCK_N, GROUP_M)
    m = m_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    n = n_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, HALF)
    in_x, in_out = (m < num_tokens)[:, None], n < out_features
    at_x = x + m.to(tl.int64)[:, None] * stride_x + k[None, :]
    at_packed = packed + n.to(tl.int64)[:, None] * stride_packed + k[None, :]
    zero = tl.full([BLOCK_N], 8, dtype)
    first, end = steps_of_split(in_features // BLOCK_K)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for group in range(first, end):
        codes = tl.load(at_packed + group * HALF, mask=in_out[:, None], other=0)
        x_low = tl.load(at_x + group * BLOCK_K, mask=in_x, other=0.0)  # [M, HALF]
        x_high = tl.load(at_x + group * BLOCK_K + HALF, mask=in_x, other=0.0)
        scale = tl.load(scales + group * out_features + n, mask=in_out, other=0.0).to(tl.float32)
        if zeros is not None:
            zero = tl.load(zeros + group * out_features + n, mask=in_out, other=0).to(dtype)
        low, high = numbers_of_int4(codes, zero[:, None], dtype)  # [N, HALF]
        sums = tl.dot(low, tl.trans(x_low))  # [N, M]
        sums = tl.dot(high, tl.trans(x_high), sums)
        acc += sums * finite_or_nan(scale)[:, None]
    write_tile(tl.trans(acc), None, out, partial, tickets, m_tile, n_tile, num_tokens, out_features, stride_out, SPLITS)


TILES = (
    Tile(128, 128, 128, 8, 3, weight_bytes=0.5),
    Tile(64, 128, 128, 8, 3, weight_bytes=0.5),
    Tile(64, 64, 128, 4, 3, weight_bytes=0.5),
    Tile(32, 128, 128, 4, 4, weight_bytes=0.5),
    Tile(32, 64, 128, 4, 4, weight_bytes=0.5),
    Tile(16, 128, 128, 4, 4, weight_bytes=0.5),
    Tile(16, 64, 128, 4, 4, weight_bytes=0.5),
)


def gemm_w4a16(
    x: Tensor,
    packed: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    group_size: int = 128,
    *,
    tile: Tile | None = None,
) -> Tensor:
    """Twin of `reference.gemm_w4a16`, which documents shapes and meanings. x in 16 bits; groups of 32, 64 or 128.

    tile: by default the one that `choose` returns; its step along `in` becomes a group.
    """
    (num_tokens, in_features), out_features = x.shape, len(packed)
    check_four_bits(x, packed, scales, group_size)
    if zeros is not None:
        check_groups(zeros, *scales.shape)
    tile = replace(tile or choose(TILES, num_tokens, out_features, architecture()), block_k=group_size)
    out = x.new_empty((num_tokens, out_features))
    if num_tokens:
        grid = grid_of(tile, num_tokens, out_features, in_features, architecture())
        launch(
            _gemm_w4a16, grid,
            x, packed, scales, zeros, out, *room_for(grid, out),
            num_tokens, in_features, out_features, x.stride(0), packed.stride(0), out.stride(0),
            options=tile.options, **tile.constants,
        )  # fmt: skip
    return out


def check_four_bits(x: Tensor, packed: Tensor, scales: Tensor, group_size: int, bias: Tensor | None = None) -> None:
    """Raises ValueError unless the operands fit together and the kernels can compute them."""
    in_features = x.shape[1]
    if group_size not in (32, 64, 128) or in_features % group_size or x.element_size() != 2:
        raise ValueError(
            f"expected x in 16 bits and groups of 32, 64 or 128 that divide in = {in_features}, got {x.dtype} and "
            f"groups of {group_size}"
        )
    if packed.dtype is not torch.uint8:
        raise ValueError(f"expected packed codes in uint8, as pack_int4 gives them, got {packed.dtype}")
    check_operands(x, packed, in_features // 2, bias)
    check_groups(scales, in_features // group_size, len(packed))


def check_groups(scales: Tensor, num_groups: int, out_features: int) -> None:
    """Raises ValueError unless scales (or zeros) are [num_groups, out_features], contiguous."""
    if scales.shape != (num_groups, out_features) or not scales.is_contiguous():
        raise ValueError(
            f"expected scales or zeros [in / group size, out] = {[num_groups, out_features]}, contiguous, got "
            f"{list(scales.shape)} with strides {scales.stride()}"
        )
