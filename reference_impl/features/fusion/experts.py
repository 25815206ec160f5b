"""Mixtures of experts for Triton's grouped product: extends `ExpertsLayer.make_experts`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from reference_impl.core.linear import Methods
from reference_impl.core.model_config import ModelConfig
from reference_impl.features.fusion.kernels import Kernels, triton_kernels
from reference_impl.models.moe import ExpertsLayer, expert_names


class StackedExperts(nn.Module):
    """All experts' weights in one tensor for each of two products; a row's expert is found on the device.

    gate_up [num_experts, 2 * intermediate_size, hidden_size], down [num_experts, hidden_size, intermediate_size].
    """

    def __init__(self, config: ModelConfig, prefix: str, kernels: Kernels, dtype: torch.dtype, device: torch.device):
        super().__init__()
        assert kernels.grouped_gemm is not None
        assert config.experts is not None
        self.prefix, self.names, self.grouped_gemm = prefix, expert_names(config), kernels.grouped_gemm
        self.gate = kernels.gates[config.activation]
        n, size, hidden = config.experts.num_experts, config.experts.intermediate_size, config.hidden_size
        self.gate_up = torch.empty(n, 2 * size, hidden, dtype=dtype, device=device)
        self.down = torch.empty(n, hidden, size, dtype=dtype, device=device)

    def forward(self, rows: Tensor, offsets: Tensor) -> Tensor:
        """The experts' output, a row for each of rows. rows, offsets: see `grouped_gemm`."""
        return self.grouped_gemm(self.gate(self.grouped_gemm(rows, self.gate_up, offsets)), self.down, offsets)

    def parts(self) -> dict[str, Tensor]:
        """The views of the stacked weights for each matrix: {"experts.number.name" in the checkpoint: view}."""
        (gate, up, down), size, found = self.names, self.down.shape[2], dict[str, Tensor]()
        for expert, (gate_up, out) in enumerate(zip(self.gate_up, self.down, strict=True)):
            matrices = (gate, gate_up[:size]), (up, gate_up[size:]), (down, out)
            found |= {f"experts.{expert}.{name}": matrix for name, matrix in matrices}
        return found


class StackedExpertsLayer(ExpertsLayer):
    def make_experts(self, methods: Methods, dtype: torch.dtype, device: torch.device) -> StackedExperts:
        return StackedExperts(self.config, self.prefix, triton_kernels(), dtype, device)
