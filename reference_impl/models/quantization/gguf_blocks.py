"""The blocks of llama.cpp's GGUF files: a row of a matrix is whole blocks of 32 or 256 numbers, scales inside.

Block, bytes in their order (ggml/src/ggml-common.h, ggml-quants.c); d, m: float16; numbers in order 0, 1, 2, ...

    Q8_0  d, 32 int8                              d x q
    Q4_0  d, 16 bytes: low 4 bits are numbers     d x (q - 8)
          0 to 15, high ones 16 to 31
    Q4_1  d, m, 16 bytes as above                 d x q + m
    Q5_0  d, 4 bytes: bit 4 of each number,       d x (q - 16)
          16 bytes as above
    Q5_1  d, m, as above                          d x q + m
    Q2_K  16 bytes, 64 bytes: of each 32 the      d x s x q - m x t, for each 16 numbers a byte: s its low
          lowest 2 bits are 32 numbers, the       4 bits, t its high ones
          next 2 the next 32, ...; d, m
    Q3_K  32 bytes: bit 2 of numbers 32 j + i     d x (s - 32) x (q - 4), for each 16 numbers s of 6 bits
          is bit j of byte i; 64 as in Q2_K;
          12 bytes; d
    Q4_K  d, m, 12 bytes, 128 bytes: of each 32   d x s x q - m x t, for each 32 numbers s and t of 6 bits
          the low 4 bits are 32 numbers, then the
          high ones the next 32
    Q5_K  as Q4_K, between them 32 bytes: bit 4   as above
          of numbers 32 j + i is bit j of byte i
    Q6_K  128 + 64 bytes: low 4 and high 2 bits,  d x s x (q - 32), for each 16 numbers s, int8
          16 int8, d
    IQ4_NL  d, 16 bytes as Q4_0                   d x table[q], 16 values that are not evenly spaced
    IQ4_XS  d, 2 + 4 bytes: high 2 and low 4      d x (s - 32) x table[q], for each 32 numbers s of 6 bits
            bits of s; 128 bytes, 16 for each 32
            numbers as Q4_0
    MXFP4   a byte e, 16 bytes as Q4_0            2^(e - 127) x the e2m1 number q

Q8_0, Q4_0 and MXFP4 are int8, int4 and e2m1 in groups of 32, symmetric: a `Scheme`. The others have no such words:
their offset is a float, not a code, or their values have a table of their own. They are kept as they lie in the file,
too. The kinds of fewer bits (IQ1 to IQ3), whose values lie in tables of hundreds of vectors, are not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from reference_impl.interfaces import TensorSpec
from reference_impl.models.quantization.layouts import Coded
from reference_impl.models.quantization.numbers import e8m0_to_scales
from reference_impl.models.quantization.scheme import Fitted, Scheme

# name -> (numbers of a block, its bytes)
BLOCKS = {
    "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24), "Q8_0": (32, 34), "Q2_K": (256, 84),
    "Q3_K": (256, 110), "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210), "IQ4_NL": (32, 18),
    "IQ4_XS": (256, 136), "MXFP4": (32, 17),
}  # fmt: skip
# The bytes at which a block's float16 numbers begin, d and m; of MXFP4 there is none.
HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,), "MXFP4": (),
}  # fmt: skip
_MOST_EXPONENT = 252  # of MXFP4: 6 x 2^(252 - 127) is still a float32
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)  # kvalues_iq4nl of ggml-common.h
_SCHEMES = {
    "Q8_0": Scheme("int8", "group", 32, scale_dtype=torch.float16),
    "Q4_0": Scheme("int4", "group", 32, scale_dtype=torch.float16),
    "MXFP4": Scheme("e2m1", "group", 32, scales="e8m0"),
}


@dataclass(frozen=True)
class GgufBlocks:
    """A `Layout`: weight uint8 [out, bytes of a row]. kind: one of BLOCKS."""

    kind: str
    activations: None = None

    @property
    def scheme(self) -> Scheme | None:
        return _SCHEMES.get(self.kind)

    def specs(self, in_features: int, out_features: int) -> dict[str, TensorSpec]:
        numbers, size = BLOCKS[self.kind]
        if in_features % numbers:
            raise ValueError(f"{self.kind}: expected rows of whole blocks of {numbers}, got {in_features}")
        return {"weight": TensorSpec((out_features, in_features // numbers * size), (torch.uint8,))}

    def check(self, name: str, tensor: Tensor) -> None:
        check_blocks(tensor, self.kind)

    def weight(self, tensors: Mapping[str, Tensor], in_features: int) -> Tensor:
        return decode_blocks(tensors["weight"], self.kind)

    def coded(self, tensors: Mapping[str, Tensor], in_features: int) -> Coded | None:
        return codes_of(tensors["weight"], self.kind) if self.kind in _SCHEMES else None


def check_blocks(raw: Tensor, kind: str) -> None:
    """Raises ValueError for uint8 [..., bytes of a row] with scales or offsets that stand for no number. They may be 0,
    and negative."""
    blocks = raw.unflatten(-1, (-1, BLOCKS[kind][1]))
    good = [_half(blocks, start).isfinite() for start in HALVES[kind]]
    if kind == "MXFP4":
        good = [blocks[..., :1] <= _MOST_EXPONENT]
    if wrong := sum(int((~one).sum()) for one in good):
        raise ValueError(
            f"{kind}: expected finite scales in each of {blocks[..., 0].numel()} blocks, found {wrong} that are NaN, "
            "infinite or too large: the file is damaged, or was written by a tool that failed; download it again"
        )


def decode_blocks(raw: Tensor, kind: str) -> Tensor:
    """The numbers of whole blocks: uint8 [rows, bytes] -> float32 [rows, numbers]."""
    if kind in _SCHEMES:
        return codes_of(raw, kind).weight()
    blocks = raw.unflatten(1, (-1, BLOCKS[kind][1]))
    return _DECODERS[kind](blocks).flatten(1)


def codes_of(raw: Tensor, kind: str) -> Coded:
    """The codes of Q8_0, Q4_0 or MXFP4, [rows, numbers], which `tensors_of` writes as compressed-tensors. A scale may
    be 0, and of Q4_0 negative: its largest number has the code -8, whatever its sign."""
    blocks = raw.unflatten(1, (-1, BLOCKS[kind][1]))
    if kind == "MXFP4":  # e2m1's codes are in the same order
        return Coded(_SCHEMES[kind], _halves(blocks[..., 1:]).flatten(1), Fitted(e8m0_to_scales(blocks[..., 0])))
    scales, rest = _half(blocks, 0).squeeze(2), blocks[..., 2:]
    codes = rest.contiguous().view(torch.int8) if kind == "Q8_0" else _halves(rest).to(torch.int8) - 8
    return Coded(_SCHEMES[kind], codes.flatten(1), Fitted(scales))


def _half(blocks: Tensor, start: int) -> Tensor:
    """The float16 that begins at a byte of each block, as float32 [rows, blocks, 1]."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16).float()


def _halves(bytes_: Tensor) -> Tensor:
    """Half-bytes [..., n] -> [..., 2 n]: all low 4 bits, then all high ones."""
    return torch.cat((bytes_ & 15, bytes_ >> 4), -1)


def _bits(bytes_: Tensor) -> Tensor:
    """Bits [..., n] -> [..., 8 n] of 0 or 1: the lowest bit of a byte first."""
    return (bytes_[..., None] >> torch.arange(8, dtype=torch.uint8, device=bytes_.device) & 1).flatten(-2)


def _q4_1(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * _halves(blocks[..., 4:]).float() + _half(blocks, 2)


def _q5_0(blocks: Tensor) -> Tensor:
    codes = _halves(blocks[..., 6:]) | _bits(blocks[..., 2:6]) << 4
    return _half(blocks, 0) * (codes.float() - 16)


def _q5_1(blocks: Tensor) -> Tensor:
    codes = _halves(blocks[..., 8:]) | _bits(blocks[..., 4:8]) << 4
    return _half(blocks, 0) * codes.float() + _half(blocks, 2)


def _twos(bytes_: Tensor) -> Tensor:
    """Pairs of bits [..., n] -> [..., 4, n]: the lowest 2 bits of each byte, then the next ones."""
    return bytes_[..., None, :] >> torch.arange(0, 8, 2, dtype=torch.uint8, device=bytes_.device)[:, None] & 3


def _q2_k(blocks: Tensor) -> Tensor:
    codes = _twos(blocks[..., 16:80].unflatten(-1, (2, 32))).flatten(-3).unflatten(-1, (16, 16)).float()
    scales = _half(blocks, 80) * (blocks[..., :16] & 15).float()
    offsets = _half(blocks, 82) * (blocks[..., :16] >> 4).float()
    return scales[..., None] * codes - offsets[..., None]


def _q3_k(blocks: Tensor) -> Tensor:
    """The numbers of Q3_K. Of its 12 bytes 8 have the low 4 bits of factors 0 to 7, and in their high bits those of 8
    to 15; 4 have the high 2 bits of all, four factors after the other."""
    high = _bits(blocks[..., :32]).unflatten(-1, (32, 8)).transpose(-1, -2)
    low = _twos(blocks[..., 32:96].unflatten(-1, (2, 32))).flatten(-3, -2)
    codes = (low | high << 2).flatten(-2).unflatten(-1, (16, 16)).float() - 4
    factors = _halves(blocks[..., 96:104]) | _twos(blocks[..., 104:108]).flatten(-2) << 4
    return (_half(blocks, 108) * (factors.float() - 32))[..., None] * codes


def _sixes(bytes_: Tensor) -> tuple[Tensor, Tensor]:
    """12 bytes -> (8 factors of the scale, 8 of the offset), float32, 6 bits each: four of either in the low bits of
    four bytes each, and of the other four 4 bits in the last bytes, whose high 2 lie above the first four."""
    scale, offset, both = bytes_.unflatten(-1, (3, 4)).unbind(-2)
    scales = torch.cat((scale & 63, both & 15 | scale >> 6 << 4), -1)
    offsets = torch.cat((offset & 63, both >> 4 | offset >> 6 << 4), -1)
    return scales.float(), offsets.float()


def _k(blocks: Tensor, codes: Tensor) -> Tensor:
    """The numbers of Q4_K and Q5_K. codes [rows, blocks, 8, 32]."""
    scales, offsets = _sixes(blocks[..., 4:16])
    return (_half(blocks, 0) * scales)[..., None] * codes.float() - (_half(blocks, 2) * offsets)[..., None]


def _fours(bytes_: Tensor) -> Tensor:
    """Half-bytes of 128 bytes -> [..., 8, 32]."""
    return _halves(bytes_.unflatten(-1, (4, 32))).unflatten(-1, (2, 32)).flatten(-3, -2)


def _q4_k(blocks: Tensor) -> Tensor:
    return _k(blocks, _fours(blocks[..., 16:]))


def _q5_k(blocks: Tensor) -> Tensor:
    high = _bits(blocks[..., 16:48]).unflatten(-1, (32, 8)).transpose(-1, -2)
    return _k(blocks, _fours(blocks[..., 48:]) | high << 4)


def _q6_k(blocks: Tensor) -> Tensor:
    low = _halves(blocks[..., :128].unflatten(-1, (2, 64))).unflatten(-1, (4, 32))
    high = _twos(blocks[..., 128:192].unflatten(-1, (2, 32)))
    codes = (low | high << 4).flatten(-3).unflatten(-1, (16, 16)).float() - 32
    scales = blocks[..., 192:208].contiguous().view(torch.int8).float() * _half(blocks, 208)
    return scales[..., None] * codes


def _from_table(codes: Tensor) -> Tensor:
    return torch.tensor(_IQ4, dtype=torch.float32, device=codes.device)[codes.int()]


def _iq4_nl(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * _from_table(_halves(blocks[..., 2:]))


def _iq4_xs(blocks: Tensor) -> Tensor:
    """IQ4_XS: factor k has its high bits at bit 2 k of the two bytes, its low ones in byte k / 2: first the low
    half."""
    low = torch.stack((blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4), -1).flatten(-2)
    high = _twos(blocks[..., 2:4]).transpose(-1, -2).flatten(-2)
    scales = _half(blocks, 0) * ((low | high << 4).float() - 32)
    return scales[..., None] * _from_table(_halves(blocks[..., 8:].unflatten(-1, (8, 16))))


_DECODERS = {
    "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k,
    "Q6_K": _q6_k, "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs,
}  # fmt: skip
