"""Mixture of experts (Shazeer et al. 2017; Mixtral, Jiang et al. 2024; Qwen3-MoE): many MLPs, few of them per token.

    p = softmax(router x);  y = sum over the k experts with the largest p of p_e * expert_e(x)

No expert is ever full, so none drops a token: what a token gets depends on no other token.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reference_impl.interfaces import LinearMethod
from reference_impl.layers.backend import TORCH, Kernels
from reference_impl.layers.mlp import GatedMLP
from reference_impl.model_config import ExpertsConfig, ModelConfig


class MixtureOfExperts(nn.Module):
    """x [num_tokens, hidden_size] -> the same shape. Stands where a layer's MLP would."""

    def __init__(
        self,
        config: ModelConfig,
        experts: ExpertsConfig,
        method: LinearMethod,
        router: Tensor,
        kernels: Kernels = TORCH,
    ):
        super().__init__()
        mixtral = config.architecture == "MixtralForCausalLM"
        names = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
        self.config = experts
        self.router = router  # [num_experts, hidden_size], never quantized: it is small, and its choices are steps
        self.experts = nn.ModuleList(
            GatedMLP(
                method, config.hidden_size, experts.intermediate_size, config.activation, names=names, kernels=kernels
            )
            for _ in range(experts.num_experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        weights, experts = route(F.linear(x, self.router), self.config.experts_per_token, self.config.renormalise)
        order, counts = group_by_expert(experts, self.config.num_experts)
        k = experts.shape[1]
        rows = x[order // k]  # [num_tokens * k, hidden_size], the tokens of expert 0, then of expert 1, ...
        out, start = torch.empty_like(rows), 0
        for expert, count in zip(self.experts, counts, strict=True):
            if count:
                out[start : start + count] = expert(rows[start : start + count])
            start += count
        # Back in the tokens' order. Each token adds its own k rows, the likeliest expert first: no neighbour can change
        # the order of that sum.
        by_token = torch.empty_like(out).index_copy_(0, order, out).view(-1, k, x.shape[1])
        return (by_token * weights[:, :, None]).sum(1).to(x.dtype)


def route(logits: Tensor, experts_per_token: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """(weights, expert numbers), each [num_tokens, experts_per_token], from logits [num_tokens, num_experts].

    Weights are probabilities in float32 or better; renormalise scales those that were chosen to sum to 1.
    """
    probabilities = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    weights, experts = probabilities.topk(experts_per_token, dim=-1)
    return (weights / weights.sum(-1, keepdim=True) if renormalise else weights), experts


def group_by_expert(experts: Tensor, num_experts: int) -> tuple[Tensor, list[int]]:
    """Sorts (token, choice) pairs by expert, a token before later ones.

    experts [num_tokens, k] -> (order [num_tokens * k]: indices token * k + choice; how many each expert gets).
    """
    flat = experts.flatten()
    return flat.argsort(stable=True), flat.bincount(minlength=num_experts).tolist()
