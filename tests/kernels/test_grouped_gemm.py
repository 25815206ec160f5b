"""Grouped GEMM against its twin and float64, in the interpreter or on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from reference_impl.kernels import grouped_gemm as module
from reference_impl.kernels import reference
from reference_impl.kernels.grouped_gemm import grouped_gemm
from reference_impl.models.moe import group_by_expert
from tests.kernels.paged import DEVICE, check

DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()
COUNTS = {
    "one token": [1],
    "one token of many experts": [0, 0, 1, 0, 0],
    "all at the first": [70, 0, 0],
    "all at the last": [0, 0, 70],
    "empty ones between": [0, 5, 0, 0, 16, 17, 0, 1, 0],
    "around the tile": [15, 16, 17, 31, 32, 33],
    "one each": [1] * 19,
    "many rows": [130, 0, 3, 127, 128, 129],
    "no token": [0, 0, 0],
}


def offsets_of(counts: list[int]) -> Tensor:
    return torch.tensor([0, *counts], device=DEVICE).cumsum(0).int()


def make(
    counts: list[int], in_features: int, out_features: int, dtype: torch.dtype, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(sum(counts), in_features, generator=random)
    weights = torch.randn(len(counts), out_features, in_features, generator=random)
    return x.to(DEVICE, dtype), weights.to(DEVICE, dtype), offsets_of(counts)


SLOW_FLOAT32 = [pytest.param(DTYPES[0], marks=pytest.mark.slow), *DTYPES[1:]]  # float32 is in the test of features


@pytest.mark.parametrize("dtype", SLOW_FLOAT32)
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_rows_of_ragged_experts(counts, dtype) -> None:
    if not sum(counts):
        assert grouped_gemm(*make(counts, 24, 40, dtype)).shape == (0, 40)
    else:
        check(grouped_gemm, reference.grouped_gemm, make(counts, 72, 40, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(1, 1), (1, 130), (130, 1), (64, 64), (65, 129), (200, 257), (576, 96)])
def test_features_that_fill_no_tile(sizes, dtype) -> None:
    check(grouped_gemm, reference.grouped_gemm, make([3, 0, 20], *sizes, dtype))


@pytest.mark.parametrize("rows_per_expert", [4, 40, 400])
@pytest.mark.parametrize("counts", [[30, 0, 1, 140], [0, 260, 3]], ids=str)
def test_every_tile_gives_the_same(counts, rows_per_expert, monkeypatch) -> None:
    """The tile is chosen by the mean number of rows; whatever it is, experts may have more, fewer, none."""
    tile = module.tile_of
    monkeypatch.setattr(module, "tile_of", lambda _, *rest: tile(rows_per_expert, *rest))
    check(grouped_gemm, reference.grouped_gemm, make(counts, 96, 150, torch.float16))


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    x, weights, _ = make([9, 1, 30], 130, 70, torch.float16)
    together = grouped_gemm(x, weights, offsets_of([9, 1, 30]))
    for row, expert in ((0, 0), (8, 0), (9, 1), (39, 2)):
        counts = [int(expert == e) for e in range(3)]
        assert torch.equal(grouped_gemm(x[row : row + 1], weights, offsets_of(counts))[0], together[row])


def test_weights_stored_turned_over_and_rows_cut_from_wider_ones() -> None:
    """UnquantizedLinear keeps [in, out]; rows may be the columns of something wider."""
    x, weights, offsets = make([5, 0, 21], 72, 40, torch.float16)
    turned = weights.transpose(1, 2).contiguous().transpose(1, 2)
    expected = grouped_gemm(x, weights, offsets)
    assert torch.equal(grouped_gemm(x, turned, offsets), expected)
    wide = torch.full((26, 200), torch.nan, dtype=torch.float16, device=DEVICE)
    wide[:, 64:136] = x
    assert torch.equal(grouped_gemm(wide[:, 64:136], weights, offsets), expected)


def test_what_no_tile_should_read_may_be_nan() -> None:
    """Experts without rows, values past `in` and `out`, rows that belong to nobody."""
    counts = [0, 7, 0, 18]
    x, weights, offsets = make(counts, 70, 40, torch.float32)
    expected = grouped_gemm(x, weights, offsets)
    big_x = torch.full((40, 90), torch.nan, device=DEVICE)
    big_weights = torch.full((5, 50, 90), torch.nan, device=DEVICE)
    big_x[:25, :70], big_weights[1:4:2, :40, :70] = x, weights[1:4:2]
    found = grouped_gemm(big_x[:, :70], big_weights[:4, :40, :70], offsets)
    assert torch.equal(found[:25], expected)


def test_an_infinite_row_spoils_its_own_result_only() -> None:
    x, weights, offsets = make([6, 6], 64, 32, torch.float16)
    expected = grouped_gemm(x, weights, offsets)
    x[3] = torch.inf
    x[7] = torch.nan
    found = grouped_gemm(x, weights, offsets)
    spoiled = torch.tensor([row in (3, 7) for row in range(12)], device=DEVICE)
    assert torch.equal(found[~spoiled], expected[~spoiled])
    assert not found[spoiled].isfinite().any()


@pytest.mark.parametrize("scale", [2.0**-16, 1e-3, 100.0])
def test_huge_and_tiny_values(scale) -> None:
    x, weights, offsets = make([4, 20], 96, 48, torch.float16)
    check(grouped_gemm, reference.grouped_gemm, (x * scale, weights, offsets))


def test_sums_are_not_taken_in_half_precision() -> None:
    """4096 ones: half precision alone would stop at 2048."""
    x = torch.ones(3, 4096, dtype=torch.float16, device=DEVICE)
    weights = torch.ones(2, 16, 4096, dtype=torch.float16, device=DEVICE)
    assert (grouped_gemm(x, weights, offsets_of([1, 2])) == 4096).all()


def test_the_engines_own_grouping() -> None:
    """Tokens routed to 2 of 6 experts, sorted as the model sorts them, against each token's own product."""
    random = torch.Generator().manual_seed(3)
    x, weights, _ = make([13], 40, 24, torch.float32)
    weights = torch.randn(6, 24, 40, generator=random).to(DEVICE)
    experts = torch.rand(13, 6, generator=random).topk(2).indices.to(DEVICE)
    order, offsets = group_by_expert(experts, torch.arange(7, device=DEVICE))
    found = grouped_gemm(x[order // 2], weights, offsets)
    for row, pair in enumerate(order.tolist()):
        expected = weights[experts.flatten()[pair]] @ x[pair // 2]
        assert (found[row] - expected).abs().max() < 1e-4


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's own fault")
def test_the_interpreter_refuses_bfloat16() -> None:
    with pytest.raises(TypeError, match="interpreter computes bfloat16 wrongly"):
        grouped_gemm(*make([1], 16, 16, torch.bfloat16))


def test_operands_that_do_not_fit_are_refused() -> None:
    x, weights, offsets = make([2, 3], 16, 16, torch.float32)
    with pytest.raises(ValueError, match="weights \\[experts, out, in\\], got shapes \\[5, 16\\] and \\[2, 16, 15\\]"):
        grouped_gemm(x, weights[:, :, :15], offsets)
    with pytest.raises(ValueError, match="`in` contiguous"):
        grouped_gemm(x.t().contiguous().t(), weights, offsets)
