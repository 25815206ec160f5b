"""A linear layer for few tokens, fused with its neighbours in one launch: y = residual + gate(norm(x) W^T + b).

Each of norm, gate and residual may be left out. A decoding step is a chain of small kernels, with a gap of about a
microsecond before each; and what one of them writes, the next reads. So the neighbours move into the product:
(1) RMSNorm before it. The factor 1 / sqrt(mean(x^2) + eps) is the same all along a token's row, so it multiplies the
sums at the end; as it walks along `in`, a program adds up the squares as well. What it multiplies is x times the norm's
weight. Every program repeats this for itself: for few tokens x is small.
(2) The gate after it. Half of a tile's rows are of `gate` and half of `up`, for the same outputs: one product gives the
program all that silu(gate) up needs.
(3) The residual after it: the sum is rounded once.
The product itself is that of `gemm` for few tokens, W x^T in tiles with splits along `in`; where both are explained. A
split's squares are added up like its sums. A weight of 8 bits becomes one of 16 in registers, and its scales, one per
row, multiply the sums: half the bytes, with x in 16 bits and no kernel to quantize it.

FLOPs: 2 tokens in rows, rows = out, or 2 out with a gate. Bytes: 2 in rows, or in rows with 8 bits, and 2 tokens (in +
out), and 2 tokens out for the residual: memory-bound.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from reference_impl.kernels.gates import gated
from reference_impl.kernels.gemm import Tile, check_operands, choose, grid_of
from reference_impl.kernels.gemm_w8a16 import numbers_of_int8
from reference_impl.kernels.launch import architecture, launch, tickets_of
from reference_impl.kernels.reference import Activation

# For each block_m the largest first: the order that `choose` expects.
TILES = (
    Tile(64, 128, 64, 8, 4),
    Tile(64, 64, 64, 4, 4),
    Tile(64, 64, 64, 4, 3),
    Tile(32, 128, 64, 8, 5),
    Tile(32, 64, 128, 4, 4),
    Tile(32, 64, 128, 4, 3),
    Tile(16, 64, 128, 4, 5),
    Tile(16, 64, 128, 4, 4),
)
EIGHT_BIT_TILES = (
    Tile(64, 128, 64, 8, 4, weight_bytes=1),
    Tile(64, 64, 64, 4, 4, weight_bytes=1),
    Tile(32, 64, 128, 4, 5, weight_bytes=1),
    Tile(32, 64, 128, 4, 4, weight_bytes=1),
    Tile(16, 64, 128, 4, 7, weight_bytes=1),
    Tile(16, 64, 128, 4, 4, weight_bytes=1),
)
FLOAT32_TILES = tuple(Tile(m, 32, 32, 4, 1, 4, 4) for m in (64, 32, 16))  # without matrix units


@triton.jit
def rows_of_tile(n_tile, out_features, BLOCK_N: tl.constexpr, GATED: tl.constexpr):
    """(rows of the weight, whether they exist) of a tile. With a gate one half of them is `gate`, the other `up`."""
    i = tl.arange(0, BLOCK_N)
    if GATED:
        HALF: tl.constexpr = BLOCK_N // 2
        n = n_tile * HALF + i % HALF
        return n + i // HALF * out_features, n < out_features
    n = n_tile * BLOCK_N + i
    return n, n < out_features


@triton.jit
def _numbers(weight, dtype: tl.constexpr):
    """A weight of 8 bits in 16."""
    if weight.dtype == tl.int8:
        return numbers_of_int8(weight).to(dtype)
    return weight.to(dtype)


@triton.jit
def write_outputs(
    acc, square, weight_scale, bias, residual, out, partial, squares, tickets,
    num_tokens, in_features, out_features, stride_residual, eps,
    GATE: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """acc [BLOCK_N, BLOCK_M]: this split's sums; square [BLOCK_M]: those of the squares, or None without a norm.

    The split of a tile that comes here last adds up all and writes the tile. The squares of a split are the same in
    all tiles; so all write them to one place, the same number.
    """
    BLOCK_N: tl.constexpr = acc.shape[0]
    BLOCK_M: tl.constexpr = acc.shape[1]
    GATED: tl.constexpr = GATE is not None
    WIDTH: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    n_tile, split = tl.program_id(0), tl.program_id(1)
    m = tl.arange(0, BLOCK_M)
    row, in_rows = rows_of_tile(n_tile, out_features, BLOCK_N, GATED)
    in_tokens = m < num_tokens
    ticket = SPLITS - 1
    if SPLITS > 1:
        num_rows = out_features * 2 if GATED else out_features
        exists = in_rows[:, None] & in_tokens[None, :]
        at = partial + m[None, :] * num_rows + row[:, None]
        tl.store(at + split * num_tokens * num_rows, acc, mask=exists)
        if square is not None:
            tl.store(squares + split * num_tokens + m, square, mask=in_tokens)
        tl.debug_barrier()  # all threads have stored before one of them takes the ticket
        ticket = tl.atomic_add(tickets + n_tile, 1, sem="acq_rel", scope="gpu")
        if ticket == SPLITS - 1:
            tl.store(tickets + n_tile, 0)  # for the next launch
            acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            if square is not None:
                square = tl.zeros([BLOCK_M], tl.float32)
            # From the L2 (.cg, found on sm_90): what this multiprocessor's L1 holds of them may be older.
            for other in tl.static_range(SPLITS):
                acc += tl.load(at + other * num_tokens * num_rows, mask=exists, other=0.0, cache_modifier=".cg")
                if square is not None:
                    at_square = squares + other * num_tokens + m
                    square += tl.load(at_square, mask=in_tokens, other=0.0, cache_modifier=".cg")
    if ticket == SPLITS - 1:
        if square is not None:
            acc *= tl.rsqrt(square / in_features + eps)[None, :]
        if weight_scale is not None:
            acc *= tl.load(weight_scale + row, mask=in_rows, other=0.0).to(tl.float32)[:, None]
        if bias is not None:
            acc += tl.load(bias + row, mask=in_rows, other=0.0).to(tl.float32)[:, None]
        if GATED:
            gate, up = tl.split(tl.permute(tl.reshape(acc, [2, WIDTH, BLOCK_M]), (1, 2, 0)))
            y = tl.trans(gated(gate, up, GATE == "gelu_tanh"))  # [BLOCK_M, WIDTH]
        else:
            y = tl.trans(acc)
        n = n_tile * WIDTH + tl.arange(0, WIDTH)
        in_y = in_tokens[:, None] & (n < out_features)[None, :]
        if residual is not None:
            y += tl.load(residual + m[:, None] * stride_residual + n[None, :], mask=in_y, other=0.0).to(tl.float32)
        tl.store(out + m[:, None] * out_features + n[None, :], y.to(out.dtype.element_ty), mask=in_y)


@triton.jit(do_not_specialize=["num_tokens"])
def _fused_linear(
    x, weight, weight_scale, bias, norm, residual, out, partial, squares, tickets,
    num_tokens, in_features, out_features, stride_x, stride_weight, stride_residual, eps,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr, GATE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    m, k_range = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    row, in_rows = rows_of_tile(tl.program_id(0), out_features, BLOCK_N, GATE is not None)
    at_x = x + m[:, None] * stride_x + k_range[None, :]
    at_weight = weight + row.to(tl.int64)[:, None] * stride_weight + k_range[None, :]
    steps = tl.cdiv(in_features, BLOCK_K)
    share = tl.cdiv(steps, SPLITS)
    first = tl.program_id(1) * share
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    square = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    if norm is not None:
        scale = tl.load(norm + first * BLOCK_K + k_range, mask=first * BLOCK_K + k_range < in_features, other=0.0)
    for step in range(first, tl.minimum(first + share, steps)):
        k = step * BLOCK_K
        inside = k + k_range < in_features
        x_tile = tl.load(at_x + k, mask=(m < num_tokens)[:, None] & inside[None, :], other=0.0)
        weight_tile = tl.load(at_weight + k, mask=in_rows[:, None] & inside[None, :], other=0.0)
        if weight_scale is not None:
            weight_tile = _numbers(weight_tile, x.dtype.element_ty)
        if norm is not None:
            wide = x_tile.to(tl.float32)
            square += wide * wide
            x_tile = (wide * scale.to(tl.float32)[None, :]).to(x.dtype.element_ty)
            # Triton copies tiles of products ahead of time, and only these: the next step's weights are asked for here.
            scale = tl.load(norm + k + BLOCK_K + k_range, mask=k + BLOCK_K + k_range < in_features, other=0.0)
        acc = tl.dot(weight_tile, tl.trans(x_tile), acc, input_precision=PRECISION)
    write_outputs(
        acc, tl.sum(square, 1) if norm is not None else None, weight_scale, bias, residual,
        out, partial, squares, tickets, num_tokens, in_features, out_features, stride_residual, eps, GATE, SPLITS,
    )  # fmt: skip


def fused_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    weight_scale: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
    gate: Activation | None = None,
    residual: Tensor | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """Twin of `reference.fused_linear`, which documents shapes and meanings. Up to FEW_TOKENS tokens.

    tile: by default the one that `choose` returns; it holds up to block_m tokens.
    """
    check_operands(x, weight, x.shape[1], bias)
    if (weight.element_size() == 1) != (weight_scale is not None) or (
        weight_scale is not None and (weight_scale.shape != (len(weight),) or weight_scale.stride(0) != 1)
    ):
        raise ValueError(
            f"expected scales [{len(weight)}], contiguous, with a weight of 8 bits, and only then; the weight is "
            f"{weight.dtype}, the scales are {None if weight_scale is None else list(weight_scale.shape)}"
        )
    (num_tokens, in_features), num_rows = x.shape, len(weight)
    tiles = FLOAT32_TILES if x.element_size() == 4 else TILES if weight_scale is None else EIGHT_BIT_TILES
    tile = tile or choose(tiles, num_tokens, num_rows, architecture())
    if num_tokens > tile.block_m:
        raise ValueError(f"expected at most {tile.block_m} tokens for {tile}, got {num_tokens}")
    out = x.new_empty((num_tokens, num_rows // 2 if gate else num_rows))
    check_neighbours(out, norm, in_features, gate, residual, num_rows)
    if num_tokens:
        grid = grid_of(tile, num_tokens, num_rows, in_features, architecture())
        launch(
            _fused_linear, grid,
            x, weight, weight_scale, bias, norm, residual, out, *room_for_splits(grid, x, num_rows),
            num_tokens, in_features, out.shape[1], x.stride(0), weight.stride(0),
            0 if residual is None else residual.stride(0), float(eps),
            BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, SPLITS=grid[1], GATE=gate,
            PRECISION="ieee" if x.dtype is torch.float32 else "tf32", options=tile.options,
        )  # fmt: skip
    return out


def check_neighbours(
    out: Tensor, norm: Tensor | None, in_features: int, gate: Activation | None, residual: Tensor | None, num_rows: int
) -> None:
    """Raises ValueError unless a norm has `in` weights, gate and up as many rows, and a residual the shape of y."""
    if norm is not None and (norm.shape != (in_features,) or norm.stride(0) != 1):
        raise ValueError(f"expected a norm [{in_features}], contiguous, got {list(norm.shape)}")
    if gate not in (None, "silu", "gelu_tanh") or (gate and num_rows % 2):
        raise ValueError(
            f"expected a gate None, 'silu' or 'gelu_tanh', and an even number of rows with one, got {gate!r} and "
            f"{num_rows} rows"
        )
    if residual is not None and (
        residual.shape != out.shape or (len(out) and residual.stride(1) != 1) or residual.dtype is not out.dtype
    ):
        raise ValueError(
            f"expected a residual {list(out.shape)} of {out.dtype} with contiguous rows, got {list(residual.shape)} of "
            f"{residual.dtype} with strides {residual.stride()}"
        )


def room_for_splits(grid: tuple[int, int], x: Tensor, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """(partial, squares, tickets): the splits' sums [splits, tokens, rows] and sums of squares [splits, tokens],
    float32; tickets as in `gemm`."""
    splits = grid[1] if grid[1] > 1 else 0
    partial, squares = (x.new_empty((splits, len(x), n), dtype=torch.float32) for n in (num_rows, 1))
    return partial, squares, tickets_of(x.device)
