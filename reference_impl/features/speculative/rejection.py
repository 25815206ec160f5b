"""Lossless verification of drafts by rejection (Leviathan et al. 2023, "Fast Inference from Transformers via
Speculative Decoding"; Chen et al. 2023), for requests without a seed of their own.

    the draft token x was drawn from q; the target's distribution there is p
    keep x with probability min(1, p(x) / q(x));  otherwise draw y from max(p - q, 0) / sum  in its place

Why each token comes out as if drawn from p:
    1. y is drafted and kept with probability q(y) min(1, p(y) / q(y)) = min(p(y), q(y)).
    2. So a draft token is rejected with probability 1 - sum min(p, q) = sum max(p - q, 0), since p sums to 1.
    3. That is the sum which the draw in its place divides by: y comes out so with probability max(p(y) - q(y), 0).
    4. Both together: min(p, q) + max(p - q, 0) = p.
    5. Behind the first rejection all is dropped; before it each p was that of the kept text; so texts are those of p.

Drafts are kept with probability sum min(p, q) = 1 - TV(p, q) (`acceptance`); no rule that gives p keeps more. A draft
token that was not drawn (n-grams, suffixes, a proposer of Parts, drafts that a step names) has q = 1 at x: it is kept
with probability p(x). Such a token may depend on the text before it, and never on the random numbers here.

A request with a seed is promised its text: there a draft token is kept if it is what plain decoding draws
(`drafts.py`). The same holds for all drafts under a sampler that is not known to draw from
`core.sampler.distribution`, see `is_exact`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reference_impl.core.batch import HostBatch
from reference_impl.core.philox import uniform
from reference_impl.core.sampler import TorchSampler, distribution, draw
from reference_impl.core.staging import Arrays
from reference_impl.features.gumbel.sampler import GumbelSampler
from reference_impl.interfaces import Opened

# Added to a sample's number (of which there are fewer than 2^30), they give random numbers of their own, by `philox`:
# DRAFT to what a draft model draws, VERDICT to whether a draft token is kept and what stands in its place. A token that
# is drawn where there is no draft has the position's number, as ever.
DRAFT, VERDICT = 1 << 31, 1 << 30


def verified(p: Tensor, q: Tensor | None, drafts: Tensor, u: Tensor) -> Tensor:
    """The token in each draft token's place, [E] int64: itself where it is kept.

    p, q [E, vocab_size]: rows sum to 1; None: drafts that were not drawn. drafts [E] int64. u [2, E]: uniform in
    (0, 1), independent of each other and of the drafts.
    """
    x = drafts[:, None]
    one_hot = torch.zeros_like(p).scatter_(1, x, 1)
    q = one_hot if q is None else q
    # Where a draft model's logits are not numbers q has NaN: its token is then taken as one that was not drawn.
    q = torch.where((q.gather(1, x) > 0) & (q.sum(-1, keepdim=True) > 0), q, one_hot)
    kept = u[0] * q.gather(1, x)[:, 0] < p.gather(1, x)[:, 0]  # u < p(x) / q(x)
    rest = (p - q).clamp(min=0)
    # Where p = q but for rounding nothing may be left, though u fell into the last 1e-7.
    rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, p)
    return torch.where(kept, drafts, draw(rest, u[1]))


def acceptance(p: Tensor, q: Tensor) -> Tensor:
    """The probability that a draft token from q is kept, 1 - TV(p, q): [rows]. p, q [rows, vocab_size]."""
    return torch.minimum(p, q).sum(-1)


def filtered(scores: Tensor, t: Mapping[str, Tensor], rows: Tensor) -> Tensor:
    """The `distribution` of some rows, [len(rows), vocab_size]. t: the sampler's columns of all rows."""
    names = ("temperature", "top_k", "top_p", "min_p")
    return distribution(scores[rows], {name: t[name][rows] for name in names if name in t})


def is_exact(sampler: Any) -> bool:
    """Whether a sampler's tokens are known to be drawn from `distribution`: those of the core's sampler, the one with
    Gumbel noise, and one with our kernel. Nothing is known of another `choose`, or of a sampler that is asked."""
    known = TorchSampler.choose, GumbelSampler.choose
    return isinstance(sampler, TorchSampler) and (type(sampler).choose in known or sampler.captures)


def rejection_arrays(batch: HostBatch, requests: Mapping[int, Opened], step_id: int) -> Arrays:
    """The arrays that `verified` needs; none if all requests with drafts have a seed or are greedy.

    batch: with the `draft_arrays`. requests: by slot. unseeded [E]: which of the D drafts are verified by rejection.
    verdicts [2, E]: u of `verified`. A number is used once: it depends on the step, not on the position, since a
    position may have drafts again after it was preempted.
    """
    slots, row, nth = (batch.arrays[f"draft.{name}"] for name in ("slots", "row", "nth"))
    drawn = [requests[slot].sampling for slot in slots.tolist()]
    of_row = np.array([sampling.seed is None and sampling.temperature > 0 for sampling in drawn])
    (unseeded,) = of_row[row].nonzero()
    if not len(unseeded):
        return {}
    s = batch.settings[batch.arrays["draft.at"][unseeded]]
    draws = 2 * nth[unseeded] + np.array([[0], [1]])
    u = uniform(s["seed"].view(np.uint64), s["sample_index"] + VERDICT, step_id, draws)
    return {"draft.unseeded": unseeded, "draft.verdicts": u}


def places(arrays: Arrays) -> dict[int, int]:
    """Which of the E drafts is the first of a request without a seed: {slot: number}. arrays: those of drafts and
    rejection."""
    if "draft.unseeded" not in arrays:
        return {}
    unseeded = arrays["draft.unseeded"]
    (first,) = (arrays["draft.nth"][unseeded] == 0).nonzero()
    slots = arrays["draft.slots"][arrays["draft.row"][unseeded[first]]]
    return dict(zip(slots.tolist(), first.tolist(), strict=True))
