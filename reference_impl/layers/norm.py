"""RMSNorm in torch: as kernels/reference/rows.py says, with fewer calls where calls are what it costs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from reference_impl.kernels import reference

_FEW = 2048  # numbers; with more than some thousand, twice as many to go through cost more than the calls


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """As `reference.rms_norm`, to rounding.

    On a CPU F.rms_norm is ten operators, and in a step of one request each of them costs more than its arithmetic.
    Layer norm is one. It subtracts the mean, so it is given (x, -x), whose mean is 0: then its variance is mean(x^2).
    """
    if x.device.type != "cpu" or x.numel() > _FEW or (weight is not None and weight.dtype is not x.dtype):
        return reference.rms_norm(x, weight, eps)
    shape = (2, x.shape[-1])
    weights = None if weight is None else weight.expand(shape)
    return F.layer_norm(torch.stack((x, -x), -2), shape, weights, None, eps)[..., 0, :]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """As `reference.add_rms_norm`, to rounding."""
    total = x + residual
    return rms_norm(total, weight, eps), total
