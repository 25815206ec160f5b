"""Linear layers. A LinearMethod decides how the weight is stored and multiplied, so quantization can replace it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from reference_impl.interfaces import LinearMethod
from reference_impl.layers import packed_linear


class UnquantizedLinear:
    """y = x W + b with W [in_features, out_features]: the checkpoint's matrix turned over.

    A few rows times W then walk memory in order: for 1 to 4 rows of float32 on one CPU thread, 1.4 to 1.8 times as
    fast as F.linear over the course model's products.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device):
        self.dtype, self.device = dtype, device

    def create(self, in_features: int, out_features: int, bias: bool) -> dict[str, Tensor]:
        params = {"weight": torch.empty(in_features, out_features, dtype=self.dtype, device=self.device)}
        if bias:
            params["bias"] = torch.empty(out_features, dtype=self.dtype, device=self.device)
        return params

    def load(self, params: dict[str, Tensor], name: str, tensor: Tensor, start: int) -> None:
        params[name].t()[start : start + tensor.shape[0]].copy_(tensor)  # .t() of a bias is the bias

    def finish(self, params: dict[str, Tensor]) -> None:
        pass

    def apply(self, params: dict[str, Tensor], x: Tensor) -> Tensor:
        if "bias" in params:
            return torch.addmm(params["bias"], x, params["weight"])
        return torch.mm(x, params["weight"])


def default_method(dtype: torch.dtype, device: torch.device) -> LinearMethod:
    """Packed weights where the CPU has them, plain ones elsewhere; the numbers agree to rounding."""
    if device.type == "cpu" and packed_linear.available(dtype):
        return packed_linear.PackedLinear(dtype)
    return UnquantizedLinear(dtype, device)


class Linear(nn.Module):
    """A linear layer made of one or more of the checkpoint's, stacked by rows (q, k, v; gate, up).

    One large matrix multiplication instead of three small ones reads x once and launches once.
    parts: {name in the checkpoint: its number of rows}.
    """

    def __init__(
        self,
        method: LinearMethod,
        in_features: int,
        parts: dict[str, int],
        bias: bool = False,
    ):
        super().__init__()
        self.method, self.parts, self.in_features = method, parts, in_features
        self.out_features = sum(parts.values())
        self.params = method.create(in_features, self.out_features, bias)

    def num_parameters(self) -> int:
        return self.out_features * (self.in_features + ("bias" in self.params))

    def row_of(self, part: str) -> int:
        """First row of a part in the stacked matrix."""
        names = list(self.parts)
        return sum(self.parts[name] for name in names[: names.index(part)])

    def forward(self, x: Tensor) -> Tensor:
        return self.method.apply(self.params, x)
