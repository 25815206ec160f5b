"""LoRA and DoRA: merged and apart they are one function, and a fresh delta changes nothing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reference_impl.models.compression.adapters import Delta, fresh


@given(seed=st.integers(0, 10**6), dora=st.booleans(), rank=st.integers(1, 4), scale=st.floats(-2, 2))
def test_merged_and_apart_are_the_same_function(seed: int, dora: bool, rank: int, scale: float) -> None:
    random = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    weight, x = draw(9, 7), draw(5, 7)
    delta = Delta(draw(rank, 7), draw(9, rank), scale, draw(9).abs() + 0.1 if dora else None)
    expected = torch.zeros(5, 9, dtype=torch.float64)
    for out in range(9):  # the formula, an output at a time
        row = weight[out] + scale * sum(delta.b[out, r] * delta.a[r] for r in range(rank))
        if delta.magnitude is not None:
            row = delta.magnitude[out] * row / row.square().sum().sqrt()
        expected[:, out] = (x * row).sum(1)
    torch.testing.assert_close(delta.apply(weight, x), expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(x @ delta.merged(weight).T, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dora", [False, True])
def test_a_fresh_delta_changes_nothing_and_learns_a_change_of_its_rank(dora: bool) -> None:
    random = torch.Generator().manual_seed(1)
    weight, x = torch.randn(8, 6, generator=random), torch.randn(40, 6, generator=random)
    delta = fresh(weight, 2, dora=dora)
    torch.testing.assert_close(delta.merged(weight), weight)
    assert delta.num_parameters() == 2 * 6 + 8 * 2 + 8 * dora
    wanted = x @ (weight + torch.outer(torch.randn(8, generator=random), torch.randn(6, generator=random))).T
    learned = [tensor.requires_grad_() for tensor in (delta.a, delta.b, delta.magnitude) if tensor is not None]
    optimizer = torch.optim.Adam(learned, lr=0.05)
    losses = []
    for _ in range(80):
        loss = (delta.apply(weight, x) - wanted).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.1 * losses[0]
    assert (delta.magnitude is not None) is dora


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"a \[rank, 6\] and b \[8, rank\], got \[2, 5\] and \[8, 2\]"):
        Delta(torch.zeros(2, 5), torch.zeros(8, 2)).merged(torch.zeros(8, 6))
    with pytest.raises(ValueError, match="rank: expected at least 1, got 0"):
        fresh(torch.zeros(8, 6), 0)
