"""A sampler from draws of rows that have the same settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from reference_impl.assembly.sampler import probabilities, sample
from reference_impl.core import philox, sampler
from reference_impl.interfaces import Asking, Sampled, SamplingParams

Settings = tuple[float, int, float]  # temperature; top-k, 0 for all; top-p


@dataclass(frozen=True)
class Draw:
    """The rows of one step that have the same settings."""

    logits: Tensor  # [rows, vocab] float32
    u: Tensor  # [rows] float64 in [0, 1): computed from each request's seed and the number of its tokens
    settings: Settings
    expected: list[int]  # [rows], what the engine's own sampler chooses


class SamplerBySettings:
    """A Sampler that asks a lab's function. draw: gives the token ids of the rows of a `Draw`, which the requests go on
    with. Log-probabilities are the engine's."""

    def __init__(self, draw: Callable[[Draw], Sequence[int]]):
        self.draw = draw

    def __call__(self, logits: Tensor, requests: Sequence[Asking]) -> Sampled:
        own = sample(logits, requests)
        u = torch.from_numpy(philox.uniform([r.seed for r in requests], 0, [r.num_tokens for r in requests]))
        rows_with: dict[Settings, list[int]] = {}
        for row, request in enumerate(requests):
            params = request.sampling
            rows_with.setdefault((params.temperature, params.top_k, params.top_p), []).append(row)
        tokens = list(own.tokens)
        for settings, rows in rows_with.items():
            chosen = self.draw(Draw(logits[rows], u[rows], settings, [own.tokens[row] for row in rows]))
            for row, token in zip(rows, chosen, strict=True):
                tokens[row] = token
        return Sampled(tokens, own.logprobs)


def engine_probabilities(logits: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """The probabilities that the engine draws from, like logits [rows, vocab]."""
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=min(1.0, top_p))
    return probabilities(logits, [params] * len(logits))


def engine_draw(probs: Tensor, u: Tensor) -> Tensor:
    """The token ids [rows] that the engine draws from probs [rows, vocab] with u [rows]."""
    return sampler.draw(probs, u)
