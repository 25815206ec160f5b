"""The least bytes and operations of a step of the engine's own model and cache, and the shortest time they take.

A decoding step reads each weight once, except the rows of the embedding that no token looks up, and each request's keys
and values: bytes over the bandwidth of a large copy, measured in the same run. Counted from what is in memory, so
quantized weights count with their scales; `tests/bench/test_gpu_bounds.py` proves the counts from the shapes alone.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from reference_impl.assembly.engine import Engine
from reference_impl.core.linear import Linear
from reference_impl.models.moe import MixtureOfExperts
from reference_impl.theory.speculative import experts_touched


@dataclass(frozen=True)
class Limits:
    """Limits of one machine: byte/s of a large copy (read + written), FLOP/s of large products in 16 bits."""

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
        return self.shared + self.expert_layers * self.expert * experts_touched(self.experts, self.chosen, tokens)

    def decode_seconds(self, contexts: Sequence[float], limits: Limits) -> float:
        """Seconds of one step in which requests with these numbers of tokens get one more each."""
        n = len(contexts)
        moved = self.weights(n) + self.kv * sum(contexts)
        return limits.seconds(moved, n * 2 * (self.params + self.head) + self.pair * sum(contexts))

    def prefill_flops(self, prompt: int) -> float:
        """FLOP of one prompt in an engine: the output matrix only for its last token."""
        return 2.0 * self.params * prompt + 2.0 * self.head + self.pair * prompt * (prompt + 1) / 2

    def workload_seconds(self, prompts: Sequence[int], outputs: Sequence[int], limits: Limits) -> float:
        """Seconds of all requests: first their prefills, as operations, then steps until the longest output is done.

        The first token comes with the prefill; the step that gives token i + 1 reads prompt + i tokens.
        """
        prompt, output = np.array(prompts, dtype=float), np.array(outputs)
        total = sum(self.prefill_flops(n) for n in prompts) / limits.matrix
        for i in range(1, int(output.max())):
            running = prompt[output > i] + i
            total += self.decode_seconds([float(running.mean())] * len(running), limits)
        return total


def work_of(engine: Engine) -> Work:
    """The work of an engine's model, counted from its tensors. Norms and biases of norms, below 0.02 %, are left
    out."""
    model, c = engine.model, engine.model.config
    head = model.embedding if model.lm_head is None else model.lm_head
    mixtures = [module for module in model.modules() if isinstance(module, MixtureOfExperts)]
    inside = {module for mixture in mixtures for module in mixture.modules() if isinstance(module, Linear)}
    stacked = [matrix for mixture in mixtures for matrix in mixture.experts.parts().values()]
    shared, params = _size([linear for linear in model.linears() if linear not in inside], [m.router for m in mixtures])
    in_experts, expert_params = _size(inside, stacked)
    experts, chosen = (c.experts.num_experts, c.experts.experts_per_token) if c.experts else (0, 0)
    return Work(
        shared=shared + head.nbytes,
        kv=float(sum(spec.bytes_per_token for spec in engine.kv_specs)),
        params=params + expert_params * chosen / max(1, experts),
        head=float(c.vocab_size * c.hidden_size),
        pair=4.0 * c.num_layers * c.num_heads * c.head_dim,
        expert=in_experts / max(1, experts * len(mixtures)),
        experts=experts, chosen=chosen, expert_layers=len(mixtures),
    )  # fmt: skip


def _size(linears: Collection[Linear], tensors: Sequence[Tensor]) -> tuple[float, float]:
    """(bytes, parameters) of all these linear layers and tensors."""
    num_bytes = sum(linear.weight_bytes() for linear in linears) + sum(tensor.nbytes for tensor in tensors)
    return num_bytes, sum(linear.num_parameters() for linear in linears) + sum(tensor.numel() for tensor in tensors)
