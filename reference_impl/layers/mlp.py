"""The gated MLP: down(activation(gate(x)) * up(x)) (GLU variants, Shazeer 2020)."""

from __future__ import annotations

from torch import Tensor, nn

from reference_impl.interfaces import LinearMethod
from reference_impl.kernels.reference import Activation
from reference_impl.layers.backend import TORCH, Kernels
from reference_impl.layers.linear import Linear


class GatedMLP(nn.Module):
    """x [rows, hidden_size] -> the same shape. names: of gate, up and down in the checkpoint."""

    def __init__(
        self,
        method: LinearMethod,
        hidden_size: int,
        intermediate_size: int,
        activation: Activation,
        bias: bool = False,
        names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
        kernels: Kernels = TORCH,
    ):
        super().__init__()
        gate, up, down = names
        parts = {gate: intermediate_size, up: intermediate_size}
        self.gate_up = Linear(method, hidden_size, parts, bias)
        self.down = Linear(method, intermediate_size, {down: hidden_size}, bias)
        self.activation: Activation = activation
        self.gate = kernels.gates[activation]

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.gate(self.gate_up(x)))
