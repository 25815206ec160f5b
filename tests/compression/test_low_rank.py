"""Low-rank factors against what Eckart and Young say is the least error, of the matrix and of the output."""

from __future__ import annotations

import pytest
import torch

from reference_impl.models.compression.low_rank import DAMPING, factors, rank_for


def problem(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    mix = torch.randn(20, 20, generator=random, dtype=torch.float64) * torch.logspace(-1, 1, 20, dtype=torch.float64)
    return torch.randn(12, 20, generator=random, dtype=torch.float64), torch.randn(
        50, 20, generator=random, dtype=torch.float64
    ) @ mix


@pytest.mark.parametrize("rank", [1, 5, 12])
def test_the_error_of_the_matrix_is_that_of_the_singular_values_left_out(rank: int) -> None:
    weight, _ = problem(0)
    a, b = factors(weight, rank)
    assert (a.shape, b.shape) == ((12, rank), (rank, 20))
    left = torch.linalg.svdvals(weight)[rank:].square().sum()
    assert float((weight - a @ b).square().sum()) == pytest.approx(float(left), abs=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_the_output_s_error_is_the_least_there_is(seed: int) -> None:
    """That of the singular values of x W^T left out (with the damping as 20 rows more); so no factors beat it."""
    weight, x = problem(seed)
    gram = x.T @ x
    a, b = factors(weight, 4, gram)
    damping = (DAMPING * gram.diagonal().mean()).sqrt() * torch.eye(20, dtype=torch.float64)
    rows = torch.cat((x, damping))
    least = torch.linalg.svdvals(rows @ weight.T)[4:].square().sum()
    assert float((rows @ (weight - a @ b).T).square().sum()) == pytest.approx(float(least))
    plain_a, plain_b = factors(weight, 4)
    assert float((x @ (weight - a @ b).T).norm()) < 0.9 * float((x @ (weight - plain_a @ plain_b).T).norm())


def test_a_rank_saves_numbers_only_below_out_times_in_over_their_sum() -> None:
    assert rank_for(100, 100, 1.0) == 50
    assert rank_for(100, 300, 0.5) == 37  # 37 x 400 = 14,800 of 30,000; 38 would be 15,200
    with pytest.raises(ValueError, match="got 0.001"):
        rank_for(10, 10, 0.001)
    with pytest.raises(ValueError, match="from 1 to 12, got 13"):
        factors(problem(0)[0], 13)
