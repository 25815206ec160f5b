"""Numbers in 4 bits, two in a byte: value = code x scale + lowest, with a scale and a lowest number for each head.

Codes go from 0 to 15, from the head's least number to its largest. Zero is in no special place, so a head whose numbers
all lie on one side wastes no code: with min and max the attention of the course model errs by 11 %, with codes around
zero and one scale of as many bits by 13 % (relative, over 700 tokens of Python).
"""

from __future__ import annotations

import torch
from torch import Tensor

SMALLEST = 2.0**-24  # a scale's, the least number of float16


def to_four_bits(x: Tensor) -> tuple[Tensor, Tensor]:
    """(packed, scale): x [..., n], n even -> packed [..., n / 2] uint8 and scale [..., 2] float16: (scale, lowest).

    Byte i has the code of number i in its low half and of number i + n / 2 in its high one. Codes are those of the
    rounded scale and lowest number. With NaN, infinity or a number beyond float16 (65,504) among them the scale is NaN,
    and so is all that is read by it.
    """
    codes, scale, lowest = _codes(x, -1)
    return _packed(codes), torch.cat((scale, lowest), -1)


def from_four_bits(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """What `to_four_bits` stored, [..., n], rounded once to dtype."""
    wide = torch.promote_types(dtype, torch.float32)
    step, lowest = scale.to(wide).split(1, -1)
    return torch.addcmul(lowest, _unpacked(packed).to(wide), step).to(dtype)


def channels_to_four_bits(x: Tensor) -> tuple[Tensor, Tensor]:
    """Like `to_four_bits`, but a scale and a lowest number for each channel of a head over its tokens (KIVI's keys, Liu
    et al. 2024): x [..., tokens, heads, n], n even -> packed [..., tokens, heads, n / 2] uint8, scale [..., heads, n,
    2] float16."""
    codes, scale, lowest = _codes(x, -3)
    return _packed(codes), torch.stack((scale, lowest), -1).squeeze(-4)


def channels_from_four_bits(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """What `channels_to_four_bits` stored, rounded once to dtype. packed [..., heads, n / 2], scale [..., heads, n, 2],
    which broadcast -> [..., heads, n]."""
    wide = torch.promote_types(dtype, torch.float32)
    step, lowest = scale.to(wide).unbind(-1)
    return torch.addcmul(lowest, _unpacked(packed).to(wide), step).to(dtype)


def _codes(x: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """(codes, scale, lowest); the numbers along dim share the last two, which have 1 there."""
    exact = x.to(torch.promote_types(x.dtype, torch.float32))
    lowest = exact.amin(dim, keepdim=True).half()
    above = exact - lowest
    largest = above.amax(dim, keepdim=True)
    scale = (largest / torch.full_like(largest, 15.0)).half().clamp(min=SMALLEST)
    scale = scale.masked_fill(~(exact.abs().amax(dim, keepdim=True) < 65520), torch.nan)  # from there on half is inf
    return (above * (1 / scale.to(exact.dtype))).round().clamp(0, 15).to(torch.uint8), scale, lowest


def _packed(codes: Tensor) -> Tensor:
    low, high = codes.chunk(2, -1)
    return low | high << 4


def _unpacked(packed: Tensor) -> Tensor:
    return torch.cat((packed & 15, packed >> 4), -1)
