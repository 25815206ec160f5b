"""Stages of a model: the schedule keeps its order, and its idle share is that of the closed forms."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference_impl.theory.pipeline import bubble, idle_share, schedule, serving_idle_share, token_seconds

times = st.lists(st.floats(0.1, 5), min_size=1, max_size=5)


@given(stage_seconds=times, batches=st.integers(1, 5), turns=st.integers(1, 3), hop=st.sampled_from([0.0, 0.3]))
def test_a_stage_does_one_batch_at_a_time_and_a_batch_is_in_one_stage(
    stage_seconds: list[float], batches: int, turns: int, hop: float
) -> None:
    slots = schedule(stage_seconds, batches, turns, hop)
    assert len(slots) == len(stage_seconds) * batches * turns
    for key in (lambda slot: slot.stage, lambda slot: slot.batch):
        for _, group in itertools.groupby(sorted(slots, key=lambda slot: (key(slot), slot.start)), key):
            own = list(group)
            assert all(a.end <= b.start + 1e-9 for a, b in itertools.pairwise(own))
    for batch in range(batches):
        way = [(slot.turn, slot.stage) for slot in sorted(slots, key=lambda slot: slot.start) if slot.batch == batch]
        assert way == list(itertools.product(range(turns), range(len(stage_seconds))))


@pytest.mark.parametrize(("stages", "batches"), [(1, 1), (2, 1), (4, 4), (4, 32), (8, 3)])
def test_stages_that_are_filled_once_idle_for_the_bubble(stages: int, batches: int) -> None:
    assert bubble(stages, batches) == pytest.approx(idle_share(schedule([1.0] * stages, batches)))
    assert bubble(stages, batches) == pytest.approx((stages - 1) / (batches + stages - 1))


@given(  # nearly equal stages would take long to come to it
    stage_seconds=st.lists(st.integers(1, 5).map(float), min_size=1, max_size=5),
    batches=st.integers(1, 6),
    hop=st.sampled_from([0.0, 0.3]),
)
def test_a_schedule_that_goes_on_comes_to_the_closed_forms(
    stage_seconds: list[float], batches: int, hop: float
) -> None:
    ends = [
        s.end for s in schedule(stage_seconds, batches, 40, hop) if (s.batch, s.stage) == (0, len(stage_seconds) - 1)
    ]
    period = token_seconds(stage_seconds, batches, hop)
    assert ends[-1] - ends[-2] == pytest.approx(period)
    slots = schedule(stage_seconds, batches, 60, hop)
    share = idle_share(slots, begin=20 * period, end=40 * period)
    assert share == pytest.approx(serving_idle_share(stage_seconds, batches, hop), abs=1e-6)


def test_equal_stages_want_as_many_batches_as_stages_and_unequal_ones_idle_however_many_there_are() -> None:
    shares = [serving_idle_share([1.0] * 4, batches) for batches in (1, 2, 4, 9)]
    assert shares == pytest.approx([0.75, 0.5, 0, 0])
    assert serving_idle_share([8, 8, 8, 10.4], 99) == pytest.approx(1 - 34.4 / (4 * 10.4))
    assert token_seconds([1.0] * 4, 1) == token_seconds([4.0], 1), "one stream gains nothing"


def test_no_batches_and_no_time_are_refused() -> None:
    for stages, batches, turns in (([], 1, 1), ([1.0], 0, 1), ([1.0], 1, 0)):
        with pytest.raises(ValueError, match="at least one stage, batch and turn"):
            schedule(stages, batches, turns)
    with pytest.raises(ValueError, match="expected a time after 5"):
        idle_share(schedule([1.0], 1), begin=5.0)
