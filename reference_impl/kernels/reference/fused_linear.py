"""A linear layer fused with its neighbours, in plain torch, rounded where the kernel rounds."""

from __future__ import annotations

import torch
from torch import Tensor

from reference_impl.kernels.reference.linear import unpack_int4
from reference_impl.kernels.reference.rows import GATES, Activation


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
    weight = codes * scales.to(wide).T.repeat_interleave(group_size, 1)
    return fused_linear(x, weight, bias, norm=norm, eps=eps, gate=gate, residual=residual)
