"""The device table is complete, dated, and its ridge points are those of the dense data-sheet figures."""

import re

import pytest

from reference_impl.theory.hardware import DEVICES, device
from reference_impl.theory.units import GB


@pytest.mark.parametrize("name", DEVICES)
def test_every_device_names_its_sku_its_date_and_its_source(name: str) -> None:
    row = device(name)
    assert row.sku
    assert row.source
    assert re.fullmatch(r"20\d\d-(0[1-9]|1[0-2])", row.announced)
    assert 8 * GB <= row.capacity <= 300 * GB
    assert 1e11 < row.bandwidth < 1e13


@pytest.mark.parametrize(
    ("name", "precision", "flop_per_byte"),
    [
        ("H100", "bf16", 295),
        ("H100", "fp8", 591),
        ("A100-80GB", "bf16", 153),
        ("H200", "bf16", 206),
        ("MI300X", "bf16", 247),
        ("B200", "bf16", 281),
    ],
)
def test_ridge_points_follow_from_dense_peaks(name: str, precision: str, flop_per_byte: float) -> None:
    assert device(name).ridge(precision) == pytest.approx(flop_per_byte, rel=0.01)


def test_halving_the_bits_of_the_arithmetic_doubles_the_dense_peak() -> None:
    for row in DEVICES.values():
        if {"fp8", "bf16"} <= row.dense_flops.keys():
            assert row.peak("fp8") == pytest.approx(2 * row.peak("bf16"), rel=0.01)


def test_a_precision_the_device_lacks_is_refused_by_name() -> None:
    with pytest.raises(KeyError, match="expected one of"):
        device("T4").peak("bf16")
    with pytest.raises(KeyError, match="H100"):
        device("H900")


def test_a_row_cannot_be_changed_by_a_reader() -> None:
    with pytest.raises(TypeError):
        device("H100").dense_flops["bf16"] = 1.0  # type: ignore[index]


def test_h200_is_an_h100_with_other_memory() -> None:
    h100, h200 = device("H100"), device("H200")
    assert h200.dense_flops == h100.dense_flops
    assert h200.bandwidth / h100.bandwidth == pytest.approx(1.433, abs=1e-3)
