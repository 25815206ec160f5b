"""The sampler in torch with all that a request can ask for: temperature, filters, penalties, log-probabilities."""

from __future__ import annotations

from reference_impl.annexes.penalties.sampler import CalledSampler

sample = CalledSampler()
