"""The sampler with one kernel for temperature, top-k, top-p, min-p and the draw: no sort, and one launch for all rows.

The same distributions and the same random numbers as in `sampler.py`; there masses are floats, here whole numbers, so
that a draw within rounding of the edge between two tokens may fall on the other side.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from reference_impl.kernels.sample_tokens import sample_tokens
from reference_impl.sampling.sampler import Parameters, TorchSampler


class TritonSampler(TorchSampler):
    """As `sample`. What is chosen depends on tensors alone, so a CUDA graph can hold the choice."""

    captures = True

    def choose(self, scores: Tensor, parameters: Parameters | None, on_device: Mapping[str, Tensor] | None) -> Tensor:
        """One token per row of scores [num_rows, vocab_size], [num_rows] int64."""
        assert on_device is not None
        names = ("temperature", "top_k", "top_p", "min_p", "seed", "sample_index", "position")
        return sample_tokens(scores, *(on_device[name] for name in names))


sample_with_triton = TritonSampler()
