"""How a weight matrix is stored as codes and scales: said by a `Scheme`; `fit`, `encode` and `decode` compute it.

A weight is about (code - zero) x scale x tensor scale, where code is what the format's code stands for (`numbers.py`).
The scales are chosen from the extremes of the weights that share one (rounding to nearest); other methods change the
weight, or the scales, and then `encode` with them. All three functions also take some columns of a matrix, if these are
a group or lie within one: GPTQ goes column by column.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, prod
from typing import Literal

import torch
from torch import Tensor

from reference_impl.models.quantization.numbers import FORMATS, nearest_e4m3_scale, to_codes, to_values

BLOCK = 128  # rows and columns of a block that shares a scale, where nothing else is said
NumbersName = Literal["int2", "int3", "int4", "int5", "int6", "int7", "int8", "e4m3", "e5m2", "e2m1", "nf4", "ternary"]
EXPONENT = {"e2m1": 2, "e4m3": 8, "e5m2": 15}  # of the largest number: what an e8m0 scale is set by


@dataclass(frozen=True)
class Activations:
    """How a product rounds its input before it multiplies. per "group": group_size inputs share a scale. scales: see
    `Scheme`; with "e4m3" the checkpoint has what each is divided by, one number for the tensor (NVFP4), or, of torchao,
    what each is multiplied with, if that is not dynamic. rule: whose rule chooses scales of a byte."""

    numbers: Literal["int8", "e4m3", "e2m1"]
    per: Literal["tensor", "token", "group"] = "token"
    dynamic: bool = True  # its scale comes from the numbers at hand; else one that the checkpoint has
    group_size: int | None = None
    symmetric: bool = True
    scales: Literal["float", "e4m3", "e8m0"] = "float"
    rule: Literal["compressed-tensors", "torchao"] = "compressed-tensors"

    @property
    def in_checkpoint(self) -> bool:
        """Whether the checkpoint has a scale for it, which may differ between parts of a layer."""
        return not self.dynamic or self.scales == "e4m3"


@dataclass(frozen=True)
class Scheme:
    """How a matrix [out, in] is stored.

    per: what shares a scale: the tensor; a channel (an output's row); a group of inputs of a row; a block.
    block: (outputs, inputs) of a block.
    symmetric: else there is a zero point beside each scale, an integer in the codes' range (int2 to int8 only).
    scales: "float" of scale_dtype; "e4m3" with one float32 for the tensor (NVFP4); "e8m0", powers of two (MX).
    ValueError for what does not go together.
    """

    numbers: NumbersName
    per: Literal["tensor", "channel", "group", "block"]
    group_size: int | None = None
    symmetric: bool = True
    scales: Literal["float", "e4m3", "e8m0"] = "float"
    activations: Activations | None = None
    scale_dtype: torch.dtype = torch.bfloat16
    block: tuple[int, int] = (BLOCK, BLOCK)

    def __post_init__(self) -> None:
        if self.numbers not in FORMATS:
            raise ValueError(f"numbers: expected one of {', '.join(FORMATS)}, got {self.numbers!r}")
        if self.per not in ("tensor", "channel", "group", "block"):
            raise ValueError(f"per: expected tensor, channel, group or block, got {self.per!r}")
        if (self.per == "group") != (self.group_size is not None) or (self.group_size or 1) < 1:
            raise ValueError(f"group_size: expected a number of inputs, for per='group' only, got {self.group_size!r}")
        if not self.symmetric and not self.numbers.startswith("int"):
            raise ValueError(f"symmetric=False: expected integers, got {self.numbers}, which has no zero points")
        if min(self.block) < 1:
            raise ValueError(f"block: expected (outputs, inputs), 1 or more each, got {self.block}")
        if self.scales == "e8m0" and self.numbers not in EXPONENT:
            raise ValueError(f"scales='e8m0': expected floats, {', '.join(EXPONENT)}, got {self.numbers}")

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """How many scales a matrix [out, in] has, by rows and columns. Raises ValueError for a part of a group."""
        rows, columns = shape
        if self.per == "group":
            assert self.group_size is not None
            if columns % self.group_size:
                raise ValueError(f"groups of {self.group_size} inputs: expected a multiple of them, got {columns}")
            return rows, columns // self.group_size
        if self.per == "block":
            return ceil(rows / self.block[0]), ceil(columns / self.block[1])
        return (rows, 1) if self.per == "channel" else (1, 1)

    def bits_per_weight(self, shape: tuple[int, ...]) -> float:
        """Bits per weight, [out, in] stored packed: codes, scales, zero points (as wide as a code) and tensor scale."""
        bits, scale_bits = FORMATS[self.numbers].bits, 8 * self.scale_dtype.itemsize if self.scales == "float" else 8
        scales = prod(self.scale_shape(shape)) * (scale_bits + (0 if self.symmetric else bits))
        return bits + (scales + (32 if self.scales == "e4m3" else 0)) / prod(shape)


@dataclass
class Fitted:
    """What codes are multiplied with. All on the weight's device.

    scales: float32, of `Scheme.scale_shape`: [1, 1], [out, 1], [out, in / group_size] or, of blocks, [out / block[0],
        in / block[1]] rounded up; exactly numbers of the scheme's scale format. zeros: int8 of the same shape, or None:
        0 everywhere.
    tensor_scale: float32 [], what each e4m3 scale is multiplied with, the reciprocal of a float32; else None.
    """

    scales: Tensor
    zeros: Tensor | None = None
    tensor_scale: Tensor | None = None

    def steps(self) -> Tensor:
        """What a code is multiplied with, float32, the shape of scales."""
        return self.scales if self.tensor_scale is None else self.scales * self.tensor_scale


def fit(weight: Tensor, scheme: Scheme, tensor_scale: Tensor | None = None) -> Fitted:
    """The scales from the extremes of what shares a scale (ternary: from the mean magnitude).

    weight [out, in] of any float dtype, or columns of it that make whole groups. tensor_scale: that of the whole
    matrix, for columns of a matrix whose scheme has one. Raises ValueError for numbers that are not finite.
    """
    if not bool(weight.isfinite().all()):
        raise ValueError("weight: expected finite numbers, got NaN or infinity")
    numbers, (low, high) = FORMATS[scheme.numbers], _extremes(weight.float(), scheme)
    largest = torch.maximum(-low, high)
    if scheme.scales == "e8m0":
        exponents = torch.frexp(largest)[1] - 1 - EXPONENT[scheme.numbers]
        exponents = torch.where(largest > 0, exponents, torch.full_like(exponents, -127)).clamp(-127, 127)
        return Fitted(torch.ldexp(torch.ones_like(largest), exponents))
    if scheme.scales == "e4m3":
        if tensor_scale is None:
            tensor_scale = (weight.float().abs().amax() / (448.0 * numbers.reach)).clamp(min=2.0**-100)
            tensor_scale = 1 / (1 / tensor_scale)  # checkpoints have its reciprocal: so nothing is lost in them
        return Fitted(nearest_e4m3_scale(largest / (numbers.reach * tensor_scale)), tensor_scale=tensor_scale)
    if scheme.symmetric:
        return Fitted(_rounded_scales(largest / numbers.reach, scheme))
    assert numbers.least is not None
    scales = _rounded_scales((high - low) / (2 * numbers.reach), scheme)
    zeros = (numbers.least - low / scales).round().clamp(numbers.least, numbers.most)
    return Fitted(scales, zeros.to(torch.int8))


def encode(weight: Tensor, scheme: Scheme, fitted: Fitted) -> Tensor:
    """Codes [out, in], one an element, of the dtype that `numbers.py` says: the nearest to each weight."""
    quotients = weight.float() / spread(fitted.steps(), scheme, weight.shape)
    if fitted.zeros is not None:
        quotients = quotients + spread(fitted.zeros, scheme, weight.shape)
    return to_codes(quotients, scheme.numbers)


def decode(codes: Tensor, scheme: Scheme, fitted: Fitted) -> Tensor:
    """The weight that the codes stand for, float32 [out, in]."""
    values = to_values(codes, scheme.numbers)
    if fitted.zeros is not None:
        values = values - spread(fitted.zeros, scheme, codes.shape)
    return values * spread(fitted.steps(), scheme, codes.shape)


def spread(scales: Tensor, scheme: Scheme, shape: tuple[int, ...]) -> Tensor:
    """Scales or zeros of `Scheme.scale_shape` so that they broadcast over [out, in]. One column serves any number."""
    if scheme.per == "block":
        scales = scales.repeat_interleave(scheme.block[0], 0)[: shape[0]]
    if scales.shape[1] == 1:
        return scales
    each = scheme.block[1] if scheme.per == "block" else shape[1] // scales.shape[1]
    return scales.repeat_interleave(each, 1)[:, : shape[1]]


def _extremes(weight: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """(smallest, largest) of what shares a scale, of its shape; 0 counts, so that zero has a code. For ternary numbers
    the mean magnitude stands for the largest."""
    rows, columns = scheme.scale_shape(tuple(weight.shape))
    if scheme.per == "block":
        missing = columns * scheme.block[1] - weight.shape[1], rows * scheme.block[0] - weight.shape[0]
        weight = torch.nn.functional.pad(weight, (0, missing[0], 0, missing[1]))
    pieces = weight.reshape(rows, weight.shape[0] // rows, columns, weight.shape[1] // columns)
    if scheme.numbers == "ternary":
        mean = pieces.abs().mean((1, 3))
        return -mean, mean
    return pieces.amin((1, 3)).clamp(max=0), pieces.amax((1, 3)).clamp(min=0)


def _rounded_scales(exact: Tensor, scheme: Scheme) -> Tensor:
    """The scales in scheme.scale_dtype, as float32. They are at least 2^7 of its smallest steps: so no scale is 0, and
    its rounding moves no code by more than a half."""
    info = torch.finfo(scheme.scale_dtype)
    smallest = max(2**7 * info.tiny * info.eps, torch.finfo(torch.float32).tiny)
    return exact.clamp(smallest, info.max).to(scheme.scale_dtype).float()
