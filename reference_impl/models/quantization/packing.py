"""Codes of 2 to 8 bits in wider integers, and out of them again: the first code lies in the lowest bits.

Words of 32 bits are one stream of bits: 32 codes fill as many words as a code has bits, and a code of 3 bits may begin
in one word and end in the next. So both compressed-tensors and AutoGPTQ pack them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

_WORD = 32


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """Packs codes [rows, n], 0 to 2^bits - 1, into int32 [rows, ceil(n bits / 32)], padded with zeros. bits: 1 to 8."""
    count = -(-codes.shape[1] * bits // _WORD)
    padded = F.pad(codes.to(torch.uint8), (0, -codes.shape[1] % _WORD)).unflatten(1, (-1, _WORD))
    words = torch.zeros(*padded.shape[:2], bits, dtype=torch.int32, device=codes.device)
    for place in range(_WORD):  # one at a time: no copy of all codes in 32 bits
        word, shift = divmod(place * bits, _WORD)
        words[..., word] |= padded[..., place].int() << shift
        if shift + bits > _WORD:
            words[..., word + 1] |= padded[..., place].int() >> (_WORD - shift)
    return words.flatten(1)[:, :count].contiguous()


def unpack_words(words: Tensor, bits: int, count: int) -> Tensor:
    """The codes that `pack_words` packed, [rows, count] int32."""
    padded = F.pad(words, (0, -words.shape[1] % bits)).unflatten(1, (-1, bits))
    starts = torch.arange(0, _WORD * bits, bits, device=words.device)
    word, shift = starts // _WORD, (starts % _WORD).int()
    codes = (padded[..., word] >> shift) & ((1 << bits) - 1)
    for place in (shift + bits > _WORD).nonzero().flatten().tolist():  # what `>>` put there is the sign, not the rest
        low = _WORD - int(shift[place])
        rest = padded[..., int(word[place]) + 1] << low
        codes[..., place] = (codes[..., place] & ((1 << low) - 1)) | (rest & ((1 << bits) - 1))
    return codes.flatten(1)[:, :count]


def pack_nibbles(codes: Tensor) -> Tensor:
    """Packs codes [rows, n], integers 0 to 15, n even, into uint8 [rows, n / 2], as NVFP4 and MXFP4 are stored."""
    low, high = codes.to(torch.uint8).unflatten(1, (-1, 2)).unbind(2)
    return low | high << 4


def unpack_nibbles(packed: Tensor) -> Tensor:
    """The codes that `pack_nibbles` packed: [rows, n] uint8."""
    return torch.stack((packed & 15, packed >> 4), 2).flatten(1)
