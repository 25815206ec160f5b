"""Sampling from the vocabularies of Llama 2 and Qwen3."""

from __future__ import annotations

import torch
from torch import Tensor

from reference_impl.kernels.sample_tokens import sample_tokens
from tests.kernels.calls.meta import Call, empty

ROWS = 64


def _sample(vocab_size: int, logits: torch.dtype | None = None, noise: bool = False) -> Call:
    """A call of `sample_tokens`. logits: their dtype, if not that of the activations. noise: one number a token."""

    def call(dtype: torch.dtype) -> Tensor:
        number, whole = (empty(ROWS, dtype=dtype) for dtype in (torch.float32, torch.int64))
        scores = empty(ROWS, vocab_size, dtype=logits or dtype)
        return sample_tokens(scores, number, whole.int(), number, number, whole, whole.int(), whole.int(), noise=noise)

    return call


CALLS: dict[str, Call] = {
    "sample_tokens, 32,000": _sample(32000),
    "sample_tokens, 151,936": _sample(151936),
    "sample_tokens, 151,936 of float32": _sample(151936, torch.float32),
    "sample_tokens, 32,000 with noise": _sample(32000, noise=True),
    "sample_tokens, 151,936 with noise": _sample(151936, noise=True),
    "sample_tokens, 151,936 of float32 with noise": _sample(151936, torch.float32, noise=True),
}
