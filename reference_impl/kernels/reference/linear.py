"""Products of linear layers in plain torch, with weights in 16, 8 and 4 bits.

Throughout: x [tokens, in], weight [out, in] as checkpoints store it, y = x W^T [tokens, out]. Scales of groups are
[in / group size, out]: entry (g, n) belongs to output n, inputs g x group size and on. One group is "per channel".
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from reference_impl.kernels.reference.rows import to_eight_bits


def gemm(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """y = x W^T + b in the dtype of x and weight; bias [out]. Sums are float32 (in a kernel) or better."""
    return F.linear(x, weight, bias)


def quantize_rows_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """(codes, scale): codes [tokens, in] float8_e4m3fn and scale [tokens] float32, with x about codes x scale.

    A row's largest magnitude becomes 448. x has to be finite.
    """
    return to_eight_bits(x, torch.float8_e4m3fn)


def gemm_fp8(
    codes: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, out_dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """(codes x scale) (weight x weight_scale)^T as out_dtype.

    codes [tokens, in] and weight [out, in] float8_e4m3fn; scale [tokens] and weight_scale [out] float32.
    """
    sums = codes.to(scale.dtype) @ weight.to(scale.dtype).T
    return (sums * scale[:, None] * weight_scale).to(out_dtype)


def pack_int4(codes: Tensor, group_size: int = 128) -> Tensor:
    """codes [out, in], integers 0 to 15 -> [out, in / 2] uint8.

    Within each group the first half lies in the low nibbles, the second half, in the same order, in the high ones: so
    a kernel gets two pieces of the row, each in order, by an `and` and a shift.
    """
    out_features, in_features = codes.shape
    if in_features % group_size or group_size % 2:
        raise ValueError(f"expected groups of an even size that divides in = {in_features}, got {group_size}")
    if codes.numel() and not 0 <= int(codes.min()) <= int(codes.max()) <= 15:
        raise ValueError(f"expected codes 0 to 15, got {int(codes.min())} to {int(codes.max())}")
    low, high = codes.to(torch.uint8).view(out_features, -1, 2, group_size // 2).unbind(2)
    return (low | high << 4).reshape(out_features, in_features // 2)


def unpack_int4(packed: Tensor, group_size: int = 128) -> Tensor:
    """What `pack_int4` packed: [out, in] uint8."""
    nibbles = packed.view(len(packed), -1, group_size // 2)
    return torch.stack((nibbles & 15, nibbles >> 4), 2).reshape(len(packed), -1)


def gemm_w4a16(x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor | None = None, group_size: int = 128) -> Tensor:
    """x W^T with W = (code - zero) x scale of its group; y in the dtype of x.

    packed [out, in / 2] of `pack_int4`; scales [in / group_size, out], any float dtype; zeros like scales, integers 0
    to 15 of any dtype, or None: 8 everywhere (symmetric).
    """
    codes = unpack_int4(packed, group_size).to(x.dtype)
    zero = 8 if zeros is None else _per_input(zeros, x)
    return F.linear(x, (codes - zero) * _per_input(scales, x))


def gemm_w8a16(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """x W^T with W = weight x scale of its group; y in the dtype of x.

    weight [out, in] int8; scales [groups, out], any float dtype: one row per channel, or one for each in / groups
    inputs.
    """
    return F.linear(x, weight.to(x.dtype) * _per_input(scales, x))


def _per_input(groups: Tensor, x: Tensor) -> Tensor:
    """[groups, out] -> [out, in] in the dtype of x."""
    return groups.to(x.dtype).T.repeat_interleave(x.shape[1] // len(groups), 1)
