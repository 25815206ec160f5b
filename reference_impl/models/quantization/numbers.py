"""The numbers that codes stand for: each format by its values, its rounding, and what a code is kept in.

    int2 to int8  the integer itself (int8), two's complement
    e4m3, e5m2    8-bit floats: torch.float8_e4m3fn (largest 448, no infinity), torch.float8_e5m2 (largest 57,344)
    e2m1          uint8 0 to 15: sign x 8 + place among 0, 0.5, 1, 1.5, 2, 3, 4, 6 (OCP Microscaling Formats v1.0)
    nf4           uint8 0 to 15: place among 16 quantiles of a normal distribution (QLoRA, Dettmers et al. 2023)
    ternary       -1, 0, 1 (int8; BitNet b1.58, Ma et al. 2024)

FNUZ, the 8-bit float of some AMD GPUs, has the same bits with half the value; `from_fnuz` converts what can be.
Scales of a byte: e4m3, as above but never negative, and e8m0, a power of two from 2^-127 to 2^127.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Midpoints of those; where it lies nearer to the even code the midpoint itself goes up, so the bound is just below it.
_E2M1_MIDDLE = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
NF4_VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
E8M0_BIAS = 127


@dataclass(frozen=True)
class Numbers:
    """A format. reach: the largest magnitude that a scale is chosen for, in scales. bits: of a packed code."""

    name: str
    bits: int
    reach: float
    code_dtype: torch.dtype
    least: int | None = None  # of integers, the codes' range
    most: int | None = None


FORMATS = {
    numbers.name: numbers
    for numbers in (
        Numbers("int2", 2, 1.5, torch.int8, -2, 1),
        Numbers("int3", 3, 3.5, torch.int8, -4, 3),
        Numbers("int4", 4, 7.5, torch.int8, -8, 7),
        Numbers("int5", 5, 15.5, torch.int8, -16, 15),
        Numbers("int6", 6, 31.5, torch.int8, -32, 31),
        Numbers("int7", 7, 63.5, torch.int8, -64, 63),
        Numbers("int8", 8, 127.5, torch.int8, -128, 127),
        Numbers("e4m3", 8, 448.0, torch.float8_e4m3fn),
        Numbers("e5m2", 8, 57344.0, torch.float8_e5m2),
        Numbers("e2m1", 4, 6.0, torch.uint8),
        Numbers("nf4", 4, 1.0, torch.uint8),
        Numbers("ternary", 2, 1.0, torch.int8, -1, 1),
    )
}


def to_codes(values: Tensor, name: str) -> Tensor:
    """The nearest code of each value, same shape; what is too large becomes the largest. Ties go to the even code
    (of NF4, whose values are no even steps: to the smaller)."""
    numbers, values = FORMATS[name], values.float()
    if numbers.least is not None:
        return values.round().clamp(numbers.least, numbers.most).to(numbers.code_dtype)
    if name == "e2m1":
        return _to_e2m1(values)
    if name == "nf4":
        table = torch.tensor(NF4_VALUES, device=values.device)
        return torch.bucketize(values, (table[1:] + table[:-1]) / 2).to(torch.uint8)
    return values.clamp(-numbers.reach, numbers.reach).to(numbers.code_dtype)


def to_values(codes: Tensor, name: str) -> Tensor:
    """What the codes stand for exactly, in scales: float32, same shape."""
    if name == "e2m1":
        values = torch.tensor(E2M1_VALUES, device=codes.device)
        return torch.cat((values, -values))[codes.int()]
    if name == "nf4":
        return torch.tensor(NF4_VALUES, device=codes.device)[codes.int()]
    return codes.float()


def _to_e2m1(values: Tensor) -> Tensor:
    middle = torch.tensor(_E2M1_MIDDLE, device=values.device)
    middle[1::2] = torch.nextafter(middle[1::2], torch.zeros_like(middle[1::2]))
    places = torch.bucketize(values.abs(), middle)
    return (places + 8 * (values < 0)).to(torch.uint8)


def nearest_e4m3_scale(scales: Tensor) -> Tensor:
    """Each scale rounded to e4m3, as float32; at least 2^-9, its smallest number, and at most 448."""
    return scales.float().clamp(2.0**-9, 448.0).to(torch.float8_e4m3fn).float()


def e8m0_to_scales(bytes_: Tensor) -> Tensor:
    """The scales 2^(b - 127), float32, of uint8 0 to 254. 255 stands for NaN, and becomes it."""
    found = torch.ldexp(torch.ones_like(bytes_, dtype=torch.float32), bytes_.int() - E8M0_BIAS)
    return torch.where(bytes_ == 255, torch.full_like(found, torch.nan), found)


def scales_to_e8m0(scales: Tensor) -> Tensor:
    """The bytes, uint8, of powers of two in float32. Raises ValueError for others."""
    mantissas, exponents = torch.frexp(scales.float())
    if bool((mantissas != 0.5).any()):
        raise ValueError("scales of MX formats: expected powers of two, got others")
    return (exponents - 1 + E8M0_BIAS).to(torch.uint8)


def from_fnuz(codes: Tensor) -> Tensor:
    """torch.float8_e4m3fn from torch.float8_e4m3fnuz with twice the value: their scales are to be halved.

    Raises ValueError where there is none: NaN, and 240, whose bits are NaN in the other.
    """
    bits = codes.view(torch.uint8)
    if wrong := int(((bits == 0x80) | (bits & 0x7F == 0x7F)).sum()):
        raise ValueError(
            f"8-bit floats in FNUZ form: expected magnitudes below 240, which e4m3 has at twice the value; got {wrong} "
            "that are 240 or NaN: write the checkpoint as torch.float8_e4m3fn"
        )
    return bits.view(torch.float8_e4m3fn)
