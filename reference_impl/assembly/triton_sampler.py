"""The sampler with our kernel with all that a request can ask for."""

from __future__ import annotations

from reference_impl.annexes.penalties.sampler import CalledSampler
from reference_impl.annexes.triton_sampler.sampler import TritonSampler


class CalledTritonSampler(CalledSampler, TritonSampler):
    """A `Sampler`: `sample_with_triton(logits, requests)`."""


sample_with_triton = CalledTritonSampler()
