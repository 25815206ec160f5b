"""`fused_linear` with a weight of 4 bits: y = residual + gate(norm(x) W^T + b), W = (code - zero) x scale of its
group.

The loop is that of `gemm_w4a16`, where packing and numbers are explained, with the norm's weight on both halves of x;
what happens to the sums is that of `fused_linear`. A step along `in` is a group.

FLOPs: 2 tokens in rows. Bytes: in rows / 2, 2 in rows / group for scales (3 with zeros of a byte), 2 tokens (in + out):
a quarter of 16 bits, so the gaps between kernels weigh four times as much.
"""

from __future__ import annotations

from dataclasses import replace

import triton
import triton.language as tl
from torch import Tensor

from reference_impl.kernels.eight_bits import finite_or_nan
from reference_impl.kernels.fused_linear import check_neighbours, room_for_splits, rows_of_tile, write_outputs
from reference_impl.kernels.gemm import Tile, choose, grid_of
from reference_impl.kernels.gemm_w4a16 import check_four_bits, check_groups, numbers_of_int4
from reference_impl.kernels.launch import architecture, launch
from reference_impl.kernels.reference import Activation

TILES = (
    Tile(64, 64, 128, 8, 3, weight_bytes=0.5),
    Tile(32, 64, 128, 4, 5, weight_bytes=0.5),
    Tile(32, 64, 128, 4, 4, weight_bytes=0.5),
    Tile(16, 128, 128, 4, 6, weight_bytes=0.5),
    Tile(16, 64, 128, 4, 7, weight_bytes=0.5),
    Tile(16, 64, 128, 4, 4, weight_bytes=0.5),
)


@triton.jit(do_not_specialize=["num_tokens"])
def _fused_linear_w4a16(
    x, packed, scales, zeros, bias, norm, residual, out, partial, squares, tickets,
    num_tokens, in_features, out_features, num_rows, stride_x, stride_packed, stride_residual, eps,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = x.dtype.element_ty
    HALF: tl.constexpr = BLOCK_K // 2
    m, k = tl.arange(0, BLOCK_M), tl.arange(0, HALF)
    row, in_rows = rows_of_tile(tl.program_id(0), out_features, BLOCK_N, GATE is not None)
    in_x = (m < num_tokens)[:, None]
    at_x = x + m[:, None] * stride_x + k[None, :]
    at_packed = packed + row.to(tl.int64)[:, None] * stride_packed + k[None, :]
    eight = tl.full([1, 1], 8, dtype)
    groups = in_features // BLOCK_K
    share = tl.cdiv(groups, SPLITS)
    first = tl.program_id(1) * share
    end = tl.minimum(first + share, groups)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    square = tl.zeros([BLOCK_M, HALF], tl.float32)
    # Triton copies tiles of products ahead of time, and only these: the rest is asked for one group early.
    scale = tl.load(scales + first * num_rows + row, mask=in_rows & (first < end), other=0.0)
    if zeros is not None:
        zero = tl.load(zeros + first * num_rows + row, mask=in_rows & (first < end), other=0)
    if norm is not None:
        at_norm = norm + k
        norm_low = tl.load(at_norm + first * BLOCK_K, mask=k + first * BLOCK_K < in_features, other=0.0)
        norm_high = tl.load(at_norm + first * BLOCK_K + HALF, mask=k + first * BLOCK_K < in_features, other=0.0)
    for group in range(first, end):
        codes = tl.load(at_packed + group * HALF, mask=in_rows[:, None], other=0)
        x_low = tl.load(at_x + group * BLOCK_K, mask=in_x, other=0.0)  # [M, HALF]
        x_high = tl.load(at_x + group * BLOCK_K + HALF, mask=in_x, other=0.0)
        if zeros is None:
            low, high = numbers_of_int4(codes, eight, dtype)  # [N, HALF]
        else:
            low, high = numbers_of_int4(codes, zero.to(dtype)[:, None], dtype)
            zero = tl.load(zeros + (group + 1) * num_rows + row, mask=in_rows & (group + 1 < end), other=0)
        if norm is not None:
            wide_low, wide_high = x_low.to(tl.float32), x_high.to(tl.float32)
            square += wide_low * wide_low + wide_high * wide_high
            x_low = (wide_low * norm_low.to(tl.float32)[None, :]).to(dtype)
            x_high = (wide_high * norm_high.to(tl.float32)[None, :]).to(dtype)
            later = (group + 1) * BLOCK_K
            norm_low = tl.load(at_norm + later, mask=k + later < in_features, other=0.0)
            norm_high = tl.load(at_norm + later + HALF, mask=k + later < in_features, other=0.0)
        sums = tl.dot(low, tl.trans(x_low))  # [N, M]
        sums = tl.dot(high, tl.trans(x_high), sums)
        acc += sums * finite_or_nan(scale.to(tl.float32))[:, None]
        scale = tl.load(scales + (group + 1) * num_rows + row, mask=in_rows & (group + 1 < end), other=0.0)
    write_outputs(
        acc, tl.sum(square, 1) if norm is not None else None, None, bias, residual,
        out, partial, squares, tickets, num_tokens, in_features, out_features, stride_residual, eps, GATE, SPLITS,
    )  # fmt: skip


def fused_linear_w4a16(
    x: Tensor,
    packed: Tensor,
    scales: Tensor,
    bias: Tensor | None = None,
    *,
    zeros: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
    gate: Activation | None = None,
    residual: Tensor | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """Twin of `reference.fused_linear_w4a16`, which documents shapes and meanings. x in 16 bits, groups of 32, 64 or
    128; up to FEW_TOKENS tokens.

    tile: by default the one `choose` returns; its step along `in` becomes a group, and it holds up to block_m tokens.
    """
    (num_tokens, in_features), num_rows, group_size = x.shape, len(packed), x.shape[1] // len(scales)
    check_four_bits(x, packed, scales, group_size, bias)
    if zeros is not None:
        check_groups(zeros, *scales.shape)
    tile = replace(tile or choose(TILES, num_tokens, num_rows, architecture()), block_k=group_size)
    if num_tokens > tile.block_m:
        raise ValueError(f"expected at most {tile.block_m} tokens for {tile}, got {num_tokens}")
    out = x.new_empty((num_tokens, num_rows // 2 if gate else num_rows))
    check_neighbours(out, norm, in_features, gate, residual, num_rows)
    if num_tokens:
        grid = grid_of(tile, num_tokens, num_rows, in_features, architecture())
        launch(
            _fused_linear_w4a16, grid,
            x, packed, scales, zeros, bias, norm, residual, out, *room_for_splits(grid, x, num_rows),
            num_tokens, in_features, out.shape[1], num_rows, x.stride(0), packed.stride(0),
            0 if residual is None else residual.stride(0), float(eps),
            BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, SPLITS=grid[1], GATE=gate,
            options=tile.options,
        )  # fmt: skip
    return out
