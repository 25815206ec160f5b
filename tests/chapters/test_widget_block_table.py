"""The block-table stepper: what a snapshot holds, what a picture says, and every control at both ends."""

from __future__ import annotations

import itertools
import re

import pytest
import torch

from chapters.widgets import block_table
from chapters.widgets.block_table import Snapshot, draw, snapshot
from reference_impl import Engine, EngineConfig, SamplingParams, course_model, load_model
from reference_impl.interfaces import NO_BLOCK, BlockPair


@pytest.fixture(scope="module")
def run() -> tuple[list[Snapshot], list[dict[str, list[int]]]]:
    """Snapshots before and after every step of three samples and a neighbour, and the tables the engine had."""
    model = load_model(course_model("draft"), torch.float32, torch.device("cpu"))
    engine = Engine(model, EngineConfig(num_blocks=12, block_size=4, prefix_cache="off"))
    engine.add(list(range(10, 20)), SamplingParams(max_tokens=9, temperature=1, seed=1, n=3, ignore_eos=True), "p")
    engine.add(list(range(30, 35)), SamplingParams(max_tokens=5, temperature=0, ignore_eos=True), "q")
    frames, tables = [snapshot(engine)], [{name: list(r.block_table) for name, r in engine.requests.items()}]
    while engine.has_work():
        engine.step()
        frames.append(snapshot(engine))
        tables.append({name: list(r.block_table) for name, r in engine.requests.items()})
    return frames, tables


def test_a_snapshot_is_what_the_engine_had_and_does_not_change_with_it(run) -> None:  # type: ignore[no-untyped-def]
    frames, tables = run
    assert [{name: list(t) for name, t in frame.tables.items()} for frame in frames] == tables
    for frame in frames:
        for block, count in enumerate(frame.references):
            assert count == len(frame.holders(block))
            assert (block in frame.free) == (count == 0)
    assert frames[0].free == tuple(range(12))


def test_the_free_list_is_the_order_in_which_blocks_will_be_taken(run) -> None:  # type: ignore[no-untyped-def]
    frames, _ = run
    for before, after in itertools.pairwise(frames):
        taken = [block for block in before.free if after.references[block]]
        assert taken == list(before.free[: len(taken)])
    assert f"next first: {list(frames[3].free)}" in draw(frames, 3).alt


def test_a_block_is_filled_as_far_as_the_one_who_has_computed_most_of_it() -> None:
    frame = Snapshot(1, 4, {"a": (2, 0), "b": (2, 3)}, {"a": 6, "b": 4}, (1, 0, 2, 1), (1,))
    assert [frame.filled(block) for block in (2, 0, 3, 1)] == [4, 2, 0, 0]
    assert Snapshot(1, 4, {}, {}, (1, 0), (1,)).filled(0) == 4, (
        "nobody's, so of the prefix cache, which keeps full blocks"
    )


def test_the_step_that_copies_says_so_and_the_shared_blocks_are_named(run) -> None:  # type: ignore[no-untyped-def]
    frames, _ = run
    [copying] = [i for i, frame in enumerate(frames) if frame.copies]
    assert len(frames[copying].copies) == 2, "three samples part inside a block: the last reader keeps it"
    before, after = draw(frames, copying - 1).alt, draw(frames, copying).alt
    assert "copied" not in before
    for pair in frames[copying].copies:
        assert f"{pair.src} to {pair.dst}" in after
    shared = {block: count for block, count in enumerate(frames[copying - 1].references) if count > 1}
    assert set(shared.values()) == {3}
    assert str(shared) in before


@pytest.mark.parametrize("position", range(13))
def test_the_translation_of_a_position_is_table_entry_offset_and_slot(position: int) -> None:
    frame = Snapshot(3, 4, {"a": (7, 2, 5), "b": ()}, {"a": 9, "b": 0}, (0, 0, 1, 0, 0, 1, 0, 1), (0,))
    alt = draw([frame], 0, "a", position).alt
    if position == 12:
        assert "no block yet, its table has 3 entries" in alt
    else:
        block = (7, 2, 5)[position // 4]
        assert f"is block {block}, offset {position} % 4 = {position % 4}, " in alt
        assert f"slot {block * 4 + position % 4} " in alt
        assert ("filled" in alt) == (position < 9)
    assert "Request b waits" in draw([frame], 0, "b", position).alt
    assert "Request c is not in the engine now" in draw([frame], 0, "c", position).alt


def test_a_slot_that_another_holder_has_filled_is_not_said_to_be_unwritten() -> None:
    """Three samples share a prompt's last block; the forks have yet to compute its last token."""
    frame = Snapshot(1, 4, {"a": (2, 0), "b": (2, 0)}, {"a": 6, "b": 5}, (2, 0, 2), (1,))
    assert "slot 1 (filled)" in draw([frame], 0, "a", 5).alt
    assert "slot 1 (filled by another request, not by b yet)" in draw([frame], 0, "b", 5).alt
    assert "slot 2 (reserved, not written yet)" in draw([frame], 0, "b", 6).alt


def test_a_block_out_of_the_window_is_said_to_be_gone() -> None:
    frame = Snapshot(1, 4, {"a": (NO_BLOCK, 1)}, {"a": 8}, (0, 1), (0,), (BlockPair(0, 1),))
    assert "fallen out of the window" in draw([frame], 0, "a", 2).alt


@pytest.mark.usefixtures("painted")
def test_every_control_works_at_both_ends_and_all_together(run) -> None:  # type: ignore[no-untyped-def]
    view = block_table(run[0], "p/1", start=2, position=9)
    assert view.values == {"step": 2, "request": "p/1", "position": 9}

    def ends(control):  # type: ignore[no-untyped-def]
        return (control.options[0], control.options[-1]) if hasattr(control, "options") else (control.min, control.max)

    for control in view.controls.values():
        for value in ends(control):
            control.value = value
            assert re.search(r'<img [^>]*alt="[^"]{40,}"', view.picture.value), control.description
    for end in (0, 1):
        for control in view.controls.values():
            control.value = ends(control)[end]
        assert "nan" not in view.shown.alt
    assert "text/html" in view._repr_mimebundle_()


def test_no_snapshots_and_an_idle_engine_have_a_picture_too() -> None:
    assert "No snapshots" in block_table([]).shown.alt
    assert "2 of 2 blocks free" in block_table([Snapshot(0, 16, {}, {}, (0, 0), (0, 1))]).shown.alt
