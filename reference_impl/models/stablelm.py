"""StableLM 2 (Bellagente et al. 2024; transformers' models/stablelm/modeling_stablelm.py): LayerNorm, partial rotation.

Its norms subtract the mean and have a bias. Weight and bias lie in one tensor [2, hidden_size], which goes wherever
another family's norm goes: through `normalize`, which is another function here, and through `Fusion`, which then leaves
products by themselves (`FusedDecoder`).
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from reference_impl.core.decoder import Decoder
from reference_impl.models.partial_rotary import PartialRotaryLayer


def layer_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight[0] + weight[1]; weight [2, hidden_size]."""
    assert weight is not None
    return F.layer_norm(x, x.shape[-1:], weight[0], weight[1], eps)


class StableLmLayer(PartialRotaryLayer):
    normalize = staticmethod(layer_norm)

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.input_norm, self.mlp_norm = with_bias(self.input_norm), with_bias(self.mlp_norm)

    def norms(self) -> dict[str, Tensor]:
        return by_name(super().norms())


class StableLmDecoder(Decoder):
    normalize = staticmethod(layer_norm)

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.norm = with_bias(self.norm)

    def norms(self) -> dict[str, Tensor]:
        return by_name(super().norms())


def with_bias(norm: Tensor) -> Tensor:
    return norm.new_empty(2, len(norm))


def by_name(norms: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights and biases apart, by their names in a checkpoint."""
    biases = {name.removesuffix("weight") + "bias": norm[1] for name, norm in norms.items()}
    return {name: norm[0] for name, norm in norms.items()} | biases
