"""Formats of numbers against the list of all their values; schemes against sums in Python, group by group."""

from __future__ import annotations

import bisect
import itertools
import math

import pytest
import torch
from torch import Tensor

from reference_impl.models.quantization.numbers import (
    FORMATS,
    NF4_VALUES,
    e8m0_to_scales,
    from_fnuz,
    scales_to_e8m0,
    to_codes,
    to_values,
)
from reference_impl.models.quantization.scheme import Fitted, Scheme, decode, encode, fit


def small_float(code: int, exponent_bits: int, mantissa_bits: int, bias: int) -> float:
    """The value of a code by the formula of floating point."""
    exponent, mantissa = (code >> mantissa_bits) % (1 << exponent_bits), code % (1 << mantissa_bits)
    sign = -1 if code >> (exponent_bits + mantissa_bits) else 1
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (1 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias)


VALUES = {
    "int2": [-2.0, -1.0, 0.0, 1.0],
    "int3": [float(i) for i in range(-4, 4)],
    "int4": [float(i) for i in range(-8, 8)],
    **{f"int{bits}": [float(i) for i in range(-(1 << bits - 1), 1 << bits - 1)] for bits in (5, 6, 7, 8)},
    "ternary": [-1.0, 0.0, 1.0],
    "e2m1": [small_float(c, 2, 1, 1) for c in range(16)],
    "e4m3": [small_float(c, 4, 3, 7) for c in range(256) if c % 128 != 127],
    "e5m2": [small_float(c, 5, 2, 15) for c in range(256) if c % 128 < 124],
    "nf4": list(NF4_VALUES),
}


def some(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", FORMATS)
def test_every_value_is_its_own_code_and_others_go_to_the_nearest(name: str) -> None:
    values = sorted(set(VALUES[name]))
    exact = torch.tensor(values)
    assert torch.equal(to_values(to_codes(exact, name), name), exact)
    assert to_codes(exact, name).dtype is FORMATS[name].code_dtype
    middles = [(a + b) / 2 for a, b in itertools.pairwise(values)]
    draws = (some(400) * values[-1] / 2).tolist() + (some(100, seed=1) * values[-1] / 200).tolist()
    numbers = [*draws, *middles, 2 * values[0] - 1, 2 * values[-1] + 1]
    found = to_values(to_codes(torch.tensor(numbers), name), name).tolist()
    for number, value in zip(torch.tensor(numbers).tolist(), found, strict=True):
        at = bisect.bisect(values, number)
        least = min(abs(number - near) for near in values[max(at - 1, 0) : at + 1])
        assert abs(number - value) <= least + (1e-6 if name == "nf4" else 0), (number, value)  # float32's middle


@pytest.mark.parametrize(("name", "bits"), [("e2m1", 1), ("e4m3", 3), ("e5m2", 2)])
def test_ties_between_floats_go_to_the_even_code(name: str, bits: int) -> None:
    values = sorted({abs(value) for value in VALUES[name]})
    middles = torch.tensor([(a + b) / 2 for a, b in itertools.pairwise(values)])
    assert all(
        values.index(value) % 2 == 0
        for number in (middles, -middles)
        for value in to_values(to_codes(number, name), name).abs().tolist()
    )


def test_scales_of_a_byte_that_are_powers_of_two() -> None:
    codes = torch.arange(255, dtype=torch.uint8)
    assert e8m0_to_scales(codes).tolist() == [2.0 ** (code - 127) for code in range(255)]
    assert torch.equal(scales_to_e8m0(e8m0_to_scales(codes)), codes)
    assert e8m0_to_scales(torch.tensor([255], dtype=torch.uint8)).isnan().all()
    assert torch.equal(e8m0_to_scales(codes), codes.view(torch.float8_e8m0fnu).float())  # torch's own
    with pytest.raises(ValueError, match="expected powers of two"):
        scales_to_e8m0(torch.tensor([3.0]))


def test_fnuz_becomes_the_same_bits_of_twice_the_value() -> None:
    bits = torch.tensor([b for b in range(256) if b % 128 not in (127,) and b != 128], dtype=torch.uint8)
    other = bits.view(torch.float8_e4m3fnuz)
    assert torch.equal(from_fnuz(other).float(), 2 * other.float())
    for wrong in (0x7F, 0x80, 0xFF):
        with pytest.raises(ValueError, match="FNUZ form: expected magnitudes below 240.*got 1 that"):
            from_fnuz(torch.tensor([0, wrong], dtype=torch.uint8).view(torch.float8_e4m3fnuz))


SCHEMES = [
    Scheme("int4", "group", 32),
    Scheme("int4", "group", 16, symmetric=False),
    Scheme("int8", "channel"),
    Scheme("int8", "tensor", symmetric=False),
    Scheme("e4m3", "tensor"),
    Scheme("e4m3", "channel", scale_dtype=torch.float32),
    Scheme("e4m3", "block"),
    Scheme("e5m2", "block", scale_dtype=torch.float32),
    Scheme("e2m1", "group", 16, scales="e4m3"),
    Scheme("e2m1", "group", 32, scales="e8m0"),
    Scheme("e4m3", "group", 32, scales="e8m0"),
    Scheme("nf4", "group", 64),
    Scheme("ternary", "tensor"),
]


def cells(scheme: Scheme, rows: int, columns: int) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """Place of a scale -> what shares it, weight by weight."""
    where = {
        "tensor": lambda r, c: (0, 0),
        "channel": lambda r, c: (r, 0),
        "group": lambda r, c: (r, c // (scheme.group_size or 1)),
        "block": lambda r, c: (r // 128, c // 128),
    }[scheme.per]
    found: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for row in range(rows):
        for column in range(columns):
            found.setdefault(where(row, column), []).append((row, column))
    return found


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_each_weight_is_off_by_less_than_half_a_step_of_its_own_scale(scheme: Scheme) -> None:
    """Against all values that the format has, with the scale of the weight's own group."""
    rows, columns = (200, 192) if scheme.per == "block" else (6, 64)
    weight = some(rows, columns) * torch.logspace(-2, 1, rows)[:, None]
    fitted = fit(weight, scheme)
    codes = encode(weight, scheme, fitted)
    found = decode(codes, scheme, fitted)
    assert found.dtype is torch.float32
    assert codes.shape == weight.shape
    assert fitted.scales.shape == scheme.scale_shape(weight.shape)
    values, factor = sorted(set(VALUES[scheme.numbers])), 1.0
    if fitted.tensor_scale is not None:
        factor = float(fitted.tensor_scale)
        assert torch.equal(fitted.scales, fitted.scales.to(torch.float8_e4m3fn).float())
    for place, members in cells(scheme, rows, columns).items():
        scale = float(fitted.scales[place]) * factor
        zero = 0 if fitted.zeros is None else int(fitted.zeros[place])
        for at in members:
            number = float(weight[at]) / scale + zero
            near = bisect.bisect(values, number)
            least = min(abs(number - value) for value in values[max(near - 1, 0) : near + 1])
            assert abs(float(found[at]) / scale + zero - number) <= least + 1e-5 * max(1, abs(number))
        largest = max(abs(float(weight[at])) for at in members)
        if scheme.symmetric and scheme.numbers != "ternary":  # nothing is cut off by more than the scale's rounding
            reach = FORMATS[scheme.numbers].reach
            slack = {"float": 1 + 2.0**-8, "e4m3": 1 + 2.0**-4, "e8m0": 2.0}[scheme.scales]
            assert scale * reach * slack >= largest
            assert scale * reach <= 2 * largest * slack


@pytest.mark.parametrize("scheme", [s for s in SCHEMES if s.per == "group"], ids=str)
def test_a_group_of_columns_and_a_single_one_are_coded_as_in_the_whole(scheme: Scheme) -> None:
    size = scheme.group_size or 0
    weight = some(5, 3 * size)
    whole = fit(weight, scheme)
    codes = encode(weight, scheme, whole)
    for group in range(3):
        piece = weight[:, group * size : (group + 1) * size]
        fitted = fit(piece, scheme, whole.tensor_scale)
        assert torch.equal(fitted.scales, whole.scales[:, group : group + 1])
        for column in range(size):
            one = encode(piece[:, column : column + 1], scheme, fitted)
            assert torch.equal(one.float(), codes[:, group * size + column : group * size + column + 1].float())
            assert torch.equal(
                decode(one, scheme, fitted), decode(codes, scheme, whole)[:, group * size + column, None]
            )


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_zero_has_a_code_and_a_matrix_of_zeros_stays_one(scheme: Scheme) -> None:
    weight = some(128, 128) + 0.75
    weight[3, 5] = 0
    fitted = fit(weight, scheme)
    assert float(decode(encode(weight, scheme, fitted), scheme, fitted)[3, 5]) == 0
    nothing = torch.zeros(128, 128)
    fitted = fit(nothing, scheme)
    assert bool((fitted.scales > 0).all())
    assert not decode(encode(nothing, scheme, fitted), scheme, fitted).any()


def test_bits_are_those_of_codes_scales_zeros_and_tensor_scale() -> None:
    assert Scheme("int4", "group", 128).bits_per_weight((64, 256)) == 4 + 16 / 128
    assert Scheme("int4", "group", 32, symmetric=False).bits_per_weight((64, 256)) == 4 + (16 + 4) / 32
    assert Scheme("int8", "channel", scale_dtype=torch.float32).bits_per_weight((64, 256)) == 8 + 32 / 256
    assert Scheme("e4m3", "block").bits_per_weight((200, 100)) == 8 + 2 * 16 / 20_000
    assert Scheme("e2m1", "group", 16, scales="e4m3").bits_per_weight((8, 16)) == 4 + 8 / 16 + 32 / 128
    assert math.isclose(Scheme("e2m1", "group", 32, scales="e8m0").bits_per_weight((8, 64)), 4.25)


def test_what_does_not_go_together_is_named() -> None:
    for wrong, message in [
        ({"numbers": "int9", "per": "tensor"}, "numbers: expected one of int2.*got 'int9'"),
        ({"numbers": "int4", "per": "row"}, "per: expected tensor.*got 'row'"),
        ({"numbers": "int4", "per": "group"}, "group_size: expected a number of inputs"),
        ({"numbers": "int4", "per": "tensor", "group_size": 8}, "group_size: .*for per='group' only, got 8"),
        ({"numbers": "e4m3", "per": "tensor", "symmetric": False}, "expected integers, got e4m3"),
        ({"numbers": "int8", "per": "group", "group_size": 32, "scales": "e8m0"}, "expected floats.*got int8"),
    ]:
        with pytest.raises(ValueError, match=message):
            Scheme(**wrong)
    with pytest.raises(ValueError, match="groups of 32 inputs: expected a multiple of them, got 40"):
        fit(some(2, 40), Scheme("int4", "group", 32))
    with pytest.raises(ValueError, match="expected finite numbers"):
        fit(torch.tensor([[1.0, float("nan")]]), Scheme("int8", "tensor"))


def test_steps_have_the_tensor_scale_in_them() -> None:
    assert Fitted(torch.tensor([[2.0]]), None, torch.tensor(0.5)).steps().tolist() == [[1.0]]
