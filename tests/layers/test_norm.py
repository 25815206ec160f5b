"""The norm of a few numbers is the norm of many, whichever operators it is made of."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from reference_impl.features.cpu.operators import rms_norm

D = 96
FILLED: dict[str, Callable[[Tensor], Tensor]] = {
    "random": lambda x: x,
    "around a mean": lambda x: x + 50,
    "all equal": lambda x: torch.full_like(x, 3),
    "one large": lambda x: torch.where(torch.arange(D) == 7, 200.0, x),
    "small beside eps": lambda x: x * 1e-4,
    "zero": torch.zeros_like,
}


def exact(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * (1 if weight is None else weight.double())


@pytest.mark.parametrize("filled", FILLED)
@pytest.mark.parametrize("shape", [(D,), (1, D), (5, D), (2, 4, D), (40, D)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_it_is_what_the_formula_says(dtype: torch.dtype, shape: tuple[int, ...], filled: str) -> None:
    torch.manual_seed(0)
    x = FILLED[filled](torch.randn(shape)).to(dtype)
    for weight in (None, torch.randn(D).to(dtype)):
        got = rms_norm(x, weight, 1e-6)
        assert (got.dtype, got.shape) == (dtype, x.shape)
        error = (got.double() - exact(x, weight, 1e-6)).abs()
        # Rounded twice at most, before and after the weight; where sums are of float32, it costs a little besides.
        besides = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
        assert (error <= 4 * torch.finfo(dtype).eps * exact(x, weight, 1e-6).abs() + besides * (x != 0)).all()


def test_few_and_many_differ_by_rounding_only() -> None:
    torch.manual_seed(1)
    x, weight = torch.randn(64, D), torch.randn(D)
    many = rms_norm(x, weight, 1e-5)
    for row in range(0, 64, 8):
        for rows in (1, 3):
            few = rms_norm(x[row : row + rows], weight, 1e-5)
            torch.testing.assert_close(few, many[row : row + rows], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1e17, 1e30, 3e38])
def test_numbers_whose_squares_are_beyond_float32_are_torch_s_in_one_row_in_few_and_in_many(
    size: float, dtype: torch.dtype
) -> None:
    """Zeros, as F.rms_norm has them, where their sum is infinite: no row becomes NaN since others are there."""
    torch.manual_seed(2)
    x, weight = (torch.randn(64, D).sign() * size).to(dtype), torch.randn(D).to(dtype)
    expected = F.rms_norm(x, (D,), weight, 1e-6)
    assert expected.isfinite().all()
    for rows in (1, 2, 5, 20, 64):
        torch.testing.assert_close(rms_norm(x[:rows], weight, 1e-6), expected[:rows])


def test_a_weight_of_float32_keeps_its_precision() -> None:
    x, weight = torch.randn(2, D).bfloat16(), 1 + torch.randn(D) / 1000
    got = rms_norm(x, weight, 1e-6)
    assert got.dtype is torch.bfloat16
    assert torch.equal(got, exact(x, weight, 1e-6).float().bfloat16())


def test_what_comes_out_of_a_few_can_be_multiplied_and_viewed() -> None:
    """Products, views by head and in-place operations have to take it."""
    x = torch.randn(3, D)
    y = rms_norm(x, None, 1e-6)
    assert torch.allclose(y @ torch.eye(D), y)
    assert y.view(3, 4, -1).shape == (3, 4, D // 4)
    y.mul_(2)
    assert torch.allclose(y, 2 * exact(x, None, 1e-6).float())
