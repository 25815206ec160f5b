"""The roofline explorer: every combination of ends, its numbers are those of theory, and what it says plainly."""

import itertools
import re
from typing import Any

import pytest

from chapters.widgets import roofline
from chapters.widgets.roofline import ARITHMETIC, BATCHES, draw, placed, runs_as, several
from reference_impl.theory import roofline as theory
from reference_impl.theory.hardware import DEVICES, device
from reference_impl.theory.kv_cache import weight_bytes
from reference_impl.theory.model_shapes import model


def ends(control: Any) -> tuple[Any, Any]:
    values = [value for _, value in control._options_full]
    return values[0], values[-1]


def test_every_combination_of_ends_has_a_finite_picture() -> None:
    """The formulas of all 2^8 combinations per device; drawing is done for some of them below."""
    controls = roofline().controls
    names = [name for name in controls if name != "device_name"]
    for machine in DEVICES.values():
        for values in itertools.product(*(ends(controls[name]) for name in names)):
            chosen = dict(zip(names, values, strict=True))
            it = placed(
                model(chosen["model_name"]), machine, chosen["devices"], chosen["batch"], chosen["past"],
                chosen["new"], chosen["weights"], chosen["arithmetic"], chosen["cache"],
            )  # fmt: skip
            assert 0 < it.point.intensity < float("inf")
            assert 0 < it.point.utilization <= 1
            assert it.ceiling > 0
            assert all(it.sweep.intensity[1:] >= it.sweep.intensity[:-1])


@pytest.mark.usefixtures("painted")
def test_every_control_redraws_at_both_ends_and_all_together() -> None:
    view = roofline()
    for control in view.controls.values():
        for value in ends(control):
            control.value = value
            assert re.search(r'<img [^>]*alt="[^"]{40,}"', view.picture.value), control.description
            assert "nan" not in view.shown.alt
    for end in (0, 1):
        for control in view.controls.values():
            control.value = ends(control)[end]
        assert "inf" not in view.shown.alt


@pytest.mark.parametrize("name", sorted(DEVICES))
@pytest.mark.parametrize("precision", ARITHMETIC)
def test_a_missing_peak_is_said_and_one_the_device_has_is_drawn(name: str, precision: str) -> None:
    machine = device(name)
    used, note = runs_as(machine, precision)
    assert used in machine.dense_flops
    assert (note == "") == (precision in machine.dense_flops)
    assert note == "" or note.startswith(f"{name} has no {precision} peak: drawn with {used}")


def test_of_several_formats_that_a_device_has_the_narrowest_is_drawn() -> None:
    narrowest = {"T4": "fp16", "A100-80GB": "bf16", "H100": "fp8", "B200": "fp4"}
    assert {name: runs_as(device(name), "fp4")[0] for name in narrowest} == narrowest


def test_a_t4_has_no_bf16_peak_and_the_picture_says_so() -> None:
    alt = roofline("llama-3.2-1b", "T4", 1).shown.alt
    assert "T4 has no bf16 peak: drawn with fp16, which it has" in alt
    assert f"ridge {device('T4').ridge('fp16'):,.0f}" in alt


def test_the_point_is_the_one_that_theory_places() -> None:
    shape, machine = model("llama-3-70b"), device("H100")
    it = placed(shape, machine, 4, 128, 8192, 1, "16 bit", "bf16", "16 bit")
    expected = theory.place(shape, machine, 128, 8192, 1)
    assert it.point.intensity == expected.intensity
    assert it.point.ridge == machine.ridge("bf16")  # the ridge of several devices is the ridge of one
    assert it.point.seconds == pytest.approx(expected.seconds / 4)


def test_no_batch_passes_the_ceiling_and_a_large_one_comes_near() -> None:
    shape = model("llama-3-70b")
    it = placed(shape, device("H100"), 1, BATCHES[-1], 8192, 1, "16 bit", "bf16", "16 bit")
    assert it.sweep.intensity.max() < it.ceiling
    assert it.sweep.intensity.max() > 0.95 * it.ceiling
    prefill = placed(shape, device("H100"), 1, 1, 0, 512, "16 bit", "bf16", "16 bit")
    assert prefill.ceiling > 100 * it.ceiling  # a prompt reads no cache; it only writes one


def test_marks_of_batches_without_room_are_told_from_those_that_fit() -> None:
    shape, machine = model("llama-3-70b"), device("H100")
    it = placed(shape, machine, 4, 1, 8192, 1, "16 bit", "bf16", "16 bit")
    for batch, fits in zip(BATCHES, it.sweep_fits, strict=True):
        alone = placed(shape, machine, 4, batch, 8192, 1, "16 bit", "bf16", "16 bit")
        assert fits == (alone.needed <= alone.usable)
    assert set(it.sweep_fits.tolist()) == {True, False}  # four H100 hold some of these batches and not all


def test_no_limit_by_the_cache_is_claimed_where_no_cache_is_read() -> None:
    assert "no cache is read" in roofline("llama-3-8b", "H100", 1, past=0, new=512).shown.alt
    assert "no batch exceeds" in roofline("llama-3-8b", "H100", 1, past=512).shown.alt


def test_a_step_that_does_not_fit_gets_no_time() -> None:
    large = roofline("llama-3-70b", "H100", 1, batch=1, past=0).shown.alt
    assert "DOES NOT FIT" in large
    assert "no time to give" in large
    small = roofline("llama-3-8b", "H100", 1, batch=1, past=0).shown.alt
    assert "fits" in small
    assert "floor of the step" in small


def test_several_devices_add_peak_bandwidth_and_capacity() -> None:
    one, four = device("A100-80GB"), several(device("A100-80GB"), 4)
    assert (four.peak("bf16"), four.bandwidth, four.capacity) == (
        4 * one.peak("bf16"), 4 * one.bandwidth, 4 * one.capacity,
    )  # fmt: skip


def test_fewer_bits_per_weight_move_a_single_request_to_the_right() -> None:
    shape = model("llama-3-8b")
    at = [
        placed(shape, device("H100"), 1, 1, 0, 1, bits, "bf16", "16 bit").point.intensity
        for bits in ("16 bit", "8 bit", "4 bit, groups of 128")
    ]
    assert at[1] / at[0] == pytest.approx(2, rel=1e-4)  # the new key and value are written as well
    assert at[2] / at[0] == pytest.approx(weight_bytes(shape, 16) / weight_bytes(shape, 4.125), rel=1e-4)


def test_numbers_between_the_sliders_are_rounded_and_names_are_checked() -> None:
    assert roofline(batch=100).controls["batch"].value == 128
    assert roofline(past=0, new=3000).controls["new"].value == 2048
    with pytest.raises(KeyError, match="unknown device"):
        draw("llama-3-8b", "H9000", 1, 1, 0, 1, "16 bit", "bf16", "16 bit")


def test_the_explorer_has_a_picture_and_text_where_widgets_are_missing() -> None:
    data = roofline()._repr_mimebundle_()
    assert "<img " in data["text/html"]
    assert "FLOP/byte" in data["text/plain"]
