"""A linear layer in 8-bit floats with scales by block: one per 128 x 128 weights, one per token and 128 inputs of x.

DeepSeek-V3 stores its weights and rounds its activations in this way (2024, section 3.3). The product is that of
`gemm`, which explains tiles, splits and the order for few tokens. A step along `in` is a block: its sums are multiplied
by the two scales and added up in float32 outside of the matrix unit, which also keeps what Hopper's unit would lose of
a long sum (`gemm_fp8`). A tile has at most 128 outputs, so it lies within one row of blocks: a weight's scale is one
number.

FLOPs: 2 tokens in out, and 3 for 128 of them outside of the matrix units. Bytes: in out + in out / 4096 for the blocks'
scales + tokens (in + in / 32 + 2 out).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from reference_impl.kernels.eight_bits import finite_or_nan
from reference_impl.kernels.gemm import (
    FEW_TOKENS,
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
from reference_impl.kernels.reference.linear import GROUP


@triton.jit(do_not_specialize=["num_tokens"])
def _gemm_fp8_blocks(
    codes, scale, weight, weight_scale, out, partial, tickets,
    num_tokens, in_features, out_features, num_groups, stride_codes, stride_weight, stride_out,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, SPLITS: tl.constexpr,
    SWAPPED: tl.constexpr,
):  # fmt: skip
    m_tile, n_tile = tile_of_program(num_tokens, out_features, BLOCK_M, BLOCK_N, GROUP_M)
    m = m_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    n = n_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    k_range = tl.arange(0, BLOCK_K)
    at_codes = codes + m.to(tl.int64)[:, None] * stride_codes + k_range[None, :]
    at_weight = weight + n.to(tl.int64)[:, None] * stride_weight + k_range[None, :]
    at_scale = scale + m.to(tl.int64) * num_groups
    at_block = weight_scale + n_tile * BLOCK_N // BLOCK_K * num_groups  # blocks are square: 128 outputs, too
    first, end = steps_of_split(num_groups)
    acc = tl.zeros([BLOCK_N, BLOCK_M] if SWAPPED else [BLOCK_M, BLOCK_N], tl.float32)
    for group in range(first, end):
        k = group * BLOCK_K
        inside = (k + k_range < in_features)[None, :]
        x_tile = tl.load(at_codes + k, mask=(m < num_tokens)[:, None] & inside, other=0.0)  # [M, K]
        weight_tile = tl.load(at_weight + k, mask=(n < out_features)[:, None] & inside, other=0.0)  # [N, K]
        of_block = finite_or_nan(tl.load(at_block + group))
        factor = tl.load(at_scale + group, mask=m < num_tokens, other=0.0) * of_block  # [M]
        if SWAPPED:
            acc += tl.dot(weight_tile, tl.trans(x_tile)) * factor[None, :]
        else:
            acc += tl.dot(x_tile, tl.trans(weight_tile)) * factor[:, None]
    if SWAPPED:
        acc = tl.trans(acc)
    write_tile(acc, None, out, partial, tickets, m_tile, n_tile, num_tokens, out_features, stride_out, SPLITS)


TILES = (
    Tile(128, 128, GROUP, 8, 4, 1, 1),  # more than the shared memory of a gfx942, where it would spill
    Tile(64, 64, GROUP, 4, 4, 1, 1),
    Tile(64, 64, GROUP, 4, 3, 1, 1),
    Tile(16, 64, GROUP, 4, 4, 1, 1),
)


def gemm_fp8_blocks(
    codes: Tensor,
    scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
    *,
    tile: Tile | None = None,
) -> Tensor:
    """Twin of `reference.gemm_fp8_blocks`, which documents shapes and meanings. tile: by default that of `choose`."""
    (num_tokens, in_features), out_features = codes.shape, len(weight)
    check_operands(codes, weight, in_features)
    num_groups = -(-in_features // GROUP)
    blocks = (-(-out_features // GROUP), num_groups)
    if scale.shape != (num_tokens, num_groups) or weight_scale.shape != blocks:
        raise ValueError(
            f"expected scales {[num_tokens, num_groups]} of tokens and {list(blocks)} of blocks of {GROUP} x {GROUP}, "
            f"got {list(scale.shape)} and {list(weight_scale.shape)}"
        )
    tile = tile or choose(TILES, num_tokens, out_features, architecture())
    out = codes.new_empty((num_tokens, out_features), dtype=out_dtype)
    if num_tokens:
        grid = grid_of(tile, num_tokens, out_features, in_features, architecture())
        launch(
            _gemm_fp8_blocks, grid,
            codes, scale.contiguous(), weight, weight_scale.contiguous(), out, *room_for(grid, out),
            num_tokens, in_features, out_features, num_groups, codes.stride(0), weight.stride(0), out.stride(0),
            SWAPPED=tile.block_m <= FEW_TOKENS, options=tile.options, **tile.constants,
        )  # fmt: skip
    return out
