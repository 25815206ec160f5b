"""What fewer bits buy: the widget's bounds are those of `theory.latency`, and it says what cannot be."""

import re
from typing import Any

import pytest

from chapters.widgets import fewer_bits
from chapters.widgets.fewer_bits import MODELS, step
from reference_impl.theory import kv_cache, latency
from reference_impl.theory.hardware import device
from reference_impl.theory.model_shapes import model
from tests.chapters.drawn import nothing_cut_off

L8 = model("llama-3-8b")


def values_of(control: Any) -> list[Any]:
    return [control._options_full[0][1], control._options_full[-1][1]]


@pytest.mark.usefixtures("painted")
def test_every_control_works_at_both_ends() -> None:
    shown = fewer_bits()
    for control in shown.controls.values():
        before = control.value
        for value in values_of(control):
            control.value = value
            assert re.search(r'<img [^>]*alt="[^"]{20,}"', shown.picture.value)
            assert "nan" not in shown.shown.alt
        control.value = before


@pytest.mark.usefixtures("painted")
def test_the_longest_text_is_not_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    with nothing_cut_off(monkeypatch):
        shown = fewer_bits(batch=1024, context=131072)
        for name in MODELS:
            shown.controls["model_name"].value = name


@pytest.mark.parametrize(("batch", "context"), [(1, 2048), (64, 100), (512, 100), (8, 32768)])
@pytest.mark.parametrize(("arithmetic", "precision"), [("16 bits", "bf16"), ("FP8", "fp8")])
def test_the_bound_is_that_of_the_formulas(batch: int, context: int, arithmetic: str, precision: str) -> None:
    read = kv_cache.read_bytes(L8, 4.125, embedding_bits=16)
    expected = latency.decode_seconds(L8, context, device("H100"), batch, precision, read, bytes_per_value=1)
    found = step(L8, "H100", "INT4, groups of 128", arithmetic, "8 bits", batch, context)
    assert found.bound == pytest.approx(float(expected), rel=1e-12)


def test_arithmetic_that_a_device_lacks_is_said_and_not_drawn() -> None:
    shown = fewer_bits()
    shown.controls["arithmetic"].value = "FP8"
    shown.controls["device_name"].value = "A100-80GB"
    assert shown.shown.alt == "A100-80GB does not multiply FP8: choose another arithmetic, or another device."


def test_a_batch_that_does_not_fit_is_said() -> None:
    shown = fewer_bits(batch=1024, context=131072)
    assert "this batch has 134,217,728: too many" in shown.shown.alt
    assert "too many" not in fewer_bits().shown.alt
