"""SwiGLU with the result in FP8 and a scale for each row, for an FP8 product that comes next.

2 b + 1 bytes per value, with b bytes of each value read; 3 b + b + 1 if a separate kernel quantizes. A row shares a
scale, so one program computes the row. Its first tile (16,384 values) stays in registers; the part of a longer row
beyond it is read again, from the L2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from reference_impl.kernels.eight_bits import encoded, magnitude, scale_of
from reference_impl.kernels.gates import gated, rows_of
from reference_impl.kernels.launch import launch


@triton.jit
def _gated(x, column, N: tl.constexpr, GELU: tl.constexpr):
    """At these columns, float32."""
    inside = column < N
    gate = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + N + column, mask=inside, other=0.0).to(tl.float32)
    return gated(gate, up, GELU)


@triton.jit
def _act_and_mul_fp8(x, codes, scale, stride_x, N: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x += row * stride_x
    codes += row * N
    column = tl.arange(0, BLOCK)
    first = _gated(x, column, N, GELU)
    largest = magnitude(first)
    for start in range(BLOCK, N, BLOCK):
        largest = tl.maximum(largest, magnitude(_gated(x, start + column, N, GELU)))
    row_scale = scale_of(tl.max(largest, 0), tl.float8e4nv)
    inverse = tl.div_rn(1.0, row_scale)
    tl.store(scale + row, row_scale)
    tl.store(codes + column, encoded(first * inverse, tl.float8e4nv), mask=column < N)
    for start in range(BLOCK, N, BLOCK):
        y = _gated(x, start + column, N, GELU) * inverse
        tl.store(codes + start + column, encoded(y, tl.float8e4nv), mask=start + column < N)


def silu_and_mul_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Twin of `reference.silu_and_mul_fp8`."""
    rows, n = rows_of(x)
    codes = torch.empty((*x.shape[:-1], n), dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    block = min(triton.next_power_of_2(n), 16384)
    options = {"num_warps": min(max(block // 256, 1), 16)}
    launch(
        _act_and_mul_fp8, (len(rows),), rows, codes, scale, rows.stride(0),
        N=n, BLOCK=block, GELU=False, options=options,
    )  # fmt: skip
    return codes, scale
