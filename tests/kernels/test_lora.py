"""Adapters of a ragged batch against their twins and float64, in the interpreter or on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from reference_impl.kernels import lora as module
from reference_impl.kernels import reference
from reference_impl.kernels.lora import lora_expand, lora_shrink
from tests.kernels.paged import DEVICE, check

DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()
INDEX = {
    "one token": [2],
    "one token without": [-1],
    "nobody has one": [-1] * 20,
    "all the same": [3] * 37,
    "all differ": list(range(33, -1, -1)),
    "runs": [1] * 16 + [0] * 17 + [-1] * 5 + [1] * 3 + [4] * 30,
    "in turn": [0, 1, -1] * 13,
    "more adapters in a tile than lanes": [*range(20), *range(20)],
    "only other negative numbers": [-2, -7, 5],
}

SOME = [(1, torch.float16), (17, torch.float32), (24, torch.float16), (100, torch.float32)]


def make(
    index: list[int], rank: int, in_features: int, out_features: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x, a, b, adapter_index, out."""
    random = torch.Generator().manual_seed(len(index))
    adapters, tokens = max(0, *index) + 1, len(index)
    shapes = (
        (tokens, in_features),
        (adapters, rank, in_features),
        (adapters, out_features, rank),
        (tokens, out_features),
    )
    x, a, b, out = (torch.randn(*shape, generator=random).to(DEVICE, dtype) for shape in shapes)
    return x, a, b, torch.tensor(index, dtype=torch.int32, device=DEVICE), out


def expanded(function, h: Tensor, b: Tensor, index: Tensor, out: Tensor) -> Tensor:
    """Into a copy of out; what comes back is what was written in."""
    given = out.clone()
    found: Tensor = function(h, b, index, given)
    assert found is given
    return found


def check_both(x: Tensor, a: Tensor, b: Tensor, index: Tensor, out: Tensor, scale: float = 0.25) -> None:
    check(lora_shrink, reference.lora_shrink, (x, a, index, scale))
    h = reference.lora_shrink(x, a, index, scale)
    check(
        lambda *arguments: expanded(lora_expand, *arguments),
        lambda *arguments: expanded(reference.lora_expand, *arguments),
        (h, b, index, out),
    )


@pytest.fixture(params=[True, False], ids=["small tiles", "large tiles"])
def either_tile(request, monkeypatch) -> None:
    monkeypatch.setattr(module, "MAX_DECODE_TOKENS", 1 << 30 if request.param else 0)


# Which adapter a token has does not depend on the type of what is multiplied; `test_ranks` has both types.
@pytest.mark.usefixtures("either_tile")
@pytest.mark.parametrize("dtype", [pytest.param(DTYPES[0], marks=pytest.mark.slow), *DTYPES[1:]])
@pytest.mark.parametrize("index", INDEX.values(), ids=INDEX)
def test_tokens_of_many_adapters_in_any_order(index, dtype) -> None:
    check_both(*make(index, 8, 40, 72, dtype))


@pytest.mark.usefixtures("either_tile")
@pytest.mark.parametrize(
    ("rank", "dtype"),
    [  # of those that fill no tile each in one precision; 8 and 16 are everywhere else
        pytest.param(rank, dtype, marks=[] if torch.cuda.is_available() or (rank, dtype) in SOME else pytest.mark.slow)
        for rank in (1, 8, 16, 17, 24, 64, 100)
        for dtype in DTYPES
    ],
)
def test_ranks(rank, dtype) -> None:
    check_both(*make([0, 1, 1, -1, 2], rank, 136, 130, dtype))


@pytest.mark.parametrize("sizes", [(1, 1), (16, 128), (257, 129), (520, 16)])
def test_features_that_fill_no_tile(sizes) -> None:
    check_both(*make([1, 0, -1, 1], 16, *sizes, torch.float16))


@pytest.mark.usefixtures("either_tile")
def test_a_token_without_an_adapter_keeps_its_output_and_has_a_row_of_zeros() -> None:
    x, a, b, index, out = make([-1, 2, -1, -1, 0], 8, 24, 40, torch.float16)
    h = lora_shrink(x, a, index)
    before = out.clone()
    lora_expand(h, b, index, out)
    none = index < 0
    assert (h[none] == 0).all()
    assert torch.equal(out[none], before[none])
    assert (out[~none] != before[~none]).any(1).all()


@pytest.mark.usefixtures("either_tile")
def test_a_row_does_not_depend_on_its_neighbours_nor_on_the_order() -> None:
    x, a, b, index, out = make([3, 0, 0, 2, -1, 3, 1] * 4, 16, 72, 40, torch.float16)
    together = expanded(lora_expand, h := lora_shrink(x, a, index), b, index, out)
    mixed = torch.randperm(len(index), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    h_mixed = lora_shrink(x[mixed], a, index[mixed])
    same(h_mixed, h[mixed])
    same(expanded(lora_expand, h_mixed, b, index[mixed], out[mixed]), together[mixed])
    for row in (0, 4, 27):
        one = slice(row, row + 1)
        h_alone = lora_shrink(x[one], a, index[one])
        same(h_alone[0], h[row])
        same(expanded(lora_expand, h_alone, b, index[one], out[one])[0], together[row])


def same(seen: Tensor, expected: Tensor) -> None:
    """To the bit on a GPU. The interpreter multiplies tiles with NumPy's BLAS, where a row's sum may be made in another
    order at the edge of a tile (seen on a CPU with AVX2): a step of float16 then."""
    tolerance = 0.0 if DEVICE.type == "cuda" else 2.0**-10
    torch.testing.assert_close(seen, expected, rtol=tolerance, atol=tolerance)


def test_an_output_that_is_one_part_of_a_stacked_layer() -> None:
    """q, k and v are computed at once: an adapter of k alone adds to columns in the middle, and to no others."""
    x, a, b, index, _ = make([0, -1, 1, 1], 8, 24, 40, torch.float32)
    h = reference.lora_shrink(x, a, index)
    stacked = torch.randn(4, 100, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    expected = stacked.clone()
    reference.lora_expand(h, b, index, expected[:, 30:70])
    lora_expand(h, b, index, stacked[:, 30:70])
    assert torch.equal(stacked[:, :30], expected[:, :30])
    assert torch.equal(stacked[:, 70:], expected[:, 70:])
    assert torch.allclose(stacked, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.usefixtures("either_tile")
def test_what_belongs_to_nobody_may_be_nan() -> None:
    """Adapters that no token uses, tokens without one, ranks and features past the end."""
    x, a, b, index, out = make([1, -1, 3, 1], 8, 24, 40, torch.float32)
    h = lora_shrink(x, a, index)
    expected = expanded(lora_expand, h, b, index, out)
    used = [1, 3]
    big_x, big_a = torch.full((4, 30), torch.nan, device=DEVICE), torch.full((5, 9, 30), torch.nan, device=DEVICE)
    big_b, big_h = torch.full((5, 44, 12), torch.nan, device=DEVICE), torch.full((4, 12), torch.nan, device=DEVICE)
    has_one = index >= 0
    big_x[has_one, :24] = x[has_one]
    big_a[used, :8, :24], big_b[used, :40, :8] = a[used], b[used]
    assert torch.equal(lora_shrink(big_x[:, :24], big_a[:4, :8, :24], index), h)
    big_h[has_one, :8] = h[has_one]
    assert torch.equal(expanded(lora_expand, big_h[:, :8], big_b[:4, :40, :8], index, out), expected)


@pytest.mark.usefixtures("either_tile")
def test_an_infinite_token_spoils_its_own_result_only() -> None:
    x, a, b, index, out = make([0, 1, 0, 1, 0], 8, 24, 40, torch.float32)
    expected = expanded(lora_expand, lora_shrink(x, a, index), b, index, out)
    x[2] = torch.nan
    found = expanded(lora_expand, lora_shrink(x, a, index), b, index, out)
    kept = torch.tensor([0, 1, 3, 4], device=DEVICE)
    assert torch.equal(found[kept], expected[kept])
    assert found[2].isnan().all()


@pytest.mark.usefixtures("either_tile")
def test_an_adapter_of_nan_spoils_its_own_tokens_only() -> None:
    x, a, b, index, out = make([0, 1, 0, -1, 1], 8, 24, 40, torch.float32)
    h = lora_shrink(x, a, index)
    expected = expanded(lora_expand, h, b, index, out)
    a[1], b[1] = torch.nan, torch.nan
    own = index == 1
    found_h, found = lora_shrink(x, a, index), expanded(lora_expand, h, b, index, out)
    assert torch.equal(found_h[~own], h[~own])
    assert torch.equal(found[~own], expected[~own])
    assert found_h[own].isnan().all()
    assert found[own].isnan().all()


@pytest.mark.parametrize("scale", [0.0, 2.0**-14, 1.0, 64.0])
def test_the_scale_is_applied_before_rounding(scale) -> None:
    check_both(*make([0, 1, 1, -1], 16, 72, 40, torch.float16), scale=scale)


def test_sums_are_not_taken_in_half_precision() -> None:
    """4096 ones: half precision alone would stop at 2048; and 2048 + 1 x 1 + ... of an output that is large."""
    index = torch.tensor([0], dtype=torch.int32, device=DEVICE)
    ones = torch.ones(1, 4096, dtype=torch.float16, device=DEVICE)
    assert (lora_shrink(ones, ones.expand(8, 4096)[None], index) == 4096).all()
    out = torch.full((1, 16), 2048.0, dtype=torch.float16, device=DEVICE)
    lora_expand(ones[:, :64], torch.ones(1, 16, 64, dtype=torch.float16, device=DEVICE), index, out)
    assert (out == 2112).all()


def test_no_tokens() -> None:
    x, a, b, index, out = make([0], 8, 24, 40, torch.float32)
    h = lora_shrink(x[:0], a, index[:0])
    assert h.shape == (0, 8)
    assert lora_expand(h, b, index[:0], out[:0]).shape == (0, 40)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's own fault")
def test_the_interpreter_refuses_bfloat16() -> None:
    x, a, b, index, out = make([0], 16, 16, 16, torch.bfloat16)
    with pytest.raises(TypeError, match="interpreter computes bfloat16 wrongly"):
        lora_shrink(x, a, index)
    with pytest.raises(TypeError, match="interpreter computes bfloat16 wrongly"):
        lora_expand(out, b, index, out)


def test_operands_that_do_not_fit_are_refused() -> None:
    x, a, b, index, out = make([0, 1], 16, 24, 40, torch.float32)
    with pytest.raises(ValueError, match="a \\[adapters, rank, in\\], `in` contiguous: got \\[2, 24\\]"):
        lora_shrink(x, a[:, :, :23], index)
    with pytest.raises(ValueError, match="the last dimension contiguous"):
        lora_expand(x[:, :16], b, index, out.t().contiguous().t())
    with pytest.raises(ValueError, match="out \\[tokens, out\\]"):
        lora_expand(x[:, :16], b, index, out[:, :39])
