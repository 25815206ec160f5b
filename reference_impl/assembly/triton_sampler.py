"""The sampler with our kernel with all that a request can ask for."""

from __future__ import annotations

from reference_impl.annexes.penalties.sampler import PenalisingSampler
from reference_impl.annexes.triton_sampler.sampler import TritonSampler


class FullTritonSampler(PenalisingSampler, TritonSampler):
    """A `Sampler`: `sample_with_triton(logits, requests)`."""


sample_with_triton = FullTritonSampler()
