"""A weight as integers and scales: the error that the docstrings promise, on weights that are out to break it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from reference_impl.models.quantization.rounding import group_size_for, quantize_int4, quantize_int8

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def weights(in_features: int) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(0)
    normal = torch.randn(24, in_features, generator=random)
    one_large = normal.clone()
    one_large[:, 3] = -300
    return {
        "normal": normal / 30,
        "bfloat16": normal.bfloat16(),
        "one large among small": one_large,
        "all equal": torch.full((5, in_features), -0.37),
        "zero": torch.zeros(3, in_features),
        "tiny": normal * 1e-30,
        "one row": normal[:1],
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_int4_errs_by_half_a_step(group_size: int, dtype: torch.dtype) -> None:
    tiny, eps = torch.finfo(dtype).tiny, torch.finfo(dtype).eps
    for name, weight in weights(256).items():
        codes, scales = quantize_int4(weight, group_size, dtype)
        assert codes.dtype is torch.uint8
        assert codes.shape == weight.shape
        assert scales.dtype is dtype
        assert scales.shape == (256 // group_size, len(weight))
        assert int(codes.max()) <= 15
        step = scales.double().T.repeat_interleave(group_size, 1)
        error = (weight.double() - (codes.double() - 8) * step).abs()
        assert bool((error <= step * (0.5 + 7.5 * eps / 2) + step * 8 * 2.0**-24).all()), name
        largest = weight.double().unflatten(1, (-1, group_size)).abs().amax(-1).T
        assert bool((scales.double() <= (largest / 7.5).clamp(min=tiny) * (1 + eps / 2)).all()), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_int8_errs_by_half_a_step(dtype: torch.dtype) -> None:
    for name, weight in weights(200).items():
        codes, scales = quantize_int8(weight, dtype)
        assert codes.dtype is torch.int8
        assert codes.shape == weight.shape
        assert scales.dtype is dtype
        assert scales.shape == (1, len(weight))
        assert -127 <= int(codes.min()) <= int(codes.max()) <= 127
        step = scales.double().T
        # w / scale is a float32 below 128 before it is rounded to a whole number.
        error = (weight.double() - codes.double() * step).abs()
        assert bool((error <= step * (0.5 + 128 * 2.0**-24)).all()), name
        largest = weight.double().abs().amax(-1)
        limit = (largest / 127).clamp(min=torch.finfo(dtype).tiny) * (1 + torch.finfo(dtype).eps / 2)
        assert bool((scales[0].double() <= limit).all()), name


@pytest.mark.parametrize("largest", [0.03, 0.004, 0.001])
def test_a_row_of_small_weights_keeps_its_bits_in_float16(largest: float) -> None:
    """Scales may be subnormal numbers, as long as their rounding moves no code by more than half."""
    weight = torch.randn(24, 64, generator=torch.Generator().manual_seed(3))
    weight *= largest / weight.abs().amax(1, keepdim=True)
    for quantize, zero, levels in ((quantize_int8, 0, 127), (lambda w, d: quantize_int4(w, 64, d), 8, 7.5)):
        codes, scales = quantize(weight, torch.float16)
        error = (weight.double() - (codes.double() - zero) * scales.double().T).abs()
        assert float(error.max()) < 0.51 * largest / levels * (1 + 2.0**-7)


def test_zero_stays_zero() -> None:
    weight = torch.randn(4, 64, generator=torch.Generator().manual_seed(1))
    weight[:, ::3] = 0
    assert bool((quantize_int4(weight, 32, torch.float16)[0][:, ::3] == 8).all())
    assert bool((quantize_int8(weight, torch.float16)[0][:, ::3] == 0).all())


def test_a_row_is_rounded_as_if_it_were_alone() -> None:
    """So a tensor may be rounded in any pieces of rows."""
    weight = torch.randn(7, 96, generator=torch.Generator().manual_seed(2))
    for quantize in (lambda w: quantize_int4(w, 32, torch.bfloat16), lambda w: quantize_int8(w, torch.bfloat16)):
        codes, scales = quantize(weight)
        for row in range(7):
            alone = quantize(weight[row : row + 1])
            assert torch.equal(alone[0][0], codes[row])
            assert torch.equal(alone[1][:, 0], scales[:, row])


@pytest.mark.parametrize(("in_features", "size"), [(4096, 128), (576, 64), (96, 32), (192, 64), (128, 128)])
def test_the_largest_group_that_divides(in_features: int, size: int) -> None:
    assert group_size_for(in_features) == size


def test_no_group_divides() -> None:
    with pytest.raises(ValueError, match="a multiple of 32, got one with 48: use quantization='int8'"):
        group_size_for(48)
