"""Pruning against its definition, and what zeros weigh."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reference_impl.models.compression.pruning import keep, keep_two_of_four, magnitude, stored_bits, wanda


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@given(seed=st.integers(0, 10**6), inputs=st.integers(1, 30), sparsity=st.floats(0, 1))
def test_of_each_row_the_least_are_dropped(seed: int, inputs: int, sparsity: float) -> None:
    scores = magnitude(random(seed, 5, inputs))
    kept = keep(scores, sparsity)
    for row, mask in zip(scores, kept, strict=True):
        assert int((~mask).sum()) == int(sparsity * inputs)
        if 0 < int(mask.sum()) < inputs:
            assert float(row[mask].min()) >= float(row[~mask].max())


def test_two_of_four() -> None:
    scores = torch.tensor([[1.0, 4, 3, 2, 0, 9, 8, 7]])
    assert keep_two_of_four(scores).tolist() == [[False, True, True, False, False, True, True, False]]
    with pytest.raises(ValueError, match="a multiple of 4 inputs, got 6"):
        keep_two_of_four(torch.zeros(1, 6))
    with pytest.raises(ValueError, match="from 0 to 1, got 1.5"):
        keep(scores, 1.5)


@pytest.mark.parametrize("seed", range(5))
def test_wanda_keeps_the_output_nearer_where_inputs_differ_in_size(seed: int) -> None:
    """With independent inputs its score is the very error that the output takes from each weight."""
    x, weight = random(seed, 400, 64), random(seed + 100, 32, 64)
    x *= torch.logspace(-1, 1, 64, dtype=torch.float64).view(4, 16).T.flatten()  # unlike beside each other
    norms = x.square().sum(0).sqrt()

    def error(mask: torch.Tensor) -> float:
        return float((x @ (weight * ~mask).T).square().sum())

    for masked in (lambda scores: keep(scores, 0.5), keep_two_of_four):
        assert error(masked(wanda(weight, norms))) < 0.7 * error(masked(magnitude(weight)))
    one = (x.T @ x).diagonal()[3] * weight[7, 3] ** 2
    assert float(wanda(weight, norms)[7, 3] ** 2) == pytest.approx(float(one))
    with pytest.raises(ValueError, match=r"norms \[64\], one an input, got \[3\]"):
        wanda(weight, norms[:3])


def test_what_zeros_weigh() -> None:
    """[8, 16] of 16 bits, half of them zeros: worked out by hand."""
    assert stored_bits(8, 16, 0.5, "dense") == 2048
    assert stored_bits(8, 16, 0.5, "2:4") == 64 * 16 + 64 * 2
    assert stored_bits(8, 16, 0.5, "bitmap") == 64 * 16 + 128
    assert stored_bits(8, 16, 0.5, "csr") == 64 * 32 + 9 * 32
    assert stored_bits(4096, 4096, 0.5, "csr") > stored_bits(4096, 4096, 0.5, "dense")  # it saves nothing
    with pytest.raises(ValueError, match="got 'coo'"):
        stored_bits(8, 16, 0.5, "coo")
