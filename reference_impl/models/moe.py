"""Mixture of experts (Shazeer et al. 2017; Mixtral, Jiang et al. 2024; Qwen3-MoE): many MLPs, few of them per token.

    p = softmax(router x);  y = sum over the k experts with the largest p of p_e * expert_e(x)

No expert is ever full, so none drops a token: what a token gets depends on no other token.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reference_impl.core.decoder import DecoderLayer, GatedMLP
from reference_impl.core.linear import Methods
from reference_impl.core.model_config import ExpertsConfig, ModelConfig


class Experts(Protocol):
    """All experts of a layer, as one function."""

    def __call__(self, rows: Tensor, offsets: Tensor) -> Tensor:
        """The experts' outputs, as many rows. rows, offsets: see `reference.grouped_gemm`."""
        ...

    def parts(self) -> dict[str, Tensor]:
        """What stands in no `Linear`, by its name in the checkpoint: {"experts.3.up_proj": where that matrix lies}."""
        ...


class ExpertsLayer(DecoderLayer):
    """A layer with experts, if it is one of those that have them, instead of one MLP."""

    def make_mlp(self, methods: Methods, dtype: torch.dtype, device: torch.device) -> nn.Module:
        c = self.config
        if c.experts is None or self.index not in c.experts.layers:
            return super().make_mlp(methods, dtype, device)
        router = torch.empty(c.experts.num_experts, c.hidden_size, dtype=dtype, device=device)
        return MixtureOfExperts(c.experts, router, self.make_experts(methods, dtype, device), self.prefix)

    def make_experts(self, methods: Methods, dtype: torch.dtype, device: torch.device) -> Experts:
        return SeparateExperts(self.config, methods, self.prefix)

    @property
    def prefix(self) -> str:
        return experts_prefix(self.config, self.index)

    def num_parameters(self) -> int:
        own = self.mlp.num_parameters() if isinstance(self.mlp, MixtureOfExperts) else 0
        return super().num_parameters() + own


class MixtureOfExperts(nn.Module):
    """A mixture of experts, which stands where a layer's MLP would: x [num_tokens, hidden_size] -> the same shape.

    prefix: what stands before the names of its tensors in the checkpoint, such as "model.layers.3.mlp.".
    """

    def __init__(self, config: ExpertsConfig, router: Tensor, experts: Experts, prefix: str):
        super().__init__()
        self.config, self.prefix, self.experts = config, prefix, experts
        self.router = router  # [num_experts, hidden_size], never quantized: it is small, and its choices are steps
        self._numbers = torch.arange(config.num_experts + 1, device=router.device)

    def forward(self, x: Tensor) -> Tensor:
        weights, experts = route(F.linear(x, self.router), self.config.experts_per_token, self.config.renormalise)
        order, offsets = group_by_expert(experts, self._numbers)
        k = experts.shape[1]
        # [num_tokens * k, hidden_size], the tokens of expert 0, then of expert 1, ...
        out = self.experts(x[order // k], offsets)
        # Back in the tokens' order. Each token adds its own k rows, the likeliest expert first: no neighbour can change
        # the order of that sum.
        by_token = torch.empty_like(out).index_copy_(0, order, out).view(len(x), k, x.shape[1])
        return (by_token * weights[:, :, None]).sum(1).to(x.dtype)

    def tensors(self) -> dict[str, Tensor]:
        """{name in the checkpoint, below `prefix`: weight} of what stands in no linear layer."""
        return {"gate": self.router, **self.experts.parts()}

    def num_parameters(self) -> int:
        """Parameters that stand in no linear layer."""
        return sum(weight.numel() for weight in self.tensors().values())


class SeparateExperts(nn.ModuleList):
    """Experts with linear layers of their own, packed or quantized like any other: for the CPU.

    The host must know how many rows each expert has: on a GPU it would wait for that in every layer.
    """

    def __init__(self, config: ModelConfig, methods: Methods, prefix: str):
        assert config.experts is not None
        size, (gate, up, down) = config.experts.intermediate_size, expert_names(config)
        super().__init__()
        for e in range(config.experts.num_experts) if config.experts.own is None else config.experts.own:
            expert = GatedMLP(config, size, methods, f"{prefix}experts.{e}.")
            expert.gate_up.parts, expert.down.parts = {gate: size, up: size}, {down: config.hidden_size}
            self.append(expert)

    def forward(self, rows: Tensor, offsets: Tensor) -> Tensor:
        """The experts' outputs, as many rows. rows, offsets: see `grouped_gemm`."""
        out = torch.empty_like(rows)
        for expert, (start, end) in zip(self, itertools.pairwise(offsets.tolist()), strict=True):
            if start < end:
                out[start:end] = expert(rows[start:end])
        return out

    def parts(self) -> dict[str, Tensor]:
        return {}


def expert_names(config: ModelConfig) -> tuple[str, str, str]:
    """Names of an expert's gate, up and down in the checkpoint."""
    return ("w1", "w3", "w2") if _is_mixtral(config) else ("gate_proj", "up_proj", "down_proj")


def experts_prefix(config: ModelConfig, layer: int) -> str:
    """What stands before the names of a layer's router and experts in the checkpoint."""
    return f"model.layers.{layer}.{'block_sparse_moe' if _is_mixtral(config) else 'mlp'}."


def expert_layers(config: ModelConfig) -> Iterator[str]:
    """Names of the experts' linear layers, as if each expert had its own."""
    if config.experts is not None:
        for layer, e in itertools.product(sorted(config.experts.layers), range(config.experts.num_experts)):
            yield from (f"{experts_prefix(config, layer)}experts.{e}.{name}" for name in ("gate_up_proj", "down_proj"))


def _is_mixtral(config: ModelConfig) -> bool:
    return config.architecture == "MixtralForCausalLM"


def route(logits: Tensor, experts_per_token: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """(weights, expert numbers), each [num_tokens, experts_per_token], from logits [num_tokens, num_experts].

    Weights are probabilities in float32 or better; renormalise scales those that were chosen to sum to 1.
    """
    probabilities = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    weights, experts = probabilities.topk(experts_per_token, dim=-1)
    return (weights / weights.sum(-1, keepdim=True) if renormalise else weights), experts


def group_by_expert(experts: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Sorts (token, choice) pairs by expert, a token before later ones; the host does not learn the result.

    experts [num_tokens, k]; numbers: 0 ... num_experts. -> (order [num_tokens * k]: indices token * k + choice; offsets
    [num_experts + 1] int32: expert e's are order[offsets[e] : offsets[e + 1]]).
    """
    grouped, order = experts.flatten().sort(stable=True)
    return order, torch.searchsorted(grouped, numbers, out_int32=True)
