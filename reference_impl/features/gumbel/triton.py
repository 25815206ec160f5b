"""Gumbel noise by our sampling kernel: numbers, filters and choice in one launch, where `sampler.py` takes forty.

The random numbers are the same. Masses are whole numbers here, and logarithms are float32, so that a draw whose two
best tokens are within rounding of each other may give the other one. This extends `TritonSampler.choose`.
"""

from __future__ import annotations

from reference_impl.features.gumbel.sampler import GumbelSampler
from reference_impl.features.triton_sampler.sampler import TritonSampler


class TritonGumbelSampler(TritonSampler, GumbelSampler):
    """Draws with Gumbel noise by our kernel; `ranked`, which draft trees ask for, is in torch."""

    noise = True
