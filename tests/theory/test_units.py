"""Sizes are printed in the unit that was asked for, and rates of different kinds refuse to be mixed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference_impl.theory.units import (
    GB,
    BytesPerSecond,
    FlopPerByte,
    FlopPerSecond,
    GiB,
    UnitError,
    compute_utilization_ceiling,
    format_bytes,
    format_flops,
    format_seconds,
    ridge_point,
)

SCALE = {"B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "PB": 1e15}
SCALE |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50}


def parse(text: str) -> float:
    number, unit = text.split()
    return float(number) * SCALE[unit]


@given(st.integers(1, 10**17), st.booleans())
def test_printed_bytes_read_back_to_three_digits(num_bytes: int, binary: bool) -> None:
    text = format_bytes(num_bytes, binary)
    assert parse(text) == pytest.approx(num_bytes, rel=5.1e-3)
    assert text.endswith("iB") == (binary and num_bytes >= 1024)


@given(st.integers(1, 10**15), st.booleans())
def test_the_number_before_the_unit_stays_below_one_step_of_it(num_bytes: int, binary: bool) -> None:
    assert float(format_bytes(num_bytes, binary).split()[0]) < (1024 if binary else 1000)


def test_bytes_just_below_a_step_are_not_printed_as_a_thousand_of_the_smaller_unit() -> None:
    assert format_bytes(999_999_999) == "1.00 GB"
    assert format_bytes(-2.5 * GiB, binary=True) == "-2.50 GiB"
    assert format_bytes(0) == "0 B"


def test_operations_and_durations_are_printed_with_their_unit() -> None:
    assert format_flops(1.4336e13) == "14.3 TFLOP"
    assert format_seconds(4.18e-3) == "4.18 ms"
    assert format_seconds(141e-6) == "141 us"
    assert format_seconds(5e-9) == "5.00 ns"
    assert format_seconds(675) == "11.2 min"
    assert format_seconds(169_200) == "47.0 h"


def test_one_unit_divided_by_itself_is_a_plain_ratio() -> None:
    assert BytesPerSecond(4800e9) / BytesPerSecond(3350e9) == pytest.approx(1.433, abs=1e-3)
    assert (FlopPerSecond(10.0) / 2).value == 5.0
    assert (2 * BytesPerSecond(3.0)).value == 6.0


@pytest.mark.parametrize(
    ("left", "right"),
    [(FlopPerSecond(1.0), BytesPerSecond(1.0)), (BytesPerSecond(1.0), FlopPerSecond(1.0))],
)
def test_compute_and_bandwidth_refuse_to_be_divided_and_say_what_to_do(left: object, right: object) -> None:
    with pytest.raises(UnitError, match="ridge_point"):
        left / right  # type: ignore[operator]
    with pytest.raises(UnitError):
        left * right  # type: ignore[operator]


def test_ridge_point_insists_on_the_order_of_its_arguments() -> None:
    with pytest.raises(UnitError, match="FlopPerSecond, BytesPerSecond"):
        ridge_point(BytesPerSecond(1.0), FlopPerSecond(1.0))  # type: ignore[arg-type]


@given(st.floats(0.01, 1e4), st.floats(1e12, 1e16), st.floats(1e11, 1e13))
def test_bandwidth_times_intensity_never_feeds_more_than_the_ceiling(i: float, flops: float, rate: float) -> None:
    compute, bandwidth, intensity = FlopPerSecond(flops), BytesPerSecond(rate), FlopPerByte(i)
    ceiling = compute_utilization_ceiling(intensity, compute, bandwidth)
    assert 0 < ceiling <= 1
    fed = (bandwidth * intensity) / compute
    assert ceiling == pytest.approx(min(1.0, fed))
    assert (intensity * bandwidth) == (bandwidth * intensity)


def test_decimal_and_binary_constants_differ_by_seven_percent_at_a_gigabyte() -> None:
    assert GiB / GB == pytest.approx(1.0737, abs=1e-4)
