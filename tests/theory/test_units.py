"""Sizes are printed in the unit that was asked for, and rates of different kinds refuse to be mixed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference_impl.theory import units
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


def test_decimal_constants_step_by_a_thousand_and_binary_ones_by_1024() -> None:
    assert [1000**i for i in range(1, 6)] == [units.KB, units.MB, units.GB, units.TB, units.PB]
    assert [units.KiB, units.MiB, units.GiB, units.TiB, units.PiB] == [1024**i for i in range(1, 6)]


def test_decimal_and_binary_constants_differ_by_seven_percent_at_a_gigabyte() -> None:
    assert GiB / GB == pytest.approx(1.0737, abs=1e-4)


@given(st.floats(1e-8, 1e6))
def test_printed_durations_read_back_and_stay_below_one_step_of_their_unit(seconds: float) -> None:
    scale = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1, "min": 60, "h": 3600}
    number, unit = format_seconds(seconds).split()
    assert float(number) * scale[unit] == pytest.approx(seconds, rel=5.1e-3)
    assert float(number) < {"s": 60, "min": 60, "h": 1e9}.get(unit, 1000)
    assert format_seconds(-seconds) == f"-{number} {unit}"


def test_durations_just_below_a_step_move_to_the_next_unit() -> None:
    assert format_seconds(0.99999) == "1.00 s"
    assert format_seconds(59.99) == "1.00 min"
    assert format_seconds(3599.9) == "1.00 h"
    assert format_seconds(0) == "0 ns"


RATES = (FlopPerSecond(2.0), BytesPerSecond(2.0), FlopPerByte(2.0))


@pytest.mark.parametrize("left", RATES, ids=lambda q: q.unit)
@pytest.mark.parametrize("right", RATES, ids=lambda q: q.unit)
def test_only_one_unit_by_itself_may_be_divided(left: object, right: object) -> None:
    """Bytes per second over FLOP per second, or any other pair, says nothing until an intensity is named."""
    if type(left) is type(right):
        assert left / right == 1.0  # type: ignore[operator]
    else:
        with pytest.raises(UnitError, match=r"expected the same unit on both sides of '/', got .* and "):
            left / right  # type: ignore[operator]


@pytest.mark.parametrize("left", RATES, ids=lambda q: q.unit)
@pytest.mark.parametrize("right", RATES, ids=lambda q: q.unit)
def test_rates_are_not_added_and_only_an_intensity_turns_bytes_into_operations(left: object, right: object) -> None:
    with pytest.raises(TypeError):
        left + right  # type: ignore[operator]
    if {type(left), type(right)} == {BytesPerSecond, FlopPerByte}:
        assert left * right == FlopPerSecond(4.0)  # type: ignore[operator]
    else:
        with pytest.raises(UnitError, match="expected a plain factor or FLOP/byte times byte/s, got"):
            left * right  # type: ignore[operator]


def test_a_number_divided_by_a_rate_and_a_rate_beside_a_number_are_refused() -> None:
    with pytest.raises(TypeError):
        2 / BytesPerSecond(1.0)  # type: ignore[operator]
    with pytest.raises(TypeError):
        BytesPerSecond(1.0) + 1  # type: ignore[operator]
    with pytest.raises(TypeError):
        BytesPerSecond(1.0) * "2"


def test_factors_and_values_may_be_numpy_numbers_and_arrays() -> None:
    swept = BytesPerSecond(3.0) * np.array([1, 2])
    assert isinstance(swept, BytesPerSecond)
    assert swept.value.tolist() == [3, 6]
    assert (np.array([1, 2]) * BytesPerSecond(3.0)).value.tolist() == [3, 6]
    assert (np.int64(2) * BytesPerSecond(3.0)).value == (BytesPerSecond(3.0) * np.float32(2)).value == 6
    assert (BytesPerSecond(np.array([4.0, 8.0])) / np.int64(4)).value.tolist() == [1, 2]
    assert (BytesPerSecond(np.array([4.0, 8.0])) / BytesPerSecond(4.0)).tolist() == [1, 2]
    ridge = ridge_point(FlopPerSecond(np.array([100.0, 400.0])), BytesPerSecond(2.0))
    assert ridge.value.tolist() == [50, 200]
    ceiling = compute_utilization_ceiling(
        FlopPerByte(100.0), FlopPerSecond(np.array([100.0, 400.0])), BytesPerSecond(2.0)
    )
    assert ceiling.tolist() == [1, 0.5]


def test_a_rate_is_printed_with_its_unit() -> None:
    assert [str(rate) for rate in RATES] == ["2 FLOP/s", "2 byte/s", "2 FLOP/byte"]
    assert str(BytesPerSecond(3350e9)) == "3.35e+12 byte/s"


@given(st.integers(0, 10**17))
def test_decimal_and_binary_names_are_never_mixed_in_one_size(num_bytes: int) -> None:
    decimal, binary = (format_bytes(num_bytes, b).split()[1] for b in (False, True))
    assert "i" not in decimal
    assert binary == "B" or binary.endswith("iB")


def test_operations_and_bytes_step_at_their_own_base_and_stop_at_the_last_unit() -> None:
    assert format_flops(999.6e12) == "1.00 PFLOP"
    assert format_flops(5) == "5 FLOP"
    assert format_flops(5e21) == "5000 EFLOP"
    assert format_bytes(1023) == "1.02 KB"
    assert format_bytes(1023, binary=True) == "1023 B"
    assert format_bytes(2**60, binary=True) == "1024 PiB"
    assert format_bytes(2_684_354_560, digits=5) == "2.6844 GB"
