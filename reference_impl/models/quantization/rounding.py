"""A weight matrix as small integers and scales: rounding to nearest, symmetric, with nothing but the weight at hand.

w is about code x scale. The scale follows from the largest magnitude of the weights that share it, and is rounded to
its own dtype before the codes are chosen, so that its rounding costs next to nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP_SIZES = (128, 64, 32)  # what the kernels know
INT4_REACH, INT8_REACH = 7.5, 127  # the largest magnitude, in scales


def group_size_for(in_features: int) -> int:
    """The largest of 128, 64 and 32 that divides in_features. Raises ValueError where none does."""
    for size in GROUP_SIZES:
        if in_features % size == 0:
            return size
    raise ValueError(
        f"quantization 'int4': expected linear layers whose inputs are a multiple of {GROUP_SIZES[-1]}, got one with "
        f"{in_features}: use quantization='int8', which has no groups"
    )


def quantize_int4(weight: Tensor, group_size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(codes, scales) with weight [out, in] about (codes - 8) x scale.

    codes [out, in] uint8, 0 to 15; scales [in / group_size, out] in dtype, largest magnitude of the group / 7.5: code
    15 stands for what lies around 7 scales, to 7.5 on the far side. Zero stays zero. An error is at most scale / 2,
    plus 7.5 scale times the relative rounding of the scale (2^-9 in bfloat16).
    """
    codes, scales = _round(weight.unflatten(1, (-1, group_size)), INT4_REACH, dtype)
    return (codes.clamp(-8, 7) + 8).to(torch.uint8).flatten(1), scales.T.contiguous()


def quantize_int8(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(codes, scales) with weight [out, in] about codes x scale.

    codes [out, in] int8, -127 to 127; scales [1, out] in dtype, largest magnitude of the row / 127. An error is at most
    scale / 2.
    """
    codes, scales = _round(weight, INT8_REACH, dtype)
    return codes.clamp(-127, 127).to(torch.int8), scales[None]


def _round(weight: Tensor, reach: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(codes, scales), where the last dimension shares a scale; codes are not clamped yet.

    A scale is at least 2^7 of the smallest steps of its dtype: so it is not 0, and its rounding moves no code by more
    than a half.
    """
    smallest = max(2**7 * torch.finfo(dtype).tiny * torch.finfo(dtype).eps, torch.finfo(torch.float32).tiny)
    exact = weight.to(torch.promote_types(weight.dtype, torch.float32))
    scales = (exact.abs().amax(-1) / reach).clamp(min=smallest).to(dtype)
    return (exact / scales.to(exact.dtype)[..., None]).round(), scales
