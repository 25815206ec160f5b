"""Codes of 4 and 8 bits in wider integers, and out of them again: the first code lies in the lowest bits."""

from __future__ import annotations

import torch
from torch import Tensor


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """[rows, n] integers 0 to 2^bits - 1 -> [rows, ceil(n bits / 32)] int32, padded with zeros. bits: 4 or 8."""
    each = 32 // bits
    padded = torch.nn.functional.pad(codes.to(torch.uint8), (0, -codes.shape[1] % each))
    words = padded[:, ::each].int()
    for place in range(1, each):  # one at a time: no copy of all codes in 32 bits
        words |= padded[:, place::each].int() << (place * bits)
    return words


def unpack_words(words: Tensor, bits: int, count: int) -> Tensor:
    """What `pack_words` packed, [rows, count] int32."""
    shifts = torch.arange(0, 32, bits, device=words.device, dtype=torch.int32)
    return ((words[..., None] >> shifts) & ((1 << bits) - 1)).flatten(1)[:, :count]


def pack_nibbles(codes: Tensor) -> Tensor:
    """[rows, n] integers 0 to 15, n even -> [rows, n / 2] uint8: as NVFP4 and MXFP4 are stored."""
    low, high = codes.to(torch.uint8).unflatten(1, (-1, 2)).unbind(2)
    return low | high << 4


def unpack_nibbles(packed: Tensor) -> Tensor:
    """What `pack_nibbles` packed: [rows, n] uint8."""
    return torch.stack((packed & 15, packed >> 4), 2).flatten(1)
