"""RMSNorm, alone or with the residual added and the result in FP8 (Zhang and Sennrich 2019).

y = x / sqrt(mean(x^2) + eps) x weight, one program per row. The first tile stays in registers, and rows of up to 16,384
values have no other: each value is read and written once. The part of a longer row beyond it is read again (L2), for
FP8 all of the row, and that part twice.

Bytes per value of a row in b bytes each: norm 2 b; with the residual 4 b, as two kernels 5 b; FP8 takes b - 1 less, and
saves the read and the write of a kernel that quantizes. About 5 FLOPs per value: memory-bound.
The weight is read by every row and stays in the L2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from reference_impl.kernels.eight_bits import encoded, magnitude, scale_of
from reference_impl.kernels.launch import launch


@triton.jit
def _tile(x, residual, start, N: tl.constexpr, BLOCK: tl.constexpr):
    """A tile in float32; with a residual the sum as it is stored."""
    column = start + tl.arange(0, BLOCK)
    inside = column < N
    value = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        value += tl.load(residual + column, mask=inside, other=0.0).to(tl.float32)
        value = value.to(x.dtype.element_ty).to(tl.float32)
    return value


@triton.jit
def _weights(weight, start, N: tl.constexpr, BLOCK: tl.constexpr):
    """Those of a tile, float32; 1 without any."""
    column = start + tl.arange(0, BLOCK)
    by = 1.0
    if weight is not None:
        by = tl.load(weight + column, mask=column < N, other=0.0).to(tl.float32)
    return by


@triton.jit
def _write(out, total, start, value, normed, N: tl.constexpr, BLOCK: tl.constexpr):
    column = start + tl.arange(0, BLOCK)
    inside = column < N
    if out.dtype.element_ty == tl.float8e4nv:
        tl.store(out + column, encoded(normed, tl.float8e4nv), mask=inside)
    else:
        tl.store(out + column, normed.to(out.dtype.element_ty), mask=inside)
    if total is not None:
        tl.store(total + column, value.to(total.dtype.element_ty), mask=inside)


@triton.jit
def _rms_norm(
    x, residual, weight, out, scale, total, eps, stride_x, stride_residual, N: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x += row * stride_x
    out += row * N
    if residual is not None:
        residual += row * stride_residual
        total += row * N

    value, by = _tile(x, residual, 0, N, BLOCK), _weights(weight, 0, N, BLOCK)
    squares = value * value
    for start in range(BLOCK, N, BLOCK):
        later = _tile(x, residual, start, N, BLOCK)
        squares += later * later

    # The weight comes last: value x weight may be infinite where the norm is a number.
    factor = tl.rsqrt(tl.sum(squares, 0) / N + eps)
    inverse = 1.0
    if scale is not None:
        largest = magnitude(value * factor * by)
        for start in range(BLOCK, N, BLOCK):
            later = _tile(x, residual, start, N, BLOCK) * factor * _weights(weight, start, N, BLOCK)
            largest = tl.maximum(largest, magnitude(later))
        row_scale = scale_of(tl.max(largest, 0), tl.float8e4nv)
        tl.store(scale + row, row_scale)
        inverse = tl.div_rn(1.0, row_scale)
        if N > BLOCK:
            # Again: in registers all the while, they would spill on sm_100.
            value, by = _tile(x, residual, 0, N, BLOCK), _weights(weight, 0, N, BLOCK)

    _write(out, total, 0, value, value * factor * by * inverse, N, BLOCK)
    for start in range(BLOCK, N, BLOCK):
        later = _tile(x, residual, start, N, BLOCK)
        normed = later * factor * _weights(weight, start, N, BLOCK) * inverse
        _write(out, total, start, later, normed, N, BLOCK)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Twin of `reference.rms_norm`, which documents shapes and meanings."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _normalize(x, None, weight, eps, out)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """Twin of `reference.add_rms_norm`."""
    out, total = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    _normalize(x, residual, weight, eps, out, total=total)
    return out, total


def add_rms_norm_fp8(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Twin of `reference.add_rms_norm_fp8`."""
    codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _normalize(x, residual, weight, eps, codes, scale, total)
    return codes, scale, total


def _normalize(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    out: Tensor,
    scale: Tensor | None = None,
    total: Tensor | None = None,
) -> None:
    n = x.shape[-1]
    rows = x.reshape(-1, n)
    added = None if residual is None else residual.reshape(-1, n)
    if rows.stride(1) != 1 or (added is not None and (added.stride(1) != 1 or added.dtype is not x.dtype)):
        raise ValueError("expected rows that are contiguous, and a residual of the dtype of x")
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"expected a residual of the shape of x, {tuple(x.shape)}, got {tuple(residual.shape)}")
    tile, options = tile_of(n)
    launch(
        _rms_norm, (len(rows),),
        rows, added, weight, out, scale, total, eps, rows.stride(0), 0 if added is None else added.stride(0),
        N=n, options=options, **tile,
    )  # fmt: skip


def tile_of(n: int) -> tuple[dict[str, int], dict[str, int]]:
    """Tile and options for rows of n values: 8 to 32 of them per thread, on every GPU."""
    block = min(triton.next_power_of_2(n), 16384)
    return {"BLOCK": block}, {"num_warps": min(max(block // 256, 1), 16)}
