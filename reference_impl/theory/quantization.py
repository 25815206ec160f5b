"""Number formats of few bits, as lists of the values that they have, and what rounding to them costs.

A tensor is stored as codes and scales: w is about code x scale, where some neighbouring values share a scale. Formats
are built from their definition (exponent bits, mantissa bits, what is kept for infinity and NaN), so that maxima and
counts are results here, not entries of a table. NumPy only; the engine's own are in `models/quantization`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist
from types import MappingProxyType
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Reserved = Literal["ieee", "fn", "fnuz", "none"]


def float_values(exponent_bits: int, mantissa_bits: int, reserved: Reserved, bias: int | None = None) -> Floats:
    """All finite values of a float format with a sign bit, ascending; zero once.

    A code with exponent field e > 0 and mantissa m is 2^(e - bias) x (1 + m / 2^mantissa_bits); with e = 0 it is
    subnormal: 2^(1 - bias) x m / 2^mantissa_bits. bias: 2^(exponent_bits - 1) - 1, as in IEEE 754, unless given.

    reserved: which codes are no number. "ieee": all of the largest exponent (infinities and NaN). "fn" (OCP's E4M3):
    the one with all bits set, of either sign. "fnuz" (AMD's CDNA 3): minus zero is the only NaN, and the bias is one
    larger. "none" (E2M1): every code is a number.
    """
    if bias is None:
        bias = 2 ** (exponent_bits - 1) - (reserved != "fnuz")
    found = []
    for e in range(2**exponent_bits - (reserved == "ieee")):
        for m in range(2**mantissa_bits):
            if reserved == "fn" and e == 2**exponent_bits - 1 and m == 2**mantissa_bits - 1:
                continue
            found.append(2.0 ** (max(e, 1) - bias) * ((e > 0) + m / 2**mantissa_bits))
    return np.unique([sign * value for value in found for sign in (-1, 1)])


def nf4_values() -> Floats:
    """NormalFloat4 of QLoRA (Dettmers et al. 2023): quantiles of a normal distribution, divided by the largest.

    Eight positive ones and seven negative ones at evenly spaced probabilities, and zero. The outermost probability is
    the mean of 1 - 1/32 and 1 - 1/30.
    """
    quantile = NormalDist().inv_cdf
    outermost = 1 - (1 / 32 + 1 / 30) / 2
    positive = [quantile(p) for p in np.linspace(outermost, 0.5, 9)[:-1]]
    negative = [-quantile(p) for p in np.linspace(outermost, 0.5, 8)[:-1]]
    values = np.array(sorted([*positive, *negative, 0.0]))
    return values / values.max()


@dataclass(frozen=True)
class Format:
    """A format of one value. bits: stored per value. values: all that it has, ascending. what: in words."""

    bits: float
    values: Floats
    what: str

    @property
    def reach(self) -> float:
        """The largest magnitude, that to which a group's largest is scaled."""
        return float(np.abs(self.values).max())


def _integers(bits: int) -> Floats:
    """The integers of `bits` bits from -(2^(bits - 1) - 1). The code beyond it is unused: minus x is stored as exactly
    as x."""
    most = 2 ** (bits - 1) - 1
    return np.arange(-most, most + 1, dtype=float)


FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        "int8": Format(8, _integers(8), "255 values, equal steps"),
        "e4m3": Format(8, float_values(4, 3, "fn"), "FP8 with 3 mantissa bits (OCP)"),
        "e5m2": Format(8, float_values(5, 2, "ieee"), "FP8 with 2 mantissa bits and infinities (OCP)"),
        "e4m3fnuz": Format(8, float_values(4, 3, "fnuz"), "FP8 with 3 mantissa bits, as AMD's CDNA 3 has it"),
        "int4": Format(4, _integers(4), "15 values, equal steps"),
        "e2m1": Format(4, float_values(2, 1, "none"), "FP4: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives"),
        "nf4": Format(4, nf4_values(), "16 quantiles of a normal distribution"),
        "ternary": Format(2, np.array([-1.0, 0.0, 1.0]), "three values, two bits when stored one by one"),
    }
)

ScaleFormat = Literal["exact", "e8m0", "e4m3"]
SCALE_BITS: Mapping[str, int] = MappingProxyType({"exact": 16, "e8m0": 8, "e4m3": 8})  # "exact" is stored in 16


def scales_of(largest: Floats, reach: float, scale_format: ScaleFormat = "exact") -> Floats:
    """The scale of each group, from its largest magnitude. A group of zeros gets 1.

    exact: largest / reach. e8m0: a power of two, 2^(floor(log2 largest) - floor(log2 reach)), as the OCP's MX formats
    choose it: then the largest may lie beyond the reach, by less than a factor of 2, and is cut off. e4m3: the exact
    one, rounded to E4M3 after all were divided by one number for the tensor, so that the largest scale is 448 (NVFP4).
    """
    largest = np.asarray(largest, float)
    if scale_format == "e8m0":
        powers = np.floor(np.log2(np.where(largest > 0, largest, 1))) - math.floor(math.log2(reach))
        return np.where(largest > 0, 2.0**powers, 1.0)
    scales = np.where(largest > 0, largest / reach, 1.0)
    if scale_format == "e4m3":
        positive = FORMATS["e4m3"].values[FORMATS["e4m3"].values > 0]
        of_tensor = scales.max() / positive[-1]
        return nearest(scales / of_tensor, positive) * of_tensor
    return scales


def nearest(x: Floats, values: Floats) -> Floats:
    """Each of x, replaced by the nearest of the ascending values; of two as near, the larger."""
    return values[np.searchsorted((values[1:] + values[:-1]) / 2, x, side="right")]


def rounded(
    x: Floats, format_name: str, group_size: int | None = None, scale_format: ScaleFormat = "exact", clip: float = 1.0
) -> Floats:
    """x after it was stored and read again. Each group_size values of the last dimension share a scale; None: all of x.

    clip: the scale is made for this share of the group's largest magnitude; what lies beyond is cut off. Raises
    ValueError for a format or group size that does not fit.
    """
    x, kind = np.asarray(x, float), format_named(format_name)
    if group_size is not None and x.shape[-1] % group_size:
        raise ValueError(f"group_size: expected a divisor of the last dimension, {x.shape[-1]}, got {group_size}")
    groups = x.reshape(1, -1) if group_size is None else x.reshape(-1, group_size)
    scales = scales_of(clip * np.abs(groups).max(1), kind.reach, scale_format)[:, None]
    return (nearest(groups / scales, kind.values) * scales).reshape(x.shape)


def format_named(name: str) -> Format:
    """The row of FORMATS with this name. Raises ValueError, which names those there are."""
    if name not in FORMATS:
        raise ValueError(f"format: expected one of {', '.join(FORMATS)}, got {name!r}")
    return FORMATS[name]


def relative_error(x: Floats, y: Floats) -> float:
    """Root mean square of y - x over that of x."""
    return float(np.sqrt(np.mean((y - x) ** 2) / np.mean(x**2)))


def stored_bits(format_name: str, group_size: int | None, scale_format: ScaleFormat = "exact") -> float:
    """Bits per value: the format's, and a share of the group's scale. None: one scale for all, not counted."""
    return format_named(format_name).bits + (0 if group_size is None else SCALE_BITS[scale_format] / group_size)


def lloyd_max(samples: Floats, count: int, rounds: int = 200) -> Floats:
    """`count` values with the least mean squared error for these samples, a local optimum (Lloyd 1982): from evenly
    spaced quantiles on, each value becomes the mean of the samples nearest to it, until the rounds are over."""
    ordered = np.sort(np.asarray(samples, float).ravel())
    sums = np.concatenate(([0.0], np.cumsum(ordered)))
    values = np.quantile(ordered, (np.arange(count) + 0.5) / count)
    for _ in range(rounds):
        edges = np.searchsorted(ordered, (values[1:] + values[:-1]) / 2)
        low, high = np.concatenate(([0], edges)), np.concatenate((edges, [len(ordered)]))
        kept = high > low
        values = np.sort(np.where(kept, (sums[high] - sums[low]) / np.maximum(high - low, 1), values))
    return values


def carried_over(first: float, second: float, correlation: float = 1.0) -> float:
    """GPTQ on two weights whose codes are whole numbers: what the second becomes, before it is rounded, when the first
    is. correlation: of the two inputs, of like size; the share of the first's error that the second can make up for."""
    return second + correlation * (first - math.floor(first + 0.5))


def smoothing_scale(activation_reach: float, weight_reach: float, alpha: float = 0.5) -> float:
    """SmoothQuant's s of an input: max|x|^alpha / max|W|^(1 - alpha). x is divided by it, the column multiplied."""
    return float(activation_reach**alpha / weight_reach ** (1 - alpha))


def rotated_outlier(size: float, channels: int) -> float:
    """What one channel's outlier becomes in each channel after a Hadamard matrix, whose entries are +-1 / sqrt(n)."""
    return float(size / math.sqrt(channels))


def gram_bytes(inputs: int, bytes_per_value: int = 4) -> int:
    """Bytes of X^T X, which is all that GPTQ keeps of the calibration rows of a matrix with so many inputs."""
    return inputs**2 * bytes_per_value
