"""Online softmax (Milakov and Gimelshein 2018), recorded tile by tile, with the weighted mean of values that
FlashAttention (Dao et al. 2022) carries along. float64, and few queries: its steps are meant to be displayed.

After tiles 1 ... t, over all keys j seen so far:
    m = max_j s_j      l = sum_j exp(s_j - m)      acc = sum_j exp(s_j - m) v_j
When a larger maximum turns up, every term is multiplied by exp(old m - new m), and so l and acc as a whole are, too.
Nothing is approximated, and acc / l at the end is softmax(s) v.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class TileStep:
    """State of every query after a tile of keys. n: queries; k: keys of the tile; d: head_dim."""

    first: int  # key of the tile
    scores: Array  # [n, k], -inf where a key is not visible
    weights: Array  # [n, k], exp(score - m)
    shrink: Array  # [n], exp(old m - new m), by which the old l and acc were multiplied
    largest: Array  # [n], m
    total: Array  # [n], l
    acc: Array  # [n, d]

    @property
    def mean(self) -> Array:
        """acc / l, softmax over the keys seen so far times their values; NaN before a query sees a key."""
        with np.errstate(invalid="ignore"):
            mean: Array = self.acc / self.total[:, None]
        return mean


def record(scores: ArrayLike, values: ArrayLike, tile: int) -> list[TileStep]:
    """One step per tile of `tile` keys. scores [n, keys], values [keys, d]."""
    s, v = np.asarray(scores, dtype=float), np.asarray(values, dtype=float)
    if s.ndim != 2 or v.ndim != 2 or s.shape[1] != len(v) or tile < 1:
        raise ValueError(f"expected scores [n, keys], values [keys, d], tile >= 1; got {s.shape}, {v.shape}, {tile}")
    largest, total, acc = np.full(len(s), -np.inf), np.zeros(len(s)), np.zeros((len(s), v.shape[1]))
    steps = []
    for first in range(0, s.shape[1], tile):
        part = s[:, first : first + tile]
        new = np.maximum(largest, part.max(1))
        base = np.where(np.isneginf(new), 0.0, new)  # nothing seen yet: exp(-inf - 0) is 0, exp(-inf + inf) is NaN
        shrink, weights = np.exp(largest - base), np.exp(part - base[:, None])
        total = total * shrink + weights.sum(1)
        acc = acc * shrink[:, None] + weights @ v[first : first + tile]
        largest = new
        steps.append(TileStep(first, part, weights, shrink, largest, total, acc))
    return steps
