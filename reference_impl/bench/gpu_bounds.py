"""The least bytes and operations of a step of the engine's own model and cache, and the shortest time they take.

A decoding step reads each weight once, except the rows of the embedding that no token looks up, and each request's keys
and values: bytes over the bandwidth of a large copy, measured in the same run. Counted from what is in memory, so
quantized weights count with their scales; `tests/bench/test_gpu_bounds.py` proves the counts from the shapes alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor, nn

from reference_impl.assembly.engine import Engine
from reference_impl.core.linear import Linear
from reference_impl.models.moe import MixtureOfExperts


@dataclass(frozen=True)
class Limits:
    """Of one machine: byte/s of a large copy (read + written), FLOP/s of large products in 16 bits."""

    copy: float
    matrix: float

    def seconds(self, num_bytes: float, flops: float = 0.0) -> float:
        return max(num_bytes / self.copy, flops / self.matrix)


@dataclass(frozen=True)
class Work:
    """The work of one model. Bytes and counts per step or token.

    shared: bytes of weights that every step reads. expert: bytes of one expert; experts, chosen: experts in each of
    `expert_layers`, and those that a token uses. params: those that one token uses, without lm_head (`head`).
    kv: bytes of one token's keys and values, all layers. pair: FLOP of attention for a query and a key, all layers.
    """

    shared: float
    kv: float
    params: float
    head: float
    pair: float
    expert: float = 0.0
    experts: int = 0
    chosen: int = 0
    expert_layers: int = 0

    def weights(self, tokens: int) -> float:
        """Bytes of weights that a step of `tokens` tokens reads; of experts the expected number, if equally likely."""
        if not self.experts:
            return self.shared
        met = self.experts * (1 - (1 - self.chosen / self.experts) ** tokens)
        return self.shared + self.expert_layers * met * self.expert

    def decode_seconds(self, contexts: Sequence[float], limits: Limits) -> float:
        """Seconds of one step in which requests with these numbers of tokens get one more each."""
        n = len(contexts)
        moved = self.weights(n) + self.kv * sum(contexts)
        return limits.seconds(moved, n * 2 * (self.params + self.head) + self.pair * sum(contexts))

    def prefill_flops(self, prompt: int) -> float:
        """FLOP of one prompt in an engine: the output matrix only for its last token."""
        return 2.0 * self.params * prompt + 2.0 * self.head + self.pair * prompt * (prompt + 1) / 2

    def workload_seconds(self, prompts: Sequence[int], outputs: Sequence[int], limits: Limits) -> float:
        """All requests together: first their prefills, as operations, then steps until the longest output is done.

        The first token comes with the prefill; the step that gives token i + 1 reads prompt + i tokens.
        """
        prompt, output = np.array(prompts, dtype=float), np.array(outputs)
        total = sum(self.prefill_flops(n) for n in prompts) / limits.matrix
        for i in range(1, int(output.max())):
            running = prompt[output > i] + i
            total += self.decode_seconds([float(running.mean())] * len(running), limits)
        return total


def work_of(engine: Engine) -> Work:
    """Counted from the tensors that the engine holds. Norms and biases of norms, below 0.02 %, are left out."""
    model, c = engine.model, engine.model.config
    head = model.embedding if model.lm_head is None else model.lm_head
    mixtures = [module for module in model.modules() if isinstance(module, MixtureOfExperts)]
    in_experts = {linear for mixture in mixtures for linear in linears(mixture)}
    shared = [linear for linear in linears(model) if linear not in in_experts]
    num_bytes = nbytes(head) + sum(nbytes(mixture.router) for mixture in mixtures)
    work = Work(
        shared=float(num_bytes + sum(linear_bytes(linear) for linear in shared)),
        kv=float(sum(spec.bytes_per_token for spec in engine.kv_specs)),
        params=float(sum(linear.num_parameters() for linear in shared) + sum(m.router.numel() for m in mixtures)),
        head=float(c.vocab_size * c.hidden_size),
        pair=4.0 * c.num_layers * c.num_heads * c.head_dim,
    )
    if not mixtures or c.experts is None:
        return work
    n = c.experts.num_experts
    inside = [expert_size(mixture) for mixture in mixtures]
    return replace(
        work,
        params=work.params + sum(count for _, count in inside) / n * c.experts.experts_per_token,
        expert=sum(size for size, _ in inside) / n / len(mixtures),
        experts=n, chosen=c.experts.experts_per_token, expert_layers=len(mixtures),
    )  # fmt: skip


def expert_size(mixture: MixtureOfExperts) -> tuple[float, float]:
    """(bytes, parameters) of all experts of a layer, whether each has linear layers or all are in stacked tensors."""
    inside = linears(mixture)
    stacked = [t for t in vars(mixture.experts).values() if isinstance(t, Tensor) and t.ndim == 3]
    num_bytes = sum(linear_bytes(linear) for linear in inside) + sum(nbytes(t) for t in stacked)
    return num_bytes, sum(linear.num_parameters() for linear in inside) + sum(t.numel() for t in stacked)


def linears(module: nn.Module) -> list[Linear]:
    return [part for part in module.modules() if isinstance(part, Linear)]


def linear_bytes(linear: Linear) -> int:
    return sum(nbytes(t) for t in linear.params.values())


def nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.dtype.itemsize
