"""Weights of linear layers in memory as checkpoints store them."""

from __future__ import annotations

import torch
from torch import Tensor

CPU = torch.device("cpu")


class WeightByRows:
    """What is common to methods that take the weight as checkpoints store it: [out_features, in_features]."""

    def __init__(self, dtype: torch.dtype, device: torch.device = CPU):
        self.dtype, self.device = dtype, device

    def create(self, in_features: int, out_features: int, bias: bool) -> dict[str, Tensor]:
        params = {"weight": torch.empty(out_features, in_features, dtype=self.dtype, device=self.device)}
        if bias:
            params["bias"] = torch.empty(out_features, dtype=self.dtype, device=self.device)
        return params

    def load(self, params: dict[str, Tensor], name: str, tensor: Tensor, start: int) -> None:
        params[name][start : start + tensor.shape[0]].copy_(tensor)

    def finish(self, params: dict[str, Tensor]) -> None:
        pass
