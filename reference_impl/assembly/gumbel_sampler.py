"""The sampler that draws by Gumbel noise with all that a request can ask for."""

from __future__ import annotations

from reference_impl.features.gumbel.sampler import GumbelSampler
from reference_impl.features.penalties.sampler import CalledSampler


class CalledGumbelSampler(CalledSampler, GumbelSampler):
    """A `Sampler`: `sample_with_gumbel(logits, requests)`."""


sample_with_gumbel = CalledGumbelSampler()
