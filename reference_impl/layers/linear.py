"""Linear layers. A LinearMethod decides how the weight is stored and multiplied, so quantization can replace it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reference_impl.interfaces import LinearMethod


class UnquantizedLinear:
    """y = x W^T + b, W [out_features, in_features] as the checkpoint has it."""

    def __init__(self, dtype: torch.dtype, device: torch.device):
        self.dtype, self.device = dtype, device

    def create(self, in_features: int, out_features: int, bias: bool) -> dict[str, Tensor]:
        params = {"weight": torch.empty(out_features, in_features, dtype=self.dtype, device=self.device)}
        if bias:
            params["bias"] = torch.empty(out_features, dtype=self.dtype, device=self.device)
        return params

    def load(self, params: dict[str, Tensor], name: str, tensor: Tensor, start: int) -> None:
        params[name][start : start + tensor.shape[0]].copy_(tensor)

    def apply(self, params: dict[str, Tensor], x: Tensor) -> Tensor:
        return F.linear(x, params["weight"], params.get("bias"))


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
        self.params = method.create(in_features, sum(parts.values()), bias)

    def row_of(self, part: str) -> int:
        """First row of a part in the stacked matrix."""
        names = list(self.parts)
        return sum(self.parts[name] for name in names[: names.index(part)])

    def forward(self, x: Tensor) -> Tensor:
        return self.method.apply(self.params, x)
