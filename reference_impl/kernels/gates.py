"""The gates of gated MLPs: SwiGLU and GeGLU (Shazeer 2020), and SwiGLU with the result in FP8.

x = (gate, up) in one row -> act(gate) x up: 2 n values are read and n written, 3 b n bytes with b bytes per value; as
two kernels (activation, product) 5 b n. FP8: 2 b + 1 bytes per value, 3 b + b + 1 if a separate kernel quantizes. About
10 FLOPs per value: memory-bound.

Values are independent, so a row is cut into tiles. In FP8 a row shares a scale, so one program does the row, the first
tile (of 16,384) in registers; the part of a longer row beyond it is read again, from the L2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from reference_impl.kernels.eight_bits import encoded, scale_of
from reference_impl.kernels.launch import launch


@triton.jit
def gated(gate, up, GELU: tl.constexpr):
    """act(gate) x up in float32. silu(g) = g sigmoid(g). gelu(g) by tanh: 1 + tanh(u) = 2 sigmoid(2 u), so
    g/2 (1 + tanh(u)) = g sigmoid(2 u), with u = sqrt(2 / pi) (g + 0.044715 g^3)."""
    slope = gate
    if GELU:
        slope = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)  # 2 sqrt(2 / pi)
    return gate * tl.sigmoid(slope) * up


@triton.jit
def _gated(x, column, N: tl.constexpr, GELU: tl.constexpr):
    """At these columns, float32."""
    inside = column < N
    gate = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + N + column, mask=inside, other=0.0).to(tl.float32)
    return gated(gate, up, GELU)


@triton.jit
def _act_and_mul(x, out, stride_x, N: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    y = _gated(x + row * stride_x, column, N, GELU)
    tl.store(out + row * N + column, y.to(out.dtype.element_ty), mask=column < N)


@triton.jit
def _act_and_mul_fp8(x, codes, scale, stride_x, N: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x += row * stride_x
    codes += row * N
    column = tl.arange(0, BLOCK)
    first = _gated(x, column, N, GELU)
    largest = tl.abs(first)
    for start in range(BLOCK, N, BLOCK):
        largest = tl.maximum(largest, tl.abs(_gated(x, start + column, N, GELU)))
    row_scale = scale_of(tl.max(largest, 0), tl.float8e4nv)
    inverse = tl.div_rn(1.0, row_scale)
    tl.store(scale + row, row_scale)
    tl.store(codes + column, encoded(first * inverse, tl.float8e4nv), mask=column < N)
    for start in range(BLOCK, N, BLOCK):
        y = _gated(x, start + column, N, GELU) * inverse
        tl.store(codes + start + column, encoded(y, tl.float8e4nv), mask=start + column < N)


def silu_and_mul(x: Tensor) -> Tensor:
    """Twin of `reference.silu_and_mul`, which documents shapes and meanings."""
    return _gate(x, gelu=False)


def gelu_tanh_and_mul(x: Tensor) -> Tensor:
    """Twin of `reference.gelu_tanh_and_mul`."""
    return _gate(x, gelu=True)


def silu_and_mul_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Twin of `reference.silu_and_mul_fp8`."""
    rows, n = _rows(x)
    codes = torch.empty((*x.shape[:-1], n), dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    block = min(triton.next_power_of_2(n), 16384)
    options = {"num_warps": min(max(block // 256, 1), 16)}
    launch(
        _act_and_mul_fp8, (len(rows),), rows, codes, scale, rows.stride(0),
        N=n, BLOCK=block, GELU=False, options=options,
    )  # fmt: skip
    return codes, scale


def _gate(x: Tensor, gelu: bool) -> Tensor:
    rows, n = _rows(x)
    out = torch.empty((*x.shape[:-1], n), dtype=x.dtype, device=x.device)
    block = min(triton.next_power_of_2(n), 1024)
    grid = (len(rows), -(-n // block))
    launch(_act_and_mul, grid, rows, out, rows.stride(0), N=n, BLOCK=block, GELU=gelu, options={"num_warps": 4})
    return out


def _rows(x: Tensor) -> tuple[Tensor, int]:
    """x as [rows, 2 n], and n."""
    rows = x.reshape(-1, x.shape[-1])
    if x.shape[-1] % 2 or rows.stride(1) != 1:
        raise ValueError(f"expected contiguous rows of gate and up, an even number, got {x.shape[-1]} values")
    return rows, x.shape[-1] // 2
