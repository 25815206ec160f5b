"""The sampler with one kernel for temperature, top-k, top-p, min-p and the draw: no sort, and one launch for all rows.

The same distributions and the same random numbers as in `sampler.py`; there masses are floats, here whole numbers, so
that a draw within rounding of the edge between two tokens may fall on the other side.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from reference_impl.interfaces import Request, Sampled
from reference_impl.kernels.sample_tokens import sample_tokens
from reference_impl.sampling.sampler import sample


def sample_with_triton(logits: Tensor, requests: Sequence[Request]) -> Sampled:
    """As `sample`."""
    return sample(logits, requests, choose)


def choose(scores: Tensor, requests: Sequence[Request]) -> Tensor:
    """One token per row of scores [num_rows, vocab_size], [num_rows] int64."""
    params = [r.sampling for r in requests]
    # Two transfers to the GPU for all parameters together.
    reals = torch.tensor(
        [[p.temperature for p in params], [p.top_p for p in params], [p.min_p for p in params]], dtype=torch.float32
    ).to(scores.device)
    wholes = torch.tensor(
        [
            [p.top_k for p in params],
            [r.seed - (r.seed >> 63 << 64) for r in requests],  # 64 bits as int64 has them
            [r.sample_index for r in requests],
            [r.num_tokens for r in requests],
        ]
    ).to(scores.device)
    (temperature, top_p, min_p), (top_k, seed, sample_index, position) = reals, wholes
    return sample_tokens(scores, temperature, top_k, top_p, min_p, seed, sample_index, position)
