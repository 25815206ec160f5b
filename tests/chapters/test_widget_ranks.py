"""Stages and ranks over time: every piece of work is drawn once, idle shares are those of the formula and the trace."""

import re
from typing import Any

import pytest

from chapters.widgets import expert_load, rank_timeline, stages
from chapters.widgets.expert_load import placement_of
from chapters.widgets.rank_timeline import boxes
from reference_impl.interfaces import Row, StepDone
from reference_impl.interfaces.collectives import RankTime
from reference_impl.observe.trace import idle_share

PICTURE = r'<img [^>]*alt="[^"]{20,}"'


def steps_of(batches: int, num_ranks: int = 2) -> list[StepDone]:
    """Every rank has a step a second after the one before it; it has had it, and waited for it, from the start."""
    return [
        StepDone(
            i, 10.0 + i, 11.0 + i + num_ranks, (Row(f"r{i}", 0, 7, True),), (), 0, 0, 9,
            ranks=tuple(RankTime(10.0 + i, 11.0 + i + rank, float(rank)) for rank in range(num_ranks)),
        )
        for i in range(batches)
    ]  # fmt: skip


def test_waiting_is_drawn_before_the_work_and_all_of_a_ranks_time_is_drawn() -> None:
    found = boxes(steps_of(2))
    assert found["waits for a rank"] == [(1, 0, 1000), (1, 1000, 2000)]
    assert found["computes, even step"] == [(0, 0, 1000), (1, 1000, 2000)]
    assert found["computes, odd step"] == [(0, 1000, 2000), (1, 2000, 3000)]


@pytest.mark.usefixtures("painted")
def test_each_step_of_a_run_is_put_into_words_with_the_idle_share_of_the_trace() -> None:
    steps = steps_of(3)
    view = rank_timeline(steps)
    for step in (1, 3):
        view.controls["step"].value = step
        assert f"Step {step} of 3, 7 tokens: rank 0 from {1000 * (step - 1):.1f}" in view.shown.alt
        assert f"idle {idle_share(steps):.0%}" in view.shown.alt
        assert re.search(PICTURE, view.picture.value)
    assert "nothing to draw" in rank_timeline([]).shown.alt


def values(control: Any) -> list[Any]:
    return [v for _, v in control._options_full] if hasattr(control, "options") else [control.min, control.max]


def test_stages_work_at_both_ends_of_every_control_and_say_the_bubble() -> None:
    view = stages()
    assert "4 stages, 4 batches, 16 of 16 pieces of work" in view.shown.alt
    assert "Idle over the whole picture: 43%" in view.shown.alt
    for control in view.controls.values():
        for value in values(control):
            control.value = value
            assert re.search(PICTURE, view.picture.value)
    view = stages()
    view.controls["moment"].value = 2
    assert "2 of 16 pieces of work. Stage 0 computes batch 1, from 1 to 2. Busy then: 1 of 4 stages" in view.shown.alt


def test_every_load_of_experts_has_each_expert_and_each_rank_has_as_many() -> None:
    view = expert_load()
    assert "64 experts and 0 replicas on 8 ranks, in order, skew 1. The busiest rank, 0, has 4.58" in view.shown.alt
    loads = [1 / rank for rank in range(1, 65)]
    for ranks in values(view.controls["ranks"]):
        for placed in (False, True):
            for replicas in values(view.controls["replicas"]):
                found = placement_of(loads, ranks, replicas, placed)
                assert {expert for own in found for expert in own} == set(range(64))
                assert {len(own) for own in found} == {(64 + replicas) // ranks}
    for control in view.controls.values():
        for value in values(control):
            control.value = value
            assert re.search(PICTURE, view.picture.value)
