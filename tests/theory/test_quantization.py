"""Formats against torch's own and published tables, rounding against a brute force, Lloyd's values against Max."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from reference_impl.theory import quantization as q

TORCH = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "e4m3fnuz": torch.float8_e4m3fnuz}
some_numbers = arrays(
    np.float64, (3, 16), elements=st.floats(-1e6, 1e6, allow_subnormal=False).map(lambda x: x if abs(x) > 1e-6 else 0.0)
)


@pytest.mark.parametrize("name", TORCH)
def test_a_float_format_has_the_finite_values_of_torchs(name: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(TORCH[name]).double().numpy()
    assert np.array_equal(q.FORMATS[name].values, np.unique(codes[np.isfinite(codes)] + 0.0))


def test_the_other_formats_are_those_of_their_papers() -> None:
    assert q.FORMATS["e2m1"].values[7:].tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6]  # OCP MX 1.0, section 5.3.3
    published = [
        -1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0,
        0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0,
    ]  # fmt: skip  # Dettmers et al. 2023, appendix E
    assert q.nf4_values() == pytest.approx(published, abs=1e-6)
    assert [q.FORMATS[name].reach for name in ("int8", "int4", "ternary")] == [127, 7, 1]
    largest = torch.finfo(torch.float16).max, torch.finfo(torch.bfloat16).max
    assert (q.float_values(5, 10, "ieee").max(), q.float_values(8, 7, "ieee").max()) == largest
    assert largest[0] == 65_504
    assert [q.FORMATS[name].reach for name in ("e4m3", "e5m2", "e4m3fnuz")] == [448, 57_344, 240]


@pytest.mark.parametrize("name", q.FORMATS)
@settings(max_examples=25)
@given(x=some_numbers)
def test_the_nearest_value_is_the_nearest(name: str, x: np.ndarray) -> None:
    values = q.FORMATS[name].values
    found = q.nearest(x, values)
    assert np.isin(found, values).all()
    assert np.array_equal(np.abs(found - x), np.abs(values - x[..., None]).min(-1))


@pytest.mark.parametrize("name", ["int4", "e2m1", "nf4", "e4m3"])
@settings(max_examples=25)
@given(x=some_numbers)
def test_each_group_is_rounded_as_if_it_were_alone_and_its_largest_stays(name: str, x: np.ndarray) -> None:
    found = q.rounded(x, name, 8)
    alone = [q.rounded(group, name) for group in x.reshape(-1, 8)]
    assert np.array_equal(found.reshape(-1, 8), np.array(alone))
    largest = np.abs(x.reshape(-1, 8)).max(1)
    assert np.abs(found.reshape(-1, 8)).max(1) == pytest.approx(largest, rel=1e-12)


def test_a_power_of_two_cuts_off_what_lies_beyond_and_never_more_than_a_half() -> None:
    """Against the OCP's rule, written with exponents of frexp."""
    largest = np.array([0.0, 1.0, 5.9, 6.0, 7.99, 8.0, 1e-3])
    exponents = [np.frexp(x)[1] - 1 - 2 for x in largest[1:]]  # E2M1's largest exponent is 2
    assert q.scales_of(largest, 6, "e8m0").tolist() == [1, *(2.0**e for e in exponents)]
    assert q.rounded(np.array([7.99, 1, 1, 1]), "e2m1", scale_format="e8m0")[0] == 6
    assert (largest[1:] / q.scales_of(largest, 6, "e8m0")[1:]).max() < 8


def test_e4m3_scales_are_values_of_e4m3_times_one_number() -> None:
    rng = np.random.default_rng(0)
    largest = rng.exponential(size=64)
    exact, scales = q.scales_of(largest, 6), q.scales_of(largest, 6, "e4m3")
    of_tensor = exact.max() / 448
    codes = torch.from_numpy(exact / of_tensor).to(torch.float8_e4m3fn).double().numpy()
    assert scales / of_tensor == pytest.approx(codes, rel=1e-12)


@pytest.mark.parametrize(("count", "distortion"), [(2, 0.3634), (4, 0.1175), (8, 0.03454), (16, 0.009497)])
def test_lloyds_values_for_a_normal_distribution_have_the_error_that_max_published(
    count: int, distortion: float
) -> None:
    """J. Max, Quantizing for minimum distortion (1960), table I."""
    samples = np.random.default_rng(1).standard_normal(200_000)
    values = q.lloyd_max(samples, count, rounds=400)
    found = np.mean((q.nearest(samples, values) - samples) ** 2)
    assert found == pytest.approx(distortion, rel=0.02)


def test_stored_bits_count_the_scales() -> None:
    assert q.stored_bits("int4", 128) == 4.125
    assert q.stored_bits("e2m1", 16, "e4m3") == 4.5
    assert q.stored_bits("e2m1", 32, "e8m0") == 4.25
    assert q.stored_bits("e4m3", None) == 8


def test_what_does_not_fit_is_named() -> None:
    with pytest.raises(ValueError, match=r"expected one of int8, .*, got 'int3'"):
        q.rounded(np.ones(8), "int3")
    with pytest.raises(ValueError, match="divisor of the last dimension, 8, got 3"):
        q.rounded(np.ones(8), "int4", 3)


def test_what_gptq_carries_over_is_what_least_squares_gives() -> None:
    rng = np.random.default_rng(2)
    for correlation in (1.0, 0.6):
        first = rng.standard_normal(200_000)
        second = correlation * first + np.sqrt(1 - correlation**2) * rng.standard_normal(200_000)
        left = 0.4 * first + 0.3 * second  # the first is rounded to 0
        best = (left @ second) / (second @ second)
        assert q.carried_over(0.4, 0.3, correlation) == pytest.approx(best, abs=0.01)
    assert q.carried_over(0.7, 0.3) == pytest.approx(0.0)


def test_smoothing_gives_both_sides_one_reach_at_a_half_and_leaves_one_side_at_the_ends() -> None:
    s = q.smoothing_scale(64.0, 0.25)
    assert 64.0 / s == pytest.approx(0.25 * s)
    assert 64.0 / q.smoothing_scale(64.0, 0.25, 1.0) == 1.0
    assert 0.25 * q.smoothing_scale(64.0, 0.25, 0.0) == 1.0


def test_a_rotated_outlier_keeps_its_length() -> None:
    assert 4096 * q.rotated_outlier(80.0, 4096) ** 2 == pytest.approx(80.0**2)
    assert q.gram_bytes(4096) == np.zeros((4096, 4096), np.float32).nbytes
