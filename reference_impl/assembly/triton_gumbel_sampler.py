"""The sampler that draws by Gumbel noise with our kernel, with all that a request can ask for."""

from __future__ import annotations

from reference_impl.features.gumbel.triton import TritonGumbelSampler
from reference_impl.features.penalties.sampler import CalledSampler


class CalledTritonGumbelSampler(CalledSampler, TritonGumbelSampler):
    """A `Sampler`: `sample_with_triton_and_gumbel(logits, requests)`."""


sample_with_triton_and_gumbel = CalledTritonGumbelSampler()
