"""A linear layer in 8-bit floats (e4m3): y = (x / s) (W / w)^T s w, with a scale s per token and w per output.

The kernel is that of `gemm`, which explains it, on matrix units for 8 bits. A scale is the same all along `in`, so it
multiplies the sums. Hopper's unit keeps about 14 bits of a running sum (DeepSeek-V3 2024, 3.3.2): the sums of PROMOTED
inputs at a time are added up in float32 outside of it. `quantize_rows.py` makes the codes of x.

FLOPs: 2 tokens in out. Bytes: in out + tokens (in + 2 out). On an H200 (1580 TFLOP/s in FP8, 4.3 TB/s) memory-bound up
to 184 tokens, then compute-bound: in both regimes at best twice as fast as 16 bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from reference_impl.kernels.gemm import (
    FEW_TOKENS,
    Tile,
    check_operands,
    check_scales,
    choose,
    grid_of,
    room_for,
    steps_of_split,
    tile_of_program,
    write_tile,
)
from reference_impl.kernels.launch import architecture, launch

PROMOTED = 128


@triton.jit(do_not_specialize=["num_tokens"])
def _gemm_fp8(
    codes, scale, weight, weight_scale, out, partial, tickets,
    num_tokens, in_features, out_features, stride_codes, stride_weight, stride_out,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, SPLITS: tl.constexpr,
    SWAPPED: tl.constexpr, PROMOTED: tl.constexpr,
):  # fmt: skip
    m_tile, n_tile = tile_of_program(num_tokens, out_features, BLOCK_M, BLOCK_N, GROUP_M)
    m = m_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    n = n_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    k_range = tl.arange(0, BLOCK_K)
    at_codes = codes + m.to(tl.int64)[:, None] * stride_codes + k_range[None, :]
    at_weight = weight + n.to(tl.int64)[:, None] * stride_weight + k_range[None, :]
    first, end = steps_of_split(tl.cdiv(in_features, BLOCK_K))
    acc = tl.zeros([BLOCK_N, BLOCK_M] if SWAPPED else [BLOCK_M, BLOCK_N], tl.float32)
    for step in range(first, end):
        k = step * BLOCK_K
        inside = (k + k_range < in_features)[None, :]
        x_tile = tl.load(at_codes + k, mask=(m < num_tokens)[:, None] & inside, other=0.0)  # [M, K]
        weight_tile = tl.load(at_weight + k, mask=(n < out_features)[:, None] & inside, other=0.0)  # [N, K]
        if SWAPPED:
            acc = tl.dot(weight_tile, tl.trans(x_tile), acc, max_num_imprecise_acc=PROMOTED)
        else:
            acc = tl.dot(x_tile, tl.trans(weight_tile), acc, max_num_imprecise_acc=PROMOTED)
    if SWAPPED:
        acc = tl.trans(acc)
    acc *= tl.load(scale + m, mask=m < num_tokens, other=0.0)[:, None]
    acc *= tl.load(weight_scale + n, mask=n < out_features, other=0.0)[None, :]
    write_tile(acc, None, out, partial, tickets, m_tile, n_tile, num_tokens, out_features, stride_out, SPLITS)


TILES = (
    Tile(128, 128, 128, 8, 4, 1, 1),
    Tile(128, 128, 128, 8, 3, 1, 1),
    Tile(128, 64, 128, 4, 3, 1, 1),
    Tile(64, 64, 128, 4, 4, 1, 1),
    Tile(32, 64, 256, 4, 3, 1, 1),
    Tile(16, 64, 256, 4, 4, 1, 1),
    Tile(16, 64, 128, 4, 4, 1, 1),
)


def gemm_fp8(
    codes: Tensor,
    scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
    *,
    tile: Tile | None = None,
) -> Tensor:
    """Twin of `reference.gemm_fp8`, which documents shapes and meanings. tile: by default the one `choose` returns."""
    (num_tokens, in_features), out_features = codes.shape, len(weight)
    check_operands(codes, weight, in_features)
    check_scales(scale, weight_scale, num_tokens, out_features)
    tile = tile or choose(TILES, num_tokens, out_features, architecture())
    out = codes.new_empty((num_tokens, out_features), dtype=out_dtype)
    if num_tokens:
        grid = grid_of(tile, num_tokens, out_features, in_features, architecture())
        launch(
            _gemm_fp8, grid,
            codes, scale.contiguous(), weight, weight_scale.contiguous(), out, *room_for(grid, out),
            num_tokens, in_features, out_features, codes.stride(0), weight.stride(0), out.stride(0),
            SWAPPED=tile.block_m <= FEW_TOKENS, PROMOTED=PROMOTED, options=tile.options, **tile.constants,
        )  # fmt: skip
    return out
