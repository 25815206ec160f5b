"""Random numbers by counter (Philox 4x32-10, Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").

A draw is a pure function of (seed, sample, position, draw). So a request's text does not depend on what
shares its batch, on chunking, or on being preempted and computed again.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def philox(counter: NDArray[np.uint64], key: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Ten rounds: counter [4, n] and key [2, n] of 32-bit words (held in uint64) -> 4 random words [4, n]."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2  # 32 x 32 -> 64 bits
        c0, c1, c2, c3 = (p1 >> _HALF) ^ c1 ^ k0, p1 & _LOW, (p0 >> _HALF) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return np.stack((c0, c1, c2, c3))


def uniform(seed: ArrayLike, sample: ArrayLike, position: ArrayLike, draw: ArrayLike = 0) -> NDArray[np.float32]:
    """Float32 in (0, 1), one of 2^23 midpoints: never 0, never 1. Arguments broadcast.

    seed: 64 bits, the key. sample, position, draw: 32 bits each, the counter. Of sample the two upper bits say what the
    number is for, 0 for a token (others: `features/speculative/rejection.py`), so that no two purposes share one.
    """
    seeds, samples, positions, draws = np.broadcast_arrays(
        np.asarray(seed, np.uint64),
        np.asarray(sample, np.uint64),
        np.asarray(position, np.uint64),
        np.asarray(draw, np.uint64),
    )
    counter = np.stack((positions, samples, draws, np.zeros_like(seeds)))
    words = philox(counter & _LOW, np.stack((seeds & _LOW, seeds >> _HALF)))
    return ((words[0] >> np.uint64(9)).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-23)
