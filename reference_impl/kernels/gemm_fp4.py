"""A linear layer with a weight of 4-bit floats (e2m1) and x in 16 bits: y = x W^T, in the two formats that exist.

    NVFP4: a scale for 16 inputs, e4m3, and one for the tensor     4.5 bits per weight
    MXFP4: a scale for 32 inputs, a power of two (e8m0)            4.25 bits per weight
(NVIDIA's Blackwell documentation; OCP Microscaling Formats v1.0.) This EMULATES the format on any GPU of the table:
codes come from memory in 4 bits, become 16-bit numbers in registers, and the matrix units multiply 16 bits. So what is
saved is memory and its traffic, not arithmetic. Blackwell (sm_100) multiplies e2m1 at four times the rate of 16 bits
where x is in 4 bits as well, which this kernel does not do. `theory.hardware` has a peak "fp4" for GPUs with the units.

The halves of a step in low and high nibbles are those of `gemm_w4a16`, which explains them. But a scale belongs to too
few inputs for a step of a product, so scales multiply weights and not sums. A code's 3 bits without the sign, put where
float16 has its exponent and first digit, are the number / 2^14; e4m3 likewise, / 2^8. This is exact: value x scale has
at most 6 significant bits, which either 16-bit format holds, within its range (float16: 2^-24 to 65,504). The tensor's
scale multiplies the sums.

FLOPs: 2 tokens in out. Bytes: in out (4.5 or 4.25) / 8 + 2 tokens (in + out).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

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
from reference_impl.kernels.reference.linear import FP4_STEP

NVFP4_GROUP, MXFP4_GROUP = 16, 32


@triton.jit
def numbers_of_e2m1(nibbles):
    """float32 of codes 0 to 15 in int16: sign, two bits of exponent, one digit."""
    bits = ((nibbles & 8) << 12) | ((nibbles & 7) << 9)
    return bits.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0  # 2^14


@triton.jit
def numbers_of_scales(scales, POWERS: tl.constexpr):
    """float32 of bytes: e8m0 (2^(byte - 127)), or e4m3 without a sign."""
    if POWERS:
        wide = scales.to(tl.int32)
        return tl.where(wide == 0, 0x400000, wide << 23).to(tl.float32, bitcast=True)  # 2^-127 has no exponent of 1
    return (scales.to(tl.int16) << 7).to(tl.float16, bitcast=True).to(tl.float32) * 256.0  # 2^8


@triton.jit
def scaled(nibbles, scale, dtype: tl.constexpr):
    """[N, HALF] numbers in 16 bits: codes times the scales [N, HALF / group] of their groups."""
    N: tl.constexpr = nibbles.shape[0]
    HALF: tl.constexpr = nibbles.shape[1]
    GROUPS: tl.constexpr = scale.shape[1]
    numbers = tl.reshape(numbers_of_e2m1(nibbles), [N, GROUPS, HALF // GROUPS]) * scale[:, :, None]
    return tl.reshape(numbers, [N, HALF]).to(dtype)


@triton.jit(do_not_specialize=["num_tokens"])
def _gemm_fp4(
    x, packed, scales, tensor_scale, out, partial, tickets,
    num_tokens, in_features, out_features, stride_x, stride_packed, stride_out,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, SPLITS: tl.constexpr,
    GROUP: tl.constexpr, POWERS: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = x.dtype.element_ty
    HALF: tl.constexpr = BLOCK_K // 2
    GROUPS: tl.constexpr = HALF // GROUP  # of a half step
    m_tile, n_tile = tile_of_program(num_tokens, out_features, BLOCK_M, BLOCK_N, GROUP_M)
    m = m_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    n = n_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    k, g = tl.arange(0, HALF), tl.arange(0, GROUPS)
    in_x, in_out = (m < num_tokens)[:, None], (n < out_features)[:, None]
    at_x = x + m.to(tl.int64)[:, None] * stride_x + k[None, :]
    at_packed = packed + n.to(tl.int64)[:, None] * stride_packed + k[None, :]
    at_scales = scales + n.to(tl.int64)[:, None] * (in_features // GROUP) + g[None, :]
    first, end = steps_of_split(in_features // BLOCK_K)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for step in range(first, end):
        codes = tl.load(at_packed + step * HALF, mask=in_out, other=0).to(tl.int16)
        x_low = tl.load(at_x + step * BLOCK_K, mask=in_x, other=0.0)  # [M, HALF]
        x_high = tl.load(at_x + step * BLOCK_K + HALF, mask=in_x, other=0.0)
        low_scale = tl.load(at_scales + step * 2 * GROUPS, mask=in_out, other=0)  # [N, GROUPS]
        high_scale = tl.load(at_scales + step * 2 * GROUPS + GROUPS, mask=in_out, other=0)
        low = scaled(codes & 15, numbers_of_scales(low_scale, POWERS), dtype)
        high = scaled(codes >> 4, numbers_of_scales(high_scale, POWERS), dtype)
        acc = tl.dot(low, tl.trans(x_low), acc)  # [N, M]
        acc = tl.dot(high, tl.trans(x_high), acc)
    if tensor_scale is not None:
        acc *= tl.load(tensor_scale + n, mask=n < out_features, other=0.0)[:, None]
    write_tile(tl.trans(acc), None, out, partial, tickets, m_tile, n_tile, num_tokens, out_features, stride_out, SPLITS)


TILES = (
    Tile(64, 64, FP4_STEP, 4, 3, weight_bytes=0.5),
    Tile(16, 64, FP4_STEP, 4, 4, weight_bytes=0.5),
)


def gemm_fp4(
    x: Tensor, packed: Tensor, scales: Tensor, tensor_scale: Tensor | None = None, *, tile: Tile | None = None
) -> Tensor:
    """Twin of `reference.gemm_fp4`, which documents shapes and meanings. x in 16 bits.

    tile: by default the one that `choose` returns.
    """
    (num_tokens, in_features), out_features = x.shape, len(packed)
    check_operands(x, packed, in_features // 2)
    powers = tensor_scale is None
    group = MXFP4_GROUP if powers else NVFP4_GROUP
    if x.element_size() != 2 or in_features % FP4_STEP:
        raise ValueError(f"expected x in 16 bits and a multiple of {FP4_STEP} inputs, got {x.dtype} and {in_features}")
    if (
        scales.shape != (out_features, in_features // group)
        or scales.dtype is not torch.uint8
        or not scales.is_contiguous()
        or (tensor_scale is not None and tensor_scale.shape != (out_features,))
    ):
        raise ValueError(
            f"expected scales [out, in / {group}] = {[out_features, in_features // group]}, uint8, contiguous, and "
            f"tensor scales [{out_features}] of NVFP4 only, got {list(scales.shape)}, {scales.dtype}, and "
            f"{None if tensor_scale is None else list(tensor_scale.shape)}"
        )
    tile = tile or choose(TILES, num_tokens, out_features, architecture())
    out = x.new_empty((num_tokens, out_features))
    if num_tokens:
        grid = grid_of(tile, num_tokens, out_features, in_features, architecture())
        launch(
            _gemm_fp4, grid,
            x, packed, scales, tensor_scale, out, *room_for(grid, out),
            num_tokens, in_features, out_features, x.stride(0), packed.stride(0), out.stride(0),
            GROUP=group, POWERS=powers, options=tile.options, **tile.constants,
        )  # fmt: skip
    return out
