"""A row with NaN or infinity stays one in every kernel of rows and products, as in its twin; the others stay equal."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from reference_impl.kernels import reference
from reference_impl.kernels.fused_linear import fused_linear
from reference_impl.kernels.gates import gelu_tanh_and_mul, silu_and_mul
from reference_impl.kernels.gates_fp8 import silu_and_mul_fp8
from reference_impl.kernels.gemm import gemm
from reference_impl.kernels.gemm_fp8 import gemm_fp8
from reference_impl.kernels.gemm_w8a8 import gemm_w8a8
from reference_impl.kernels.gemm_w8a16 import gemm_w8a16
from reference_impl.kernels.quantize_rows import quantize_groups_fp8, quantize_rows_fp8, quantize_rows_int8
from reference_impl.kernels.rms_norm import add_rms_norm, add_rms_norm_fp8, rms_norm
from reference_impl.kernels.rotate_and_write import rotate_and_write
from tests.kernels.paged import DEVICE

BAD = pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
ROW, COLUMN = 1, 5  # of the number that is none


def rows(bad: float, width: int, dtype: torch.dtype = torch.float16) -> Tensor:
    x = torch.randn(3, width, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[ROW, COLUMN] = bad
    return x.to(DEVICE)


def fine(x: Tensor) -> Tensor:
    return torch.where(x.isfinite(), x, 0)


@BAD
@pytest.mark.parametrize(
    ("quantize", "twin"),
    [
        (quantize_rows_int8, reference.quantize_rows_int8),
        (quantize_rows_fp8, reference.quantize_rows_fp8),
        (quantize_groups_fp8, reference.quantize_groups_fp8),
        (silu_and_mul_fp8, reference.silu_and_mul_fp8),
        (
            lambda x: add_rms_norm_fp8(x, torch.zeros_like(x), None, 1e-6)[:2],
            lambda x: reference.add_rms_norm_fp8(x, torch.zeros_like(x), None, 1e-6)[:2],
        ),
    ],
    ids=["int8", "fp8", "fp8 groups", "silu to fp8", "norm to fp8"],
)
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy, in the interpreter
def test_what_shares_a_scale_with_a_number_that_is_none_has_the_scale_nan(
    bad: float, quantize: Callable[[Tensor], tuple[Tensor, Tensor]], twin: Callable[[Tensor], tuple[Tensor, Tensor]]
) -> None:
    """Whatever its codes are, no product of them is a number."""
    x = rows(bad, 260)
    (codes, scale), (_, expected) = quantize(x), twin(x)
    assert torch.equal(scale.isnan(), expected.isnan())
    broken = torch.zeros_like(scale, dtype=torch.bool)
    broken[ROW, 0 if scale.dim() == 2 else ...] = True
    assert torch.equal(scale.isnan(), broken)
    same_codes, same_scale = quantize(fine(x))
    others = [row for row in range(3) if row != ROW]
    assert torch.equal(codes.view(torch.uint8)[others], same_codes.view(torch.uint8)[others])
    assert torch.equal(scale[~broken], same_scale[~broken])


WEIGHT = torch.randn(48, 64, generator=torch.Generator().manual_seed(1))
INT8 = (WEIGHT * 30).to(torch.int8).to(DEVICE)
NORM = torch.ones(64, dtype=torch.float16, device=DEVICE)


Layer = Callable[[Tensor], Tensor]


def by_codes(
    product: Callable[..., Tensor], quantize: Callable[[Tensor], tuple[Tensor, Tensor]], weight: Tensor
) -> Layer:
    weight_scale = torch.full((48,), 0.03, device=DEVICE)
    return lambda x: product(*quantize(x), weight.to(DEVICE), weight_scale, torch.float16)


def added(norm: Callable[..., tuple[Tensor, Tensor]]) -> Layer:
    return lambda x: norm(x, x, NORM, 1e-6)[0]


PRODUCTS: dict[str, list[Layer]] = {
    "gemm": [partial(f, weight=WEIGHT.half().to(DEVICE)) for f in (gemm, reference.gemm)],
    "w8a16": [
        partial(f, weight=INT8, scales=torch.full((1, 48), 0.03, device=DEVICE))
        for f in (gemm_w8a16, reference.gemm_w8a16)
    ],
    "fused": [
        partial(f, weight=WEIGHT.half().to(DEVICE), norm=NORM, eps=1e-6, gate="silu")
        for f in (fused_linear, reference.fused_linear)
    ],
    "w8a8": [
        by_codes(gemm_w8a8, quantize_rows_int8, INT8),
        by_codes(reference.gemm_w8a8, reference.quantize_rows_int8, INT8),
    ],
    "fp8": [
        by_codes(gemm_fp8, quantize_rows_fp8, WEIGHT.to(torch.float8_e4m3fn)),
        by_codes(reference.gemm_fp8, reference.quantize_rows_fp8, WEIGHT.to(torch.float8_e4m3fn)),
    ],
    "norm": [partial(f, weight=NORM, eps=1e-6) for f in (rms_norm, reference.rms_norm)],
    "add and norm": [added(add_rms_norm), added(reference.add_rms_norm)],
    "silu": [silu_and_mul, reference.silu_and_mul],
    "gelu": [gelu_tanh_and_mul, reference.gelu_tanh_and_mul],
}


@BAD
@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")  # numpy, in the interpreter
def test_a_row_with_a_number_that_is_none_gives_what_its_twin_gives(name: str, bad: float) -> None:
    kernel, twin = PRODUCTS[name]
    x = rows(bad, 64)
    found, expected = kernel(x), twin(x)
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.isposinf(), expected.isposinf())
    assert torch.equal(found.isneginf(), expected.isneginf())
    assert not found[ROW].isfinite().all()
    others = [row for row in range(3) if row != ROW]
    assert torch.equal(found[others], kernel(fine(x))[others])


@BAD
@pytest.mark.parametrize("cache", [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8])
@pytest.mark.parametrize("function", [rotate_and_write, reference.rotate_and_write], ids=["kernel", "twin"])
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy, in the interpreter
def test_a_head_with_a_number_that_is_none_has_the_scale_nan_in_a_cache(
    bad: float, cache: torch.dtype, function: Callable[..., Tensor]
) -> None:
    """The value of one head. What is read of it is NaN, all else is as it was."""
    tokens, kv_heads, head_dim, four = 3, 2, 16, cache is torch.uint8
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(tokens, kv_heads, head_dim, generator=random).half().to(DEVICE) for _ in range(3))
    table = torch.ones(tokens, 1, head_dim, device=DEVICE)
    order = torch.arange(tokens, dtype=torch.int32, device=DEVICE)

    def scales(values: Tensor) -> Tensor:
        stored = [torch.zeros(1, 4, kv_heads, head_dim // (1 + four), dtype=cache, device=DEVICE) for _ in range(2)]
        shape, dtype = ((1, 4, kv_heads, 2), torch.float16) if four else ((1, 4, kv_heads), torch.float32)
        key_scale, value_scale = (torch.zeros(shape, dtype=dtype, device=DEVICE) for _ in range(2))
        function(q, k, values, order, table, table, *stored, order, key_scale=key_scale, value_scale=value_scale)
        return value_scale[..., 0] if four else value_scale

    expected = scales(v)
    v[ROW, 1, COLUMN] = bad
    found = scales(v)
    broken = torch.zeros_like(found, dtype=torch.bool)
    broken[0, ROW, 1] = True
    assert torch.equal(found.isnan(), broken)
    assert torch.equal(found[~broken], expected[~broken])
