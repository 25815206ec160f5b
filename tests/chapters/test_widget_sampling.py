"""The sampling widget shows the distribution it is given and the token that u draws, at both ends of every slider."""

import re
from typing import Any

import numpy as np
import pytest

from chapters.widgets import sampling

NAMES = [f"t{i}" for i in range(50)]


def distribution(temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """Weights 1/1, 1/2, 1/3 ... cut by k and p in the plain way; temperature 0 is the first."""
    if temperature == 0:
        return np.eye(len(NAMES))[0]
    probs = (1 / np.arange(1, len(NAMES) + 1)) ** (1 / temperature)
    probs[top_k or len(NAMES) :] = 0
    probs /= probs.sum()
    probs[np.cumsum(probs) - probs >= top_p] = 0
    found: np.ndarray = probs / probs.sum()
    return found


def ends(control: Any) -> tuple[Any, Any]:
    return control.min, control.max


@pytest.mark.usefixtures("painted")
def test_every_slider_works_at_both_ends() -> None:
    view = sampling(distribution, NAMES)
    for control in view.controls.values():
        for value in ends(control):
            control.value = value
            assert re.search(r'<img [^>]*alt="[^"]{20,}"', view.picture.value)
            assert "nan" not in view.shown.alt
    for low_or_high in (0, 1):
        for control in view.controls.values():
            control.value = ends(control)[low_or_high]
        assert "draws" in view.shown.alt


def test_it_says_how_many_tokens_stay_and_which_is_drawn() -> None:
    view = sampling(distribution, NAMES)
    kept = distribution(1.0, 0, 0.5)
    view.controls["top_p"].value = 0.5
    view.controls["u"].value = 0.99
    assert f"{int((kept > 0).sum())} of 50 tokens stay" in view.shown.alt
    assert f"draws 't{int(np.flatnonzero(kept)[-1])}'" in view.shown.alt
    view.controls["u"].value = 0.0
    assert "draws 't0'" in view.shown.alt


def test_greedy_keeps_one_token() -> None:
    view = sampling(distribution, NAMES)
    view.controls["temperature"].value = 0.0
    assert "1 of 50 tokens stay" in view.shown.alt


def test_a_drawn_token_outside_the_most_likely_ones_is_still_shown() -> None:
    view = sampling(distribution, NAMES, shown=4)
    view.controls["top_p"].value = 1.0
    view.controls["u"].value = 0.99
    assert "draws 't4" in view.shown.alt
