"""Fits a cost model to measured steps, with its error on steps that were not fitted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from reference_impl.simulation.cost import COEFFICIENTS, CalibratedCost, features, least_relative_squares

if TYPE_CHECKING:
    from reference_impl.simulation.measure import Measured


def fit(
    measured: Sequence[Measured], bytes_per_token: float, longest: int, stamp: dict[str, Any] | None = None
) -> CalibratedCost:
    """Fits to two of three measurements and reports the error on the third. Raises ValueError for fewer than 24."""
    if len(measured) < 24:
        raise ValueError(f"expected at least 24 measured steps for 7 coefficients and an error, got {len(measured)}")
    inputs = np.array([features(m.shape.new_tokens, m.shape.past_tokens) for m in measured], dtype=float)
    seconds = np.array([m.seconds for m in measured])
    # The four kinds of shapes alternate (see random_shapes): four held-out blocks of three have each kind thrice.
    held_out = np.arange(len(measured)) // 3 % 3 == 2
    coefficients = least_relative_squares(inputs[~held_out], seconds[~held_out])
    error = relative_error(inputs[held_out] @ coefficients, seconds[held_out])
    error |= {"fitted_steps": int((~held_out).sum()), "held_out_steps": int(held_out.sum())}
    values: dict[str, Any] = dict(zip(COEFFICIENTS, map(float, coefficients), strict=True))
    return CalibratedCost(**values, bytes_per_token=bytes_per_token, longest=longest, error=error, stamp=stamp or {})


def relative_error(predicted: np.ndarray, measured: np.ndarray) -> dict[str, float]:
    """Median and 90th percentile of |predicted - measured| / measured, and by how much the sum is off (signed)."""
    off = np.abs(predicted - measured) / measured
    return {
        "median": float(np.median(off)),
        "p90": float(np.percentile(off, 90)),
        "sum": float(predicted.sum() / measured.sum() - 1),
    }
