"""The gates of gated MLPs: SwiGLU and GeGLU (Shazeer 2020).

x = (gate, up) in one row -> act(gate) x up: 2 n values are read and n written, 3 b n bytes with b bytes per value; as
two kernels (activation, product) 5 b n. About 10 FLOPs per value: memory-bound. Values are independent, so a row is
cut into tiles, one program each.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

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
def _act_and_mul(x, out, stride_x, N: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < N
    gate = tl.load(x + row * stride_x + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * stride_x + N + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * N + column, gated(gate, up, GELU).to(out.dtype.element_ty), mask=inside)


def silu_and_mul(x: Tensor) -> Tensor:
    """Twin of `reference.silu_and_mul`, which documents shapes and meanings."""
    return _gate(x, gelu=False)


def gelu_tanh_and_mul(x: Tensor) -> Tensor:
    """Twin of `reference.gelu_tanh_and_mul`."""
    return _gate(x, gelu=True)


def _gate(x: Tensor, gelu: bool) -> Tensor:
    rows, n = rows_of(x)
    out, block = x.new_empty((*x.shape[:-1], n)), min(triton.next_power_of_2(n), 1024)
    grid = (len(rows), -(-n // block))
    launch(_act_and_mul, grid, rows, out, rows.stride(0), N=n, BLOCK=block, GELU=gelu, options={"num_warps": 4})
    return out


def rows_of(x: Tensor) -> tuple[Tensor, int]:
    """x as [rows, 2 n], and n."""
    rows = x.reshape(-1, x.shape[-1])
    if x.shape[-1] % 2 or rows.stride(1) != 1:
        raise ValueError(f"expected contiguous rows of gate and up, an even number, got {x.shape[-1]} values")
    return rows, x.shape[-1] // 2
