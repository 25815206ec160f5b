"""The tile stepper and the traffic counter: they say what was recorded or computed, at both ends of every control."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest

from chapters.widgets import attention_traffic, tile_stepper
from chapters.widgets.attention_traffic import HEAD_DIMS, PARTS, ROWS, SRAM, TOKENS, orders
from chapters.widgets.attention_traffic import draw as draw_traffic
from chapters.widgets.tile_stepper import draw
from reference_impl.theory import attention_traffic as theory
from reference_impl.theory.online_softmax import TileStep, record
from reference_impl.theory.units import KiB, format_bytes


@pytest.fixture(scope="module")
def steps() -> list[TileStep]:
    """Eight causal queries behind 12 keys, 20 keys in all, in tiles of 6; some see nothing of the last."""
    rng = np.random.default_rng(5)
    scores = np.where(np.arange(20) <= 12 + np.arange(8)[:, None], 2 * rng.standard_normal((8, 20)), -np.inf)
    return record(scores, rng.standard_normal((20, 5)), 6)


def test_the_text_has_the_notes_before_and_after_the_tile(steps) -> None:  # type: ignore[no-untyped-def]
    for step, query in itertools.product(range(1, len(steps)), (0, 5, 6, 7)):  # the first two see nothing of the last
        alt = draw(steps, step, query).alt
        before, now = steps[step - 1], steps[step]
        assert f"Tile {step + 1} of 4, keys {now.first} to {now.first + now.scores.shape[1] - 1}, query {query}" in alt
        assert f"shrink = exp(m old - m new) = {now.shrink[query]:.4f}" in alt
        assert f"m {before.largest[query]:.3f} -> {now.largest[query]:.3f}" in alt
        assert f"l {before.total[query]:.3f} -> {now.total[query]:.3f}" in alt
        assert f"{before.total[query]:.3f} x {now.shrink[query]:.3f} + {now.weights[query].sum():.3f}" in alt
        assert ("m grows" in alt) == (now.largest[query] > before.largest[query])


def test_a_tile_in_which_a_query_sees_nothing_says_so(steps) -> None:  # type: ignore[no-untyped-def]
    assert "no key here is visible" in draw(steps, 3, 0).alt
    assert "no key here is visible" not in draw(steps, 3, 7).alt
    first = draw(steps, 0, 0).alt
    assert "the first keys it sees" in first
    assert "m -inf -> " in first


@pytest.mark.usefixtures("painted")
def test_a_query_that_has_seen_nothing_has_a_picture_too() -> None:
    blind = record([[-np.inf, 1.0], [0.5, 1.0]], np.ones((2, 2)), 1)
    assert "nothing seen yet" in draw(blind, 0, 0).alt
    assert "the first keys it sees" in draw(blind, 1, 0).alt


@pytest.mark.usefixtures("painted")
def test_every_control_of_the_stepper_works_at_both_ends(steps) -> None:  # type: ignore[no-untyped-def]
    view = tile_stepper(steps, step=2, query=5)
    assert view.values == {"step": 2, "query": 5}
    seen = {view.shown.alt}
    for name, ends in {"step": (0, 3), "query": (0, 7)}.items():
        for value in ends:
            view.controls[name].value = value
            assert re.search(r'<img [^>]*alt="[^"]{40,}"', view.picture.value)
            seen.add(view.shown.alt)
    assert len(seen) == 5
    assert "text/html" in view._repr_mimebundle_()
    assert "No tiles" in tile_stepper([]).shown.alt


@pytest.mark.parametrize(("n", "d", "rows", "sram"), [(8192, 128, 128, 100), (512, 64, 16, 48), (2**17, 256, 256, 48)])
def test_the_counter_says_what_the_formulas_give(n: int, d: int, rows: int, sram: int) -> None:
    alt = draw_traffic(n, d, rows, sram).alt
    unfused = theory.unfused_values(n, d)
    keys = theory.flash1_key_rows(d, sram * KiB // 2)
    for moved in (theory.flash1_moves(n, d, keys).total, theory.flash2_moves(n, d, rows).total, 4 * n * d):
        less = moved <= unfused
        compared = f"{unfused / moved:.3g} times less" if less else f"{moved / unfused:.3g} times more"
        assert f"{format_bytes(2 * moved)}, {compared}" in alt
    assert f"unfused: {format_bytes(2 * unfused)}" in alt
    for moves in orders(n, d, rows, sram).values():
        assert sum(getattr(moves, field) for field, *_ in PARTS) == moves.total, "every tensor has a colour"


def test_every_corner_of_the_counter_gives_a_picture() -> None:
    view = attention_traffic()
    assert view.values == {"n": 8192, "d": 128, "rows": 128, "sram": 100}
    ends = {"n": TOKENS, "d": HEAD_DIMS, "rows": ROWS, "sram": SRAM}
    for values in itertools.product(*((options[0], options[-1]) for options in ends.values())):
        assert "nan" not in draw_traffic(*values).alt
    for name, options in ends.items():
        for value in (options[0], options[-1]):
            view.controls[name].value = value
            assert re.search(r'<img [^>]*alt="[^"]{40,}"', view.picture.value)
