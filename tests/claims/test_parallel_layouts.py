"""What chapter 12a says of divided layers: E12.2 and E12.3, and numbers of its text."""

import pytest
import torch
import torch.nn.functional as F

from reference_impl.theory import collectives
from reference_impl.theory.hardware import device

RANDOM = torch.Generator().manual_seed(0)


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=RANDOM, dtype=torch.float64)


def test_a_sum_between_the_two_matrices_of_an_mlp_makes_it_wrong() -> None:
    """Claim: linear 1, all-reduce, activation, linear 2, all-reduce. One at the end is exact; two are wrong."""
    x, first, second = numbers(5, 16), numbers(24, 16), numbers(16, 24)
    right = F.silu(x @ first.T) @ second.T
    shards = [x @ part.T for part in first.chunk(2, 0)]
    ends = second.chunk(2, 1)
    one_sum = sum(F.silu(shard) @ end.T for shard, end in zip(shards, ends, strict=True))
    torch.testing.assert_close(one_sum, right)
    added = shards[0] + shards[1]
    two_sums = sum(F.silu(added) @ end.T for end in ends)
    assert two_sums.shape == right.shape
    assert float((two_sums - right).norm() / right.norm()) > 0.5
    # Cut by inputs, the sum would have to come first: SiLU of a sum is not the sum of SiLUs.
    summands = [a @ b.T for a, b in zip(x.chunk(2, 1), first.chunk(2, 1), strict=True)]
    torch.testing.assert_close(F.silu(summands[0] + summands[1]), F.silu(x @ first.T))
    assert not torch.allclose(F.silu(summands[0]) + F.silu(summands[1]), F.silu(x @ first.T))


@pytest.mark.parametrize(("outputs", "inputs"), [(6, 4), (4, 4)])
def test_slices_of_outputs_are_put_side_by_side_and_those_of_inputs_added(outputs: int, inputs: int) -> None:
    """Claim: column slices of W, then an all-reduce. Only if the columns are inputs; a square matrix hides it."""
    x, w = numbers(3, inputs), numbers(outputs, inputs)
    right = x @ w.T
    slices = [x @ part.T for part in w.chunk(2, 0)]
    torch.testing.assert_close(torch.cat(slices, 1), right)
    assert (slices[0] + slices[1]).shape == (3, outputs // 2)
    summands = [a @ b.T for a, b in zip(x.chunk(2, 1), w.chunk(2, 1), strict=True)]
    torch.testing.assert_close(summands[0] + summands[1], right)


def test_a_summand_of_two_independent_ones_is_off_by_71_percent() -> None:
    mine, other = numbers(100_000), numbers(100_000)
    assert float(other.norm() / (mine + other).norm()) == pytest.approx(0.71, abs=0.01)


def test_a_model_of_0_6b_loses_by_a_second_gpu_and_a_70b_gains() -> None:
    """Floors with all-reduces of 10 µs. The small one has 56 of them against 0.36 ms of reading."""
    bandwidth = device("H100").bandwidth
    small, large = (
        [collectives.tensor_parallel_seconds(size, bandwidth, n, layers, 10e-6) for n in (1, 2, 4, 8)]
        for size, layers in ((1.2e9, 28), (140e9, 80))
    )
    assert collectives.all_reduces_per_token(28) == 56
    assert small[0] * 1e3 == pytest.approx(0.36, abs=0.005)
    assert min(small[1:]) > small[0]
    assert large == sorted(large, reverse=True)
