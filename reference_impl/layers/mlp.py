"""The gated MLP: down(activation(gate(x)) * up(x)) (GLU variants, Shazeer 2020)."""

from __future__ import annotations

from torch import Tensor, nn

from reference_impl.kernels.reference import Activation
from reference_impl.layers.backend import TORCH, Kernels
from reference_impl.layers.linear import Linear, Methods


class GatedMLP(nn.Module):
    """x [rows, hidden_size] -> the same shape.

    names: of gate, up and down in the checkpoint, or of gate over up in one matrix, and of down. prefix: what stands
    there before them, such as "model.layers.3.mlp.".
    """

    def __init__(
        self,
        methods: Methods,
        hidden_size: int,
        intermediate_size: int,
        activation: Activation,
        bias: bool = False,
        names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj"),
        kernels: Kernels = TORCH,
        prefix: str = "",
    ):
        super().__init__()
        *inputs, down = names
        parts = dict.fromkeys(inputs, 2 * intermediate_size // len(inputs))
        first, second = f"{prefix}gate_up_proj", f"{prefix}down_proj"
        self.gate_up = Linear(methods(first), hidden_size, parts, bias, first)
        self.down = Linear(methods(second), intermediate_size, {down: hidden_size}, bias, second)
        self.activation: Activation = activation
        self.gate = kernels.gates[activation]

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.gate(self.gate_up(x)))
