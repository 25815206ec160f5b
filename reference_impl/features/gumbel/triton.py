"""Gumbel noise by our sampling kernel: numbers, filters and choice in one launch, where `sampler.py` takes forty.

The same numbers; masses are whole numbers here and logarithms of float32, so that a draw whose two best tokens are
within rounding of each other may fall on the other one. Extends `TritonSampler.choose`.
"""

from __future__ import annotations

from reference_impl.features.gumbel.sampler import GumbelSampler
from reference_impl.features.triton_sampler.sampler import TritonSampler


class TritonGumbelSampler(TritonSampler, GumbelSampler):
    """`ranked`, which draft trees ask for, is in torch."""

    noise = True
