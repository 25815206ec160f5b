"""What a step costs: by the formulas of `theory.deployment`, or as it was measured on a machine.

Both describe a batch only by sums over its rows. A step in which all rows decode is then described by two numbers, the
rows and the tokens they have in the cache (`decode_seconds`). This lets a replica leap (see replica.py).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from reference_impl.simulation.executor import StepCost
from reference_impl.theory import latency
from reference_impl.theory.deployment import Deployment
from reference_impl.theory.kv_cache import bytes_per_token


@runtime_checkable
class SummedCost(StepCost, Protocol):
    """A cost that sees sums over rows only."""

    def decode_seconds(self, num_rows: int, past_tokens: int) -> float:
        """`step_seconds` of `num_rows` rows of one token each, with `past_tokens` in the cache, all together."""
        ...


@runtime_checkable
class BoundedCost(Protocol):
    """A cost that was measured on an engine whose sequences have a longest length."""

    @property
    def longest(self) -> int:
        """The longest length, in tokens."""
        ...


class Roofline:
    """`Deployment.step_seconds` without arrays: the same formula, summed over the rows first, in a tenth of the time.

    step = max(FLOP / (mfu * peaks), bytes / (mbu * bandwidths)) + communication
    """

    def __init__(self, deployment: Deployment):
        d, shape = deployment, deployment.shape
        self.bytes_per_token, self.cache_tokens = d.bytes_per_token, d.cache_tokens()
        flops = d.num_devices * d.mfu * d.device.peak(d.precision)
        moved = d.num_devices * d.mbu * d.device.bandwidth
        new, cached = latency.flops_per_pair(shape)
        # Seconds, in FLOP: of a token, of a row's logits, of a pair with a new token, of a pair with a cached one.
        head = shape.vocab_size * shape.hidden_size
        self._token, self._logits = 2 * (shape.linear_params - head) / flops, 2 * head / flops
        self._new_pair, self._pair = new / flops, cached / flops
        # Seconds, in bytes: of the weights, of a row, of a token in the cache.
        self._weights, self._row = d.read / moved, d.cache_copies * 2 * shape.fixed_state_bytes / moved
        self._cached = d.cache_copies * bytes_per_token(shape, d.kv_bytes) / moved
        # All-reduces: a straight line in the tokens.
        self._message = d.communication_seconds(0)
        self._message_token = d.communication_seconds(1) - self._message

    def step_seconds(self, new_tokens: Sequence[int], past_tokens: Sequence[int]) -> float:
        rows, tokens, past = len(new_tokens), sum(new_tokens), sum(past_tokens)
        if tokens == rows:
            return self.decode_seconds(rows, past)
        new_pairs = sum(n * (n + 1) // 2 for n in new_tokens)
        pairs = sum(n * p for n, p in zip(new_tokens, past_tokens, strict=True))
        return self._seconds(rows, tokens, past, new_pairs, pairs)

    def decode_seconds(self, num_rows: int, past_tokens: int) -> float:
        return self._seconds(num_rows, num_rows, past_tokens, num_rows, past_tokens)

    def _seconds(self, rows: int, tokens: int, past: int, new_pairs: int, pairs: int) -> float:
        compute = self._token * tokens + self._logits * rows + self._new_pair * new_pairs + self._pair * pairs
        memory = self._weights + self._row * rows + self._cached * (past + tokens)
        return max(compute, memory) + self._message + self._message_token * tokens


COEFFICIENTS = ("constant", "decode", "decode_past", "chunk", "chunk_token", "chunk_past", "chunk_pair")


@dataclass(frozen=True)
class CalibratedCost:
    """Seconds of a step of the engine on one machine, linear in what is in the batch.

        constant + decode * D + decode_past * (tokens D rows have in the cache)
                 + chunk * C + chunk_token * (tokens of C rows) + chunk_past * (tokens they have in the cache)
                 + chunk_pair * (pairs of a token and one that it attends to)
    D: rows of one token; C: rows of more, chunks of prompts.

    error: |predicted - measured| / measured on steps that the fit did not see. longest: tokens of a sequence in the
    engine that was measured. stamp: the machine, and what the seconds are.
    """

    constant: float
    decode: float
    decode_past: float
    chunk: float
    chunk_token: float
    chunk_past: float
    chunk_pair: float
    bytes_per_token: float
    longest: int = 131_072
    error: dict[str, float] = field(default_factory=dict)
    stamp: dict[str, Any] = field(default_factory=dict)

    def step_seconds(self, new_tokens: Sequence[int], past_tokens: Sequence[int]) -> float:
        rows, tokens = len(new_tokens), sum(new_tokens)
        if tokens == rows:
            return self.decode_seconds(rows, sum(past_tokens))
        return float(sum(c * f for c, f in zip(self.coefficients, features(new_tokens, past_tokens), strict=True)))

    def decode_seconds(self, num_rows: int, past_tokens: int) -> float:
        return self.constant + self.decode * num_rows + self.decode_past * past_tokens

    @property
    def coefficients(self) -> tuple[float, ...]:
        return tuple(getattr(self, name) for name in COEFFICIENTS)

    def save(self, file: Path) -> None:
        file.write_text(json.dumps(asdict(self), indent=2) + "\n", "utf-8")

    @classmethod
    def load(cls, file: Path) -> CalibratedCost:
        """The cost in a file. Raises ValueError, which names the file and the fields, if it holds something else."""
        raw = json.loads(file.read_text("utf-8"))
        known = {f.name for f in fields(cls)}
        if not isinstance(raw, dict) or set(raw) != known:
            found = sorted(raw) if isinstance(raw, dict) else type(raw).__name__
            raise ValueError(f"{file.name}: expected the fields {sorted(known)} of a calibration, got {found}")
        return cls(**raw)


def features(new_tokens: Sequence[int], past_tokens: Sequence[int]) -> tuple[int, ...]:
    """What CalibratedCost multiplies by its coefficients, in their order."""
    decodes = decode_past = chunks = tokens = past = pairs = 0
    for n, p in zip(new_tokens, past_tokens, strict=True):
        if n == 1:
            decodes += 1
            decode_past += p
        else:
            chunks += 1
            tokens += n
            past += p
            pairs += n * p + n * (n + 1) // 2
    return 1, decodes, decode_past, chunks, tokens, past, pairs


def least_relative_squares(inputs: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Coefficients >= 0 that make the sum of ((inputs @ coefficients - seconds) / seconds)^2 small.

    Errors are relative, because a step of 5 ms matters as much as one of 100. No part takes negative time, so negative
    coefficients are dropped and the rest fitted again. Simple, but not always the best fit.
    """
    inputs = inputs / seconds[:, None]
    kept = list(range(inputs.shape[1]))
    while True:
        scale = np.abs(inputs[:, kept]).max(axis=0)  # pairs are a million times rows
        found = np.linalg.lstsq(inputs[:, kept] / scale, np.ones(len(seconds)), rcond=None)[0] / scale
        if (found >= 0).all():
            break
        kept = [column for column, value in zip(kept, found, strict=True) if value > 0]
    coefficients = np.zeros(inputs.shape[1])
    coefficients[kept] = found
    return coefficients
