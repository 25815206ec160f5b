"""Bank conflicts, sectors and divergence against counting by hand."""

import math

from hypothesis import given
from hypothesis import strategies as st

from reference_impl.theory import warp


def test_a_column_of_a_32_wide_tile_hits_one_bank_and_padding_by_one_frees_it() -> None:
    assert warp.strided_bank_passes(1) == 1
    assert warp.strided_bank_passes(2) == 2
    assert warp.strided_bank_passes(32) == 32
    assert warp.strided_bank_passes(33) == 1
    assert warp.strided_bank_passes(0) == 1, "one word for all is broadcast"
    assert warp.bank_passes([]) == 0


@given(st.integers(1, 500))
def test_passes_of_a_stride_are_its_common_divisor_with_the_banks(stride: int) -> None:
    assert warp.strided_bank_passes(stride) == math.gcd(stride, 32)


def test_neighbours_share_sectors_and_strangers_do_not() -> None:
    assert [warp.strided_sectors(stride) for stride in (1, 2, 4, 8, 16)] == [4, 8, 16, 32, 32]
    assert [warp.strided_sectors(1, size) for size in (1, 2, 4, 8, 16)] == [1, 2, 4, 8, 16]
    assert [warp.useful_share(stride) for stride in (1, 2, 8, 100)] == [1, 0.5, 0.125, 0.125]
    assert warp.sectors([30], 4) == 2, "four bytes across a border"


def test_each_side_of_a_branch_is_executed_for_every_warp_that_takes_it() -> None:
    odd = [i % 2 for i in range(64)]
    halves = [i // 32 for i in range(64)]
    assert warp.branch_passes(odd) == 4
    assert warp.branch_passes(halves) == 2
    assert warp.branch_passes([0] * 40) == 2, "a warp that is part empty is a warp"
