"""Products in 16 bits on a CPU that cannot multiply them."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from reference_impl.features.cpu.by_rows import WeightByRows
from reference_impl.kernels import reference

FEW_ROWS = 8


class SlowHalfLinear(WeightByRows):
    """y = x W^T + b in 16 bits, for a CPU that cannot multiply them; W [out_features, in_features], as it is stored.

    torch then has a loop for such products, which is good for a few rows and W by rows (for W by columns, ten times
    slower and more). Many rows are faster in float32, though the weight is converted for each product: seen with AVX2
    over the course model's products, 0.6 of the time at 16 rows, 0.4 at 32, and 0.2 at 64. Either way sums are made in
    float32, and rounded once.
    """

    def apply(self, params: dict[str, Tensor], x: Tensor) -> Tensor:
        return slow_half_linear(x, params["weight"], params.get("bias"))


def slow_half_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The product of `SlowHalfLinear`: x [rows, in_features], weight [out_features, in_features] -> [rows,
    out_features]."""
    if len(x) <= FEW_ROWS:
        return F.linear(x, weight, bias)
    y = reference.gemm_widened(x.float(), weight)
    return (y if bias is None else y.add_(bias)).to(x.dtype)
