"""Experts over ranks: against counting one pair after another, and against all placements of few experts."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference_impl.theory import experts

loads = st.lists(st.integers(0, 50), min_size=1, max_size=9)


@given(loads, st.integers(1, 4), st.data())
def test_work_is_that_of_pairs_dealt_to_replicas_in_turn(loads: list[int], num_ranks: int, data: st.DataObject) -> None:
    placement: list[list[int]] = [[] for _ in range(num_ranks)]
    for expert in range(len(loads)):
        for rank in data.draw(st.sets(st.integers(0, num_ranks - 1), min_size=1)):
            placement[rank].append(expert)
    dealt = [0] * num_ranks
    for expert, load in enumerate(loads):
        homes = [rank for rank, own in enumerate(placement) if expert in own]
        for pair in range(12 * load):  # 12: 1, 2, 3 or 4 replicas share it without a rest
            dealt[homes[pair % len(homes)]] += 1
    found = experts.rank_loads(loads, placement)
    assert found == pytest.approx([pairs / 12 for pairs in dealt])
    assert experts.imbalance(found) >= 1 - 1e-12


def test_what_is_placed_nowhere_or_unknown_is_named() -> None:
    with pytest.raises(ValueError, match=r"from 0 to 2, wrong for \[1, 3\]"):
        experts.rank_loads([1, 2, 3], [[0, 3], [2]])
    with pytest.raises(ValueError, match="at least 3, one for each expert, got 2"):
        experts.replicas([1, 1, 1], 2)
    with pytest.raises(ValueError, match="3 experts and 2 replicas are not divided evenly by 2 ranks"):
        experts.placed([1, 1, 1], 2, 2)


@given(loads, st.integers(0, 4))
def test_no_other_numbers_of_replicas_leave_the_hottest_one_with_less(loads: list[int], more: int) -> None:
    found = experts.replicas(loads, len(loads) + more)
    assert sum(found) == len(loads) + more
    assert min(found) >= 1
    hottest = max(load / count for load, count in zip(loads, found, strict=True))
    for extra in itertools.combinations_with_replacement(range(len(loads)), more):
        counts = [1 + extra.count(expert) for expert in range(len(loads))]
        assert hottest <= max(load / count for load, count in zip(loads, counts, strict=True)) + 1e-12


@given(loads, st.integers(1, 4), st.integers(0, 6))
def test_each_rank_has_as_many_experts_and_no_expert_twice_where_it_can(
    loads: list[int], ranks: int, more: int
) -> None:
    more += -(len(loads) + more) % ranks
    found = experts.placed(loads, ranks, more)
    assert {len(own) for own in found} == {(len(loads) + more) // ranks}
    work = experts.rank_loads(loads, found)
    assert sum(work) == pytest.approx(sum(loads))
    if max(experts.replicas(loads, len(loads) + more)) == 1:
        assert all(len(set(own)) == len(own) for own in found)


def test_a_hot_expert_is_what_a_placement_alone_cannot_mend() -> None:
    hot = [40, 10, 10, 10, 10, 10, 5, 5]  # of 100 pairs, on four ranks
    in_order = [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert experts.imbalance(experts.rank_loads(hot, in_order)) == 2.0
    assert experts.imbalance(experts.rank_loads(hot, experts.placed(hot, 4))) == 1.8
    assert experts.imbalance(experts.rank_loads(hot, experts.placed(hot, 4, 4))) < 1.25


@given(loads, st.floats(0.25, 3))
def test_pairs_beyond_the_capacity_are_dropped(loads: list[int], factor: float) -> None:
    most, dropped = experts.capacity(loads, factor), 0
    for load in loads:
        seats = most
        for _ in range(load):
            dropped += seats <= 0
            seats -= 1
    assert experts.dropped_share(loads, factor) == pytest.approx(dropped / sum(loads) if any(loads) else 0.0)
    assert experts.dropped_share(loads, len(loads)) == 0, "no expert can get more than all"
