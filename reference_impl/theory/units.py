"""Units: decimal and binary bytes kept apart, and rates that cannot be mixed up.

Data sheets and bandwidths are decimal (1 GB = 10^9 bytes). Allocators and drivers report binary (1 GiB = 2^30 bytes).
The difference is 7.4 % at this scale, which is larger than many of the effects the course measures.
Plain numbers inside the calculators are always bytes, FLOP, seconds or tokens; their names say which.
"""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from typing import Any

import numpy as np

KB, MB, GB, TB, PB = 10**3, 10**6, 10**9, 10**12, 10**15
KiB, MiB, GiB, TiB, PiB = 2**10, 2**20, 2**30, 2**40, 2**50

# A number or a NumPy array of numbers: every formula in this package is elementwise, so a widget can sweep with arrays.
Number = Any

_DECIMAL = ("B", "KB", "MB", "GB", "TB", "PB")
_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def format_bytes(num_bytes: float, binary: bool = False, digits: int = 3) -> str:
    """Bytes as text with `digits` significant digits and the unit always named: '2.68 GB', or '2.50 GiB' if binary."""
    return _scaled(num_bytes, 1024 if binary else 1000, _BINARY if binary else _DECIMAL, digits)


def format_flops(flop: float, digits: int = 3) -> str:
    """Operations as text: '14.3 TFLOP'. A count, not a rate."""
    return _scaled(flop, 1000, ("FLOP", "KFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP"), digits)


def format_seconds(seconds: float, digits: int = 3) -> str:
    """A duration as text in the unit a reader would choose: '141 us', '4.18 ms', '11.3 min', '47.1 h'."""
    sign, seconds = ("-", -float(seconds)) if seconds < 0 else ("", float(seconds))
    steps = (("ns", 1e-9, 1000), ("us", 1e-6, 1000), ("ms", 1e-3, 1000), ("s", 1.0, 60), ("min", 60.0, 60))
    for unit, scale, next_step in steps:
        # As for bytes: 0.99999 s is printed as 1.00 s, not as 1000 ms.
        if float(_significant(seconds / scale, digits)) < next_step:
            return f"{sign}{_significant(seconds / scale, digits)} {unit}"
    return f"{sign}{_significant(seconds / 3600, digits)} h"


def _scaled(value: float, base: int, names: tuple[str, ...], digits: int) -> str:
    sign, value = ("-", -float(value)) if value < 0 else ("", float(value))
    step = 0
    # A value that would be printed as a full step (999.9 MB as 1000 MB) moves to the next unit instead.
    while step < len(names) - 1 and float(_significant(value, digits)) >= base:
        value, step = value / base, step + 1
    text = str(round(value)) if step == 0 else _significant(value, digits)
    return f"{sign}{text} {names[step]}"


def _significant(value: float, digits: int) -> str:
    """`digits` significant digits in plain notation; never fewer than the digits before the point."""
    if value == 0:
        return "0"
    rounded = float(f"{value:.{digits - 1}e}")  # first round, then count digits: 0.9999 is printed as 1.00
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(rounded))))
    return f"{value:.{decimals}f}"


class UnitError(TypeError):
    """Two quantities were combined that have no meaning together."""


def _is_factor(other: object) -> bool:
    """Whether it is a plain number or an array of them."""
    return isinstance(other, numbers.Real) or hasattr(other, "__array__")


class _Quantity:
    """A value with a unit; same unit divided by same unit is a plain ratio, everything else must be defined."""

    unit = "?"
    value: Number
    __array_ufunc__ = None  # array * quantity is a quantity, not an array of quantities

    def __truediv__(self, other: object) -> Number:
        if type(other) is type(self):
            return self.value / other.value
        if _is_factor(other):
            return type(self)(self.value / other)  # type: ignore[call-arg]
        if isinstance(other, _Quantity):
            raise UnitError(
                f"expected the same unit on both sides of '/', got {self.unit} and {other.unit}: the two can be "
                "compared only at an arithmetic intensity in FLOP/byte. "
                "Use ridge_point(compute, bandwidth) for the intensity at which both limits meet, "
                "or bandwidth * FlopPerByte(intensity) for the FLOP/s that a bandwidth can feed."
            )
        return NotImplemented

    def __mul__(self, other: object) -> Number:
        if _is_factor(other):
            return type(self)(self.value * other)  # type: ignore[call-arg]
        # byte/s * FLOP/byte = FLOP/s: what this bandwidth can feed at that intensity.
        if isinstance(other, _Quantity) and {type(self), type(other)} == {BytesPerSecond, FlopPerByte}:
            return FlopPerSecond(self.value * other.value)
        if isinstance(other, _Quantity):
            raise UnitError(f"expected a plain factor or FLOP/byte times byte/s, got {self.unit} times {other.unit}")
        return NotImplemented

    __rmul__ = __mul__

    def __str__(self) -> str:
        return f"{self.value:.4g} {self.unit}"


@dataclass(frozen=True)
class FlopPerSecond(_Quantity):
    """A compute rate."""

    value: Number
    unit = "FLOP/s"


@dataclass(frozen=True)
class FlopPerByte(_Quantity):
    """An arithmetic intensity: operations done per byte moved to or from memory."""

    value: Number
    unit = "FLOP/byte"


@dataclass(frozen=True)
class BytesPerSecond(_Quantity):
    """A memory or link bandwidth."""

    value: Number
    unit = "byte/s"


def ridge_point(compute: FlopPerSecond, bandwidth: BytesPerSecond) -> FlopPerByte:
    """Intensity at which compute and bandwidth bind together: peak FLOP/s over byte/s (roofline, Williams 2009)."""
    if not isinstance(compute, FlopPerSecond) or not isinstance(bandwidth, BytesPerSecond):
        raise UnitError(
            f"expected (FlopPerSecond, BytesPerSecond), got ({type(compute).__name__}, {type(bandwidth).__name__}): "
            "wrap the numbers so that the order cannot be mistaken"
        )
    return FlopPerByte(compute.value / bandwidth.value)


def compute_utilization_ceiling(intensity: FlopPerByte, compute: FlopPerSecond, bandwidth: BytesPerSecond) -> Number:
    """Largest share of peak compute that work of this intensity can reach: min(1, intensity / ridge)."""
    return np.minimum(1.0, intensity / ridge_point(compute, bandwidth))
