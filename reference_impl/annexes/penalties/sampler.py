"""Penalties for a sampler that is called with logits and requests, and counts each text anew."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from reference_impl.annexes.penalties.counts import TokenCounts, has_penalties, penalised
from reference_impl.interfaces import Asking, Sampled
from reference_impl.sampling.sampler import TorchSampler


class PenalisingSampler(TorchSampler):
    """`TorchSampler`, and any class beside it, that takes requests with penalties. Extends the call."""

    def __call__(self, logits: Tensor, requests: Sequence[Asking]) -> Sampled:
        return self.sampled(logits, apply_penalties(logits, requests), requests)


def apply_penalties(logits: Tensor, requests: Sequence[Asking]) -> Tensor:
    """Repetition (CTRL, Keskar et al. 2019), presence and frequency penalties; a new tensor where any is set."""
    counts = TokenCounts(logits.device)
    for place, request in enumerate(requests):
        if has_penalties(request.sampling):
            counts.open(place, request.tokens, request.num_prompt_tokens)
    penalties = counts.of(range(len(requests)), [r.sampling for r in requests])
    return logits if penalties is None else penalised(logits, penalties)
