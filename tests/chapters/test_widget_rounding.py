"""The error explorer shows the errors of the formats it names, at every setting, and what an outlier does."""

import re
from typing import Any

import numpy as np
import pytest

from chapters.widgets import rounding
from tests.chapters.drawn import nothing_cut_off

NORMAL = np.random.default_rng(0).standard_normal((8, 256))


def view() -> Any:
    return rounding({"normal": NORMAL, "spread": np.exp(NORMAL)})


def values_of(control: Any) -> list[Any]:
    return list(control.options) if hasattr(control, "options") else [control.min, control.max]


@pytest.mark.usefixtures("painted")
def test_every_control_works_at_every_value() -> None:
    shown = view()
    for control in shown.controls.values():
        for value in values_of(control):
            control.value = value
            assert re.search(r'<img [^>]*alt="[^"]{20,}"', shown.picture.value)
            assert "nan" not in shown.shown.alt


def test_axis_labels_have_room_beside_large_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    with nothing_cut_off(monkeypatch):
        spiky = rounding({"spiky": np.where(np.arange(49152).reshape(64, 768) % 97, 0.01, 1.0) * 10})
        spiky.controls["group"].value = "16"


def test_bits_and_error_are_those_of_the_arithmetic_done_by_hand() -> None:
    shown = view()
    shown.controls["group"].value = "32"
    groups = NORMAL.reshape(-1, 32)
    scales = np.abs(groups).max(1, keepdims=True) / 7
    back = np.round(groups / scales) * scales
    error = np.sqrt(np.square(back - groups).sum() / np.square(groups).sum())
    assert f"normal as int4: 4.5 bits a value, error {error:.2%}, {np.mean(back == 0):.1%} become 0" in shown.shown.alt


def test_an_outlier_takes_the_digits_of_integers_and_not_of_floats() -> None:
    shown = view()
    assert "The least error has int8" in shown.shown.alt
    shown.controls["outlier"].value = "100 times the rms"
    shown.controls["tensor"].value = "spread"
    before = shown.shown.alt
    shown.controls["format_name"].value = "e4m3"
    assert "become 0" in before
    share = [float(re.search(r"([\d.]+)% become 0", alt)[1]) for alt in (before, shown.shown.alt)]  # type: ignore[index]
    assert share[0] > 50
    assert share[1] < 1


def test_power_of_two_scales_are_shown_for_formats_that_have_them() -> None:
    shown = view()
    shown.controls["scales"].value = "E8M0 (MX)"
    assert "int4 has no E8M0 (MX) scales: choose one of int8, e4m3, e5m2, e2m1" in shown.shown.alt
    shown.controls["format_name"].value = "e2m1"
    shown.controls["group"].value = "32"
    assert "normal as e2m1: 4.25 bits a value" in shown.shown.alt
    assert "The least error has int8" in shown.shown.alt


def test_a_tensor_that_cannot_be_cut_into_groups_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"odd: expected \[rows, columns\] with a multiple of 128 columns, got \(3, 100\)"
    ):
        rounding({"odd": np.ones((3, 100))})
