"""Experts divided among ranks (expert parallelism, GShard, Lepikhin et al. 2021): each rank has some of them, whole.

All ranks have all tokens, so each routes a part of them. Two all-to-alls: the first sends every (token, expert) row to
the rank that has the expert, the second sends what the expert made of it back. A rank without tokens takes part, too.
Nothing is dropped, however uneven the load: what a token gets depends on no other token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from reference_impl.features.parallel.meeting import Meeting
from reference_impl.features.parallel.shares import Share, divided
from reference_impl.models.moe import Experts, MixtureOfExperts


def divide_tokens(mixture: MixtureOfExperts, shares: Sequence[Share], collectives: Meeting) -> None:
    """Has a layer's mixture route a part of the tokens here, and ask the rank that has an expert. shares: each rank's
    experts; mixture: with those of this rank."""
    mixture.experts = DispatchedExperts(mixture.experts, shares, collectives)
    mixture.register_forward_pre_hook(OwnTokens(collectives))
    mixture.register_forward_hook(AllTokens(collectives))


class OwnTokens:
    """A forward pre-hook: of x [num_tokens, hidden_size] this rank's part."""

    def __init__(self, collectives: Meeting):
        self.rank, self.size = collectives.rank, collectives.size

    def __call__(self, module: Any, inputs: tuple[Tensor]) -> tuple[Tensor]:
        [x] = inputs
        own = divided(len(x), self.size)[self.rank]
        return (x[own.start : own.start + own.length],)


class AllTokens:
    """A forward hook: the parts of all ranks, [num_tokens, hidden_size]."""

    def __init__(self, collectives: Meeting):
        self.collectives = collectives

    def __call__(self, module: Any, inputs: Any, output: Tensor) -> Tensor:
        return torch.cat(self.collectives.all_gather(output))


class DispatchedExperts(torch.nn.Module):
    """All experts of a layer, of which this rank has some (`own`). shares: each rank's."""

    def __init__(self, own: Experts, shares: Sequence[Share], collectives: Meeting):
        super().__init__()
        self.own, self.shares, self.collectives = own, shares, collectives

    def forward(self, rows: Tensor, offsets: Tensor) -> Tensor:
        """The experts' outputs, as many rows. rows, offsets: see `reference.grouped_gemm`."""
        places, counts = offsets.tolist(), offsets.diff()
        ends = [(share.start, share.start + share.length) for share in self.shares]
        received = self.collectives.all_to_all([counts[first:last] for first, last in ends])
        parts = self.collectives.all_to_all([rows[places[first] : places[last]] for first, last in ends])
        # They come by rank, and within a rank by expert; an expert computes its rows of all ranks at once.
        numbers = torch.arange(len(received[0]))
        order = torch.cat([numbers.repeat_interleave(count) for count in received]).argsort(stable=True)
        totals = torch.stack(received).sum(0)
        self.collectives.num_expert_rows += len(order)
        out = self.own(torch.cat(parts)[order], torch.nn.functional.pad(totals.cumsum(0), (1, 0)))
        back = torch.empty_like(out).index_copy_(0, order, out).split([len(part) for part in parts])
        return torch.cat(self.collectives.all_to_all(back))

    def parts(self) -> dict[str, Tensor]:
        return self.own.parts()
