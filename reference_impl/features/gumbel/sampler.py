"""Draws with Gumbel noise: a number for every token of the vocabulary, where `core/sampler.py` has one for a position.

    token = argmax (log p - log(-log u)),  u of seed, sample, position and token       (Gumbel 1954)

Monotone functions leave an argmax where it is: that of p / E is computed, with E = -log u, which is exponentially
distributed. Of events that come at the rates p, E / p are the times until each comes, and token x is first with
probability p(x).

What it is for: a draft token for a request with a seed is drawn with the numbers that its position's token will be
drawn with (`speculative/draft_model.py`), and kept where both draws give the same. One number per position puts two
distributions that differ a little at its first tokens out of step for all later ones; with a number per token only what
differs moves. Drafts are kept with probability (1 - TV) / (1 + TV) at least (Daliri et al. 2024), in any order of the
tokens.

What it costs: the numbers of all tokens of all rows, made where the logits lie. For v tokens, v / 4 counters take 10
rounds of 12 operations on 64-bit integers each; nothing is copied and nothing waits. u is one of 2^32 midpoints: among
v equally likely tokens the best two tie with a probability of about v / 2^32; then the first is taken.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from reference_impl.core.sampler import Settings, TorchSampler, distribution
from reference_impl.core.staging import Arrays
from reference_impl.kernels.reference.sampling import token_words


class GumbelSampler(TorchSampler):
    """Draws with Gumbel noise. A token depends on its row's logits and settings, seed, sample and position alone. The
    position is looked up on the device, so that a step may be planned before it is known."""

    # Repeated here: what TorchSampler learns to read is not in these columns.
    reads = frozenset({"temperature", "top_k", "top_p", "min_p"})

    def columns(self, settings: Settings, lengths: NDArray[np.int64]) -> Arrays:
        """The arrays that `choose` needs, [rows] each: those of `TorchSampler.columns`, with seed and sample in place
        of the position's number."""
        if not settings["temperature"].any():
            return {}
        names = ["temperature", "seed", "sample_index"]
        if settings["top_k"].any() or settings["top_p"].min() < 1:
            names += ["top_k", "top_p"]
        if settings["min_p"].any():
            names.append("min_p")
        return {name: np.ascontiguousarray(settings[name]) for name in names}

    def choose(self, scores: Tensor, t: Mapping[str, Tensor]) -> Tensor:
        """The tokens [rows] int64, one for each row of scores [rows, vocab_size]. t: the `columns`, on the device, and
        what was looked up."""
        if "seed" not in t:
            return scores.argmax(dim=-1)
        return _noisy(scores, t).argmax(dim=-1)  # a greedy row has one p above 0

    def ranked(self, scores: Tensor, t: Mapping[str, Tensor], num: int) -> Tensor:
        """The token that `choose` gives, then those that would be chosen without the ones before, [rows, num]. If a
        tree's drafts for one position are these tokens of the draft model, the target's token is among them more often.
        A greedy row goes on with its likeliest tokens."""
        likeliest = scores.topk(num).indices
        if "seed" not in t:
            return likeliest
        return torch.where(t["temperature"][:, None] > 0, _noisy(scores, t).topk(num).indices, likeliest)

    def shares(self, scores: Tensor, t: Mapping[str, Tensor]) -> Tensor:
        """p / E of each token over their sum, [rows, vocab_size] float64. The largest is what `choose` gives; the
        larger it is, the likelier a similar distribution, drawn with the same numbers, gives the same token."""
        noisy = _noisy(scores, t)
        return noisy / noisy.sum(-1, keepdim=True)


def _noisy(scores: Tensor, t: Mapping[str, Tensor]) -> Tensor:
    """p / E of each token, [rows, vocab_size] float64."""
    waiting = exponentials(t["seed"], t["sample_index"], t["sample_positions"], scores.shape[1])
    return distribution(scores, t).double() / waiting


def exponentials(seed: Tensor, sample_index: Tensor, position: Tensor, vocab_size: int) -> Tensor:
    """E = -log u of every token, [rows, vocab_size] float64. seed, sample_index, position [rows] int64."""
    words = token_words(seed, sample_index, position, vocab_size)
    return words.double().add_(0.5).mul_(2.0**-32).log_().neg_()
