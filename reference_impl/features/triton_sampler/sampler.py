"""The sampler with one kernel for temperature, top-k, top-p, min-p and the draw: no sort, and one launch for all rows.

Distributions and random numbers are the same as in `core/sampler.py`. There masses are floats, here whole numbers, so
that a draw within rounding of the edge between two tokens may fall on the other side. This extends
`TorchSampler.columns` and `choose`.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from reference_impl.core.sampler import Settings, TorchSampler
from reference_impl.core.staging import Arrays
from reference_impl.kernels.sample_tokens import sample_tokens


class TritonSampler(TorchSampler):
    """Samples by our kernel. The choice depends on tensors alone, so a CUDA graph can hold it."""

    # Repeated here: what TorchSampler learns to read is not in these columns.
    reads = frozenset({"temperature", "top_k", "top_p", "min_p"})
    captures = True
    noise = False  # whether each token has a number of its own

    def columns(self, settings: Settings, lengths: NDArray[np.int64]) -> Arrays:
        """The arrays that `choose` needs, [rows] each. The position is looked up on the device: the host may not have
        it yet."""
        with np.errstate(over="ignore"):  # a temperature above float32 is infinite
            floats = {name: settings[name].astype(np.float32) for name in ("temperature", "top_p", "min_p")}
        return floats | {name: np.ascontiguousarray(settings[name]) for name in ("top_k", "seed", "sample_index")}

    def choose(self, scores: Tensor, t: Mapping[str, Tensor]) -> Tensor:
        """The tokens [rows] int64, one for each row of scores [rows, vocab_size]. t: the `columns`, on the device, and
        what was looked up."""
        names = ("temperature", "top_k", "top_p", "min_p", "seed", "sample_index", "sample_positions")
        return sample_tokens(scores, *(t[name] for name in names), noise=self.noise)
