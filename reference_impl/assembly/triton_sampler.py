"""The sampler with our kernel with all that a request can ask for."""

from __future__ import annotations

from reference_impl.features.penalties.sampler import CalledSampler
from reference_impl.features.triton_sampler.sampler import TritonSampler


class CalledTritonSampler(CalledSampler, TritonSampler):
    """A `Sampler`: `sample_with_triton(logits, requests)`."""


sample_with_triton = CalledTritonSampler()
