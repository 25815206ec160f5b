"""How far off a figure measured on n requests may be. Both intervals treat the requests as independent.

They are not: requests in a queue wait together. So the intervals are too narrow near
saturation, the more so the shorter the run; repeat the run with other seeds to see by how much.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from reference_impl.observe.metrics import percentile

CONFIDENCE = 0.95
Z = 1.959963984540054  # the normal distribution's 97.5th percentile


@dataclass(frozen=True)
class Estimate:
    """A percentile and its confidence interval. A limit is None where so few values cannot give one."""

    value: float
    low: float | None
    high: float | None


def percentile_interval(values: Sequence[float], percent: float) -> Estimate:
    """The percentile, between two order statistics that hold the true one with at least 95 % confidence.

    The number of values below the true quantile q is binomial(n, q), whatever the distribution: so
    P(x_(l) <= quantile <= x_(u)) >= P(l <= B < u). Each tail gets at most 2.5 %.
    Source: Hahn and Meeker, Statistical Intervals (1991), section 5.2. For a p99 the upper limit needs 368 values.
    """
    ordered, n = np.sort(np.asarray(values, dtype=float)), len(values)
    value = percentile(values, percent)
    below = _binomial_cdf(n, percent / 100)  # below[k] = P(B <= k)
    tail = (1 - CONFIDENCE) / 2
    low = int(np.searchsorted(below, tail, side="right"))  # the largest l with P(B <= l - 1) <= tail
    high = int(np.searchsorted(below, 1 - tail, side="left")) + 1  # the smallest u with P(B <= u - 1) >= 1 - tail
    return Estimate(
        value, float(ordered[low - 1]) if low >= 1 else None, float(ordered[high - 1]) if high <= n else None
    )


def _binomial_cdf(n: int, q: float) -> NDArray[np.float64]:
    """P(B <= k) for k = 0 ... n, by logarithms: at q = 0.99, P(B = 0) is 0 in floats from n = 162 on."""
    k = np.arange(1, n + 1)
    ratio = np.log((n + 1 - k) / k) + math.log(q / (1 - q))  # of P(B = k) to P(B = k - 1)
    logs = n * math.log1p(-q) + np.concatenate([[0.0], np.cumsum(ratio)])
    return np.minimum(np.cumsum(np.exp(logs)), 1.0)


def share_interval(hits: int, n: int) -> Estimate:
    """A share hits / n with its 95 % score interval (Wilson 1927), which also holds near 0 and 1.

    Raises ValueError where n is 0.
    """
    if n < 1:
        raise ValueError("expected at least one request, got none: the share of nothing is not defined")
    p, z2 = hits / n, Z * Z
    middle = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = Z / (1 + z2 / n) * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
    return Estimate(p, max(0.0, middle - half), min(1.0, middle + half))
