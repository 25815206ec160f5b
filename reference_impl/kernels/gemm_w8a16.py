"""A linear layer with a weight of 8 bits: y = x W^T, W = int8 x scale, a scale per output or per group along `in`.

The kernel is like `gemm_w4a16`, which explains it: weights become 16-bit numbers in registers without the slow
conversion, the tile is computed as W x^T, the scale multiplies sums. With one scale per output it does so once, at the
end; with groups after each step, which then must not cross the border of a group.

FLOPs: 2 tokens in out. Bytes: in out + 2 tokens (in + out): at best twice as fast as 16 bits. On an H200 memory-bound
up to 92 tokens, then compute-bound.
"""

from __future__ import annotations

import math
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
from reference_impl.kernels.gemm_w4a16 import check_groups
from reference_impl.kernels.launch import architecture, launch


@triton.jit
def numbers_of_int8(codes):
    """int8 as float32: 0x4B000000 | byte is 2^23 + byte, and a byte with its sign turned over is 128 + code."""
    bits = codes.to(tl.uint8, bitcast=True).to(tl.int32) ^ 0x4B000080
    return bits.to(tl.float32, bitcast=True) - 8388736.0


@triton.jit(do_not_specialize=["num_tokens"])
def _gemm_w8a16(
    x, weight, scales, out, partial, tickets,
    num_tokens, in_features, out_features, group_size, stride_x, stride_weight, stride_out,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, SPLITS: tl.constexpr,
    GROUPS: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = x.dtype.element_ty
    m_tile, n_tile = tile_of_program(num_tokens, out_features, BLOCK_M, BLOCK_N, GROUP_M)
    m = m_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    n = n_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    k_range = tl.arange(0, BLOCK_K)
    in_x, in_out = (m < num_tokens)[:, None], n < out_features
    at_x = x + m.to(tl.int64)[:, None] * stride_x + k_range[None, :]
    at_weight = weight + n.to(tl.int64)[:, None] * stride_weight + k_range[None, :]
    first, end = steps_of_split(tl.cdiv(in_features, BLOCK_K))
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for step in range(first, end):
        k = step * BLOCK_K
        inside = (k + k_range < in_features)[None, :]
        codes = tl.load(at_weight + k, mask=in_out[:, None] & inside, other=0)
        x_tile = tl.trans(tl.load(at_x + k, mask=in_x & inside, other=0.0))  # [K, M]
        numbers = numbers_of_int8(codes).to(dtype)  # [N, K]
        if GROUPS:
            scale = tl.load(scales + k // group_size * out_features + n, mask=in_out, other=0.0).to(tl.float32)
            acc += tl.dot(numbers, x_tile) * finite_or_nan(scale)[:, None]
        else:
            acc = tl.dot(numbers, x_tile, acc)
    if not GROUPS:
        acc *= finite_or_nan(tl.load(scales + n, mask=in_out, other=0.0).to(tl.float32))[:, None]
    write_tile(tl.trans(acc), None, out, partial, tickets, m_tile, n_tile, num_tokens, out_features, stride_out, SPLITS)


TILES = (
    Tile(128, 128, 64, 8, 3, weight_bytes=1),
    Tile(128, 64, 64, 4, 3, weight_bytes=1),
    Tile(64, 64, 128, 4, 3, weight_bytes=1),
    Tile(32, 64, 128, 4, 4, weight_bytes=1),
    Tile(16, 128, 128, 4, 4, weight_bytes=1),
    Tile(16, 64, 128, 4, 4, weight_bytes=1),
)


def gemm_w8a16(x: Tensor, weight: Tensor, scales: Tensor, *, tile: Tile | None = None) -> Tensor:
    """Twin of `reference.gemm_w8a16`, which documents shapes and meanings. x in 16 bits; group sizes: multiples of 32.

    tile: by default the one `choose` returns. Where groups are shorter than its steps, the steps become shorter, too.
    """
    (num_tokens, in_features), out_features, num_groups = x.shape, len(weight), len(scales)
    if weight.dtype is not torch.int8 or not num_groups:
        raise ValueError(f"expected a weight in int8 and scales of one group or more, got {weight.dtype}, {num_groups}")
    check_operands(x, weight, in_features)
    check_groups(scales, num_groups, out_features)
    tile, group_size = tile or choose(TILES, num_tokens, out_features, architecture()), in_features // num_groups
    if num_groups > 1:
        tile = replace(tile, block_k=math.gcd(tile.block_k, group_size))
    if in_features % num_groups or tile.block_k < 32 or x.element_size() != 2:
        raise ValueError(
            f"expected x in 16 bits and groups of a multiple of 32 that divide in = {in_features}, got {x.dtype} and "
            f"{num_groups} groups"
        )
    out = x.new_empty((num_tokens, out_features))
    if num_tokens:
        grid = grid_of(tile, num_tokens, out_features, in_features, architecture())
        launch(
            _gemm_w8a16, grid,
            x, weight, scales, out, *room_for(grid, out),
            num_tokens, in_features, out_features, group_size, x.stride(0), weight.stride(0), out.stride(0),
            GROUPS=num_groups > 1, options=tile.options, **tile.constants,
        )  # fmt: skip
    return out
