"""Products of linear layers in plain torch, with weights in 16, 8 and 4 bits, alone or fused with their neighbours and
rounded where the kernels round.

Throughout: x [tokens, in], weight [out, in] as checkpoints store it, y = x W^T [tokens, out]. Scales of groups are
[in / group size, out]: entry (g, n) belongs to output n, inputs g x group size and on. One group is "per channel".
An output with an infinite or NaN scale of a group or block is NaN.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from reference_impl.kernels.reference.rows import GATES, Activation, to_eight_bits

GROUP = 128  # inputs that share a scale of x, and rows and columns of a weight's block, in `gemm_fp8_blocks`
FP4_STEP = 64  # inputs whose codes `gemm_fp4` finds in two halves: `pack_int4(codes, FP4_STEP)`
_AT_ONCE, _PART = 1 << 22, 1 << 20  # values of W that `gemm_widened` converts together: of a smaller W, of a larger one
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # what codes 0 to 7 stand for; 8 to 15 are these with a minus


def gemm(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """y = x W^T + b in the dtype of x and weight; bias [out]. Sums are float32 (in a kernel) or better."""
    return F.linear(x, weight, bias)


def quantize_rows_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """(codes, scale): codes [tokens, in] float8_e4m3fn and scale [tokens] float32, with x about codes x scale.

    A row's largest magnitude becomes 448. In a row with NaN or infinity the scale is NaN and the codes may be any.
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
    """The codes that `pack_int4` packed: [out, in] uint8."""
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


def gemm_widened(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T in the dtype of x, float32 or float64, W [out, in] in fewer bits.

    A large W is converted in parts, into memory that stays in a CPU's cache: page faults of fresh memory for all of it
    took three quarters of the time of a product with 49152 x 576 (16 rows, AVX2: 102 ms, in parts 26).
    """
    if weight.numel() <= _AT_ONCE:
        return F.linear(x, weight.to(x.dtype))
    y = x.new_empty(len(x), len(weight))
    wide = x.new_empty(max(1, _PART // weight.shape[1]), weight.shape[1])
    for columns, rows in zip(y.split(len(wide), 1), weight.split(len(wide)), strict=True):
        columns.copy_(F.linear(x, wide[: len(rows)].copy_(rows)))
    return y


def quantize_rows_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """(codes, scale): codes [tokens, in] int8 and scale [tokens] float32, with x about codes x scale.

    A row's largest magnitude (at least 2^-64) becomes 127.5, as in compressed-tensors; codes end at -128 and 127. So an
    error is at most half a scale. In a row with NaN or infinity the scale is NaN and the codes may be any.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    largest = wide.abs().amax(1)
    scale = (largest.clamp(min=2.0**-64) / 127.5).masked_fill(~largest.isfinite(), torch.nan)
    codes = (wide / scale[:, None]).round().clamp(-128, 127)
    return codes.to(torch.int8), scale.float()


def gemm_w8a8(
    codes: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, out_dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """(codes x scale) (weight x weight_scale)^T as out_dtype.

    codes [tokens, in] and weight [out, in] int8; scale [tokens] and weight_scale [out] float32. The sums of codes are
    exact in float64. This twin is for checking: a GPU has no fast product of float64 codes.
    """
    sums = codes.double() @ weight.double().T
    return (sums * scale[:, None] * weight_scale).to(out_dtype)


def quantize_groups_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """(codes, scale): codes [tokens, in] float8_e4m3fn, scale [tokens, ceil(in / 128)] float32, one per 128 inputs.

    The largest magnitude of a group becomes 448. With NaN or infinity its scale is NaN, its codes may be any.
    """
    missing = -x.shape[1] % GROUP
    codes, scale = to_eight_bits(F.pad(x, (0, missing)).unflatten(1, (-1, GROUP)), torch.float8_e4m3fn)
    return codes.flatten(1)[:, : x.shape[1]].contiguous(), scale


def gemm_fp8_blocks(
    codes: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, out_dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """The product of what codes and weight stand for, as out_dtype.

    codes [tokens, in] and weight [out, in] float8_e4m3fn; scale [tokens, in / 128] and weight_scale [out / 128,
    in / 128] float32, each rounded up.
    """
    rows, inputs = weight.shape
    blocks = _finite_or_nan(weight_scale).repeat_interleave(GROUP, 0)[:rows].repeat_interleave(GROUP, 1)[:, :inputs]
    x = codes.to(scale.dtype) * scale.repeat_interleave(GROUP, 1)[:, :inputs]
    return (x @ (weight.to(scale.dtype) * blocks).T).to(out_dtype)


def gemm_fp4(x: Tensor, packed: Tensor, scales: Tensor, tensor_scale: Tensor | None = None) -> Tensor:
    """x W^T with W = value of the code x scale of its group (x tensor_scale of its output); y in the dtype of x.

    packed [out, in / 2] of `pack_int4(codes, 64)`, codes of e2m1: 8 for a minus, and the place among `E2M1`. NVFP4:
    scales [out, in / 16] bytes of e4m3, never negative or NaN, with tensor_scale [out] float32. MXFP4: scales [out,
    in / 32] bytes of e8m0, 2^(byte - 127) with bytes up to 254, and no tensor_scale. in is a multiple of 64.
    """
    values = torch.tensor((*E2M1, *(-value for value in E2M1)), device=x.device, dtype=torch.float32)
    numbers = values[unpack_int4(packed, FP4_STEP).int()]
    if tensor_scale is None:
        factors = torch.ldexp(torch.ones_like(scales, dtype=torch.float32), scales.int() - 127)
    else:
        factors = scales.view(torch.float8_e4m3fn).float()
    weight = (numbers * factors.repeat_interleave(numbers.shape[1] // scales.shape[1], 1)).to(x.dtype)
    wide = torch.promote_types(x.dtype, torch.float32)
    y = F.linear(x.to(wide), weight.to(wide))
    return (y if tensor_scale is None else y * tensor_scale).to(x.dtype)


def _per_input(groups: Tensor, x: Tensor) -> Tensor:
    """Scales of groups for each input: [groups, out] -> [out, in] in the dtype of x. NaN for one that is infinite."""
    groups = groups.to(x.dtype)
    return _finite_or_nan(groups).T.repeat_interleave(x.shape[1] // len(groups), 1)


def _finite_or_nan(scales: Tensor) -> Tensor:
    """What an infinite scale stands for are infinities of both signs, and NaN where a code is zero: no sum is a
    number, but for codes of one sign."""
    return scales + (scales - scales)


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
) -> Tensor:
    """residual + gate(rms_norm(x) W^T + b) in the dtype of x: [tokens, out]. What is None is left out.

    x [tokens, in]; weight [rows, in], rows = out, or with a gate 2 out: first those of gate, then those of up; bias
    [rows]; norm [in], of any float dtype; residual [tokens, out] of the dtype of x. A weight of int8 or float8_e4m3fn
    has scales, weight_scale [rows] of any float dtype: W = weight x scale of its row.

    Two things are rounded to the dtype of x: x times norm, before the product, and the result. All between is float32
    (or wider): the row's factor 1 / sqrt(mean(x^2) + eps), which multiplies the sums; bias, gate, residual. In float16,
    the products of x and the norm's weights must lie within its range: they are not yet divided by the row's size.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    h = x
    if norm is not None:
        h = (x.to(wide) * norm.to(wide)).to(x.dtype)
    y = h.to(wide) @ weight.to(wide).T
    if weight_scale is not None:
        y = y * weight_scale.to(wide)
    if norm is not None:
        y = y * torch.rsqrt(x.to(wide).square().mean(-1, keepdim=True) + eps)
    if bias is not None:
        y = y + bias.to(wide)
    if gate is not None:
        y = GATES[gate](y)
    if residual is not None:
        y = y + residual.to(wide)
    return y.to(x.dtype)


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
) -> Tensor:
    """`fused_linear` with a weight of 4 bits: packed [rows, in / 2] of `pack_int4`, scales and zeros [in / group size,
    rows] as in `gemm_w4a16`."""
    wide = torch.promote_types(x.dtype, torch.float32)
    group_size = x.shape[1] // len(scales)
    zero = 8 if zeros is None else zeros.to(wide).T.repeat_interleave(group_size, 1)
    codes = unpack_int4(packed, group_size).to(wide) - zero
    weight = codes * _finite_or_nan(scales.to(wide)).T.repeat_interleave(group_size, 1)
    return fused_linear(x, weight, bias, norm=norm, eps=eps, gate=gate, residual=residual)
