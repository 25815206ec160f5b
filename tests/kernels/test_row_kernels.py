"""Norms, gates, rotation with the cache's write: kernels against their twins and float64, interpreted or on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from reference_impl.assembly.config import RopeConfig
from reference_impl.core.rotary import RotaryTable
from reference_impl.kernels import gates, gates_fp8, reference, rms_norm
from reference_impl.kernels.rotate_and_write import rotate_and_write
from tests.kernels.paged import DEVICE, check

DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()
# Rows and their length: a lone value, no powers of two, a tile exactly and one more, several tiles.
SHAPES = [(1, 1), (3, 5), (7, 80), (2, 1024), (5, 1025), (2, 16384), (2, 16385), (1, 40000)]
FP8_STEP = 2.0**-4  # half of the distance of two codes, relative to the smaller


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def check_fp8(codes: Tensor, scale: Tensor, exact: Tensor) -> None:
    """Every code is the nearest; the largest magnitude of a row has the largest code. exact [rows, n] float64."""
    assert codes.dtype is torch.float8_e4m3fn
    assert scale.dtype is torch.float32
    assert codes.shape == exact.shape
    assert scale.shape == exact.shape[:-1]
    expected = exact.abs().amax(-1).clamp(min=2.0**-64) / 448
    assert torch.allclose(scale.double(), expected, rtol=2e-3, atol=0)
    # In steps of the scale: half a code's distance, and what the scale and the value err before they are rounded.
    wanted = exact / scale.double()[..., None]
    error = (codes.double() - wanted).abs()
    assert (error <= (FP8_STEP * wanted.abs()).clamp(min=2.0**-10) * 1.01 + 1e-3 * wanted.abs()).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm(shape, dtype) -> None:
    check(rms_norm.rms_norm, reference.rms_norm, (randn(*shape, dtype=dtype), randn(shape[1], dtype=dtype), 1e-5))


@pytest.mark.parametrize("weight", [None, torch.float32, torch.float16])
def test_the_weight_of_a_norm_may_be_wider_or_missing(weight) -> None:
    given = None if weight is None else 1 + randn(96, dtype=weight) / 100
    x = randn(4, 3, 96, dtype=torch.float16)
    check(rms_norm.rms_norm, reference.rms_norm, (x, given, 1e-6))
    assert rms_norm.rms_norm(x, given, 1e-6).shape == (4, 3, 96)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_add_rms_norm(shape, dtype) -> None:
    x, residual, weight = randn(*shape, dtype=dtype), randn(*shape, dtype=dtype, seed=1), randn(shape[1], dtype=dtype)
    check(first(rms_norm.add_rms_norm), first(reference.add_rms_norm), (x, residual, weight, 1e-5))
    normed, total = rms_norm.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, rms_norm.rms_norm(total, weight, 1e-5)), "fused or not, the same bits"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_add_rms_norm_to_fp8(shape, dtype) -> None:
    x, residual, weight = randn(*shape, dtype=dtype), randn(*shape, dtype=dtype, seed=1), randn(shape[1], dtype=dtype)
    codes, scale, total = rms_norm.add_rms_norm_fp8(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    check_fp8(codes, scale, reference.rms_norm(total.double(), weight.double(), 1e-5))


@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-4, 1e15])
def test_norms_of_huge_and_tiny_rows_are_those_of_torch(size) -> None:
    x, weight = size * randn(3, 70), randn(70)
    check(rms_norm.rms_norm, reference.rms_norm, (x, weight, 1e-6))
    codes, scale, _ = rms_norm.add_rms_norm_fp8(x, x, weight, 1e-6)
    check_fp8(codes, scale, reference.rms_norm(2 * x.double(), weight.double(), 1e-6))


def test_rows_of_a_wider_matrix_are_read_where_they_lie() -> None:
    wide, weight = randn(6, 200), randn(60)
    wide[:, 60:] = torch.nan
    check(rms_norm.rms_norm, reference.rms_norm, (wide[:, :60], weight, 1e-6))
    check(
        first(rms_norm.add_rms_norm),
        first(reference.add_rms_norm),
        (wide[:, :60], wide[:3, :60].repeat(2, 1), weight, 1e-6),
    )
    check(gates.silu_and_mul, reference.silu_and_mul, (wide[:, :60],))
    with pytest.raises(ValueError, match="rows that are contiguous"):
        rms_norm.rms_norm(wide[:, :120:2], weight, 1e-6)
    with pytest.raises(ValueError, match="contiguous rows"):
        gates.silu_and_mul(wide[:, :120:2])


def test_no_rows_give_no_rows() -> None:
    x = randn(0, 64)
    assert rms_norm.rms_norm(x, None, 1e-6).shape == (0, 64)
    assert [t.shape for t in rms_norm.add_rms_norm_fp8(x, x, None, 1e-6)] == [(0, 64), (0,), (0, 64)]
    assert gates.silu_and_mul(x).shape == (0, 32)
    assert [t.shape for t in gates_fp8.silu_and_mul_fp8(x)] == [(0, 32), (0,)]


def test_a_residual_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="shape of x"):
        rms_norm.add_rms_norm(randn(2, 8), randn(1, 8), None, 1e-6)
    with pytest.raises(ValueError, match="dtype of x"):
        rms_norm.add_rms_norm(randn(2, 8), randn(2, 8, dtype=torch.float16), None, 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["silu_and_mul", "gelu_tanh_and_mul"])
def test_gates(name, shape, dtype) -> None:
    x = 3 * randn(shape[0], 2 * shape[1], dtype=dtype)
    check(getattr(gates, name), getattr(reference, name), (x,))


@pytest.mark.parametrize("name", ["silu_and_mul", "gelu_tanh_and_mul"])
def test_gates_far_from_zero_are_open_or_shut(name) -> None:
    x = torch.tensor([[-1e4, -100.0, 0.0, 100.0, 1e4, 2.0, 2.0, 2.0, 2.0, 2.0]], device=DEVICE)
    found = getattr(gates, name)(x)
    assert found.tolist() == [[0.0, 0.0, 0.0, 200.0, 2e4]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_silu_and_mul_to_fp8(shape, dtype) -> None:
    x = randn(shape[0], 2 * shape[1], dtype=dtype)
    codes, scale = gates_fp8.silu_and_mul_fp8(x)
    check_fp8(codes, scale, reference.silu_and_mul(x.double()))


def test_rows_of_zeros_have_codes_of_zero() -> None:
    codes, scale = gates_fp8.silu_and_mul_fp8(torch.zeros(2, 8, device=DEVICE))
    assert codes.float().abs().max() == 0
    assert (scale > 0).all()


def test_all_codes_of_fp8_are_reached_and_ties_go_to_the_even_one() -> None:
    """silu(g) is g for a large g: so one row holds every code, exactly, and the middles between neighbours."""
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (codes[1:] + codes[:-1]) / 2
    wanted = torch.cat((codes, middles)).to(DEVICE)
    gate = torch.full_like(wanted, 64.0)
    found, scale = gates_fp8.silu_and_mul_fp8(torch.cat((gate, wanted / 64))[None])
    assert scale.item() == 1.0
    assert torch.equal(found[0].float(), wanted.to(torch.float8_e4m3fn).float())


def first(function: Callable[..., tuple[Tensor, ...]]) -> Callable[..., Tensor]:
    return lambda *arguments: function(*arguments)[0]


def projected(tokens: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """q, k, v as views of one projection, behind which lies NaN."""
    whole = torch.full((tokens, heads + 2 * kv_heads + 1, head_dim), torch.nan, dtype=dtype, device=DEVICE)
    whole[:, :-1] = randn(tokens, heads + 2 * kv_heads, head_dim, dtype=dtype)
    q, k, v, _ = whole.split((heads, kv_heads, kv_heads, 1), 1)
    return q, k, v


def table(head_dim: int, positions: int = 5000) -> tuple[Tensor, Tensor]:
    rotary = RotaryTable(RopeConfig(theta=1e4), head_dim, positions, torch.float32, DEVICE)
    cos, sin = rotary.cos_sin
    return cos, sin


def written(
    function: Callable[..., Tensor],
    arguments: tuple[Any, ...],
    shape: tuple[int, ...],
    cache: torch.dtype,
    **norms: Any,
) -> tuple[Tensor, ...]:
    """(q, keys, values) and, of a cache of 8 bits, (..., key_scale, value_scale), from a cache that was 77 all over."""
    *arguments, slots = arguments
    keys, values = (torch.full(shape, 77.0, device=DEVICE).to(cache) for _ in range(2))
    scales: dict[str, Tensor] = {}
    if cache.itemsize == 1:
        scales = {name: torch.full(shape[:3], 77.0, device=DEVICE) for name in ("key_scale", "value_scale")}
    q = function(*arguments, keys, values, slots, **norms, **scales)
    return q, keys, values, *scales.values()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(4, 4, 64), (8, 2, 128), (5, 1, 16), (6, 2, 80), (9, 3, 96), (40, 20, 32)]
)
def test_rotate_and_write(heads, kv_heads, head_dim, qk_norm, dtype) -> None:
    tokens, shape = 9, (5, 4, kv_heads, head_dim)
    random = torch.Generator().manual_seed(1)
    slots = torch.randperm(20, generator=random)[:tokens].to(DEVICE)
    slots[[2, 8]] = -1
    positions = torch.tensor([0, 1, 0, 4999, 17, 300, 2, 3, 0], device=DEVICE)
    cos, sin = table(head_dim)
    norms = {"q_norm": randn(head_dim, dtype=dtype), "k_norm": randn(head_dim, dtype=dtype, seed=3)} if qk_norm else {}
    q, k, v = projected(tokens, heads, kv_heads, head_dim, dtype)

    outputs: dict[tuple[Any, torch.dtype], tuple[Tensor, ...]] = {}  # one launch gives all three

    def run(function: Callable[..., Tensor], which: int) -> Callable[..., Tensor]:
        def call(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, **norms: Any) -> Tensor:
            if (function, q.dtype) not in outputs:
                arguments = (q, k, v, positions, cos, sin, slots)
                outputs[function, q.dtype] = written(function, arguments, shape, q.dtype, **norms)
            return outputs[function, q.dtype][which]

        return call

    for which in range(3):
        check(run(rotate_and_write, which), run(reference.rotate_and_write, which), (q, k, v, cos, sin), **norms)
    found = outputs[rotate_and_write, dtype]
    used = torch.zeros(20, dtype=torch.bool, device=DEVICE)
    used[slots[slots >= 0]] = True
    for cache in found[1:]:
        assert (cache.flatten(0, 1)[~used] == 77).all(), "a slot was written that is nobody's"
    assert torch.equal(found[2].flatten(0, 1)[slots[slots >= 0]], v[slots >= 0]), "values are copied as they are"


@pytest.mark.parametrize("cache", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_cache_of_eight_bits_gets_codes_and_scales(cache, dtype) -> None:
    tokens, shape = 6, (3, 4, 3, 80)
    slots = torch.tensor([11, 0, -1, 5, 6, 2], dtype=torch.int32, device=DEVICE)
    positions = torch.arange(tokens, device=DEVICE) * 7
    q, k, v = projected(tokens, 6, 3, 80, dtype)
    v[3, 1] = 0  # a head without any magnitude
    cos, sin = table(80)
    norms = {"q_norm": randn(80, dtype=dtype), "k_norm": randn(80, dtype=dtype, seed=3)}
    arguments = (q, k, v, positions, cos, sin, slots)
    _, keys, values, *scales = written(rotate_and_write, arguments, shape, cache, **norms)
    exact = tuple(t.double() if t.is_floating_point() else t for t in arguments)
    wide = {name: weight.double() for name, weight in norms.items()}
    _, exact_keys, exact_values = written(reference.rotate_and_write, exact, shape, torch.float64, **wide)
    real = slots[slots >= 0].long()
    for stored, scale, wanted in ((keys, scales[0], exact_keys), (values, scales[1], exact_values)):
        codes, scale, wanted = (t.flatten(0, 1)[real] for t in (stored.float(), scale, wanted))
        if cache is torch.int8:
            assert torch.allclose(scale.double(), wanted.abs().amax(-1).clamp(min=2.0**-64) / 127, rtol=1e-5, atol=0)
            assert (codes - wanted / scale.double()[..., None]).abs().max() <= 0.501
        else:
            check_fp8(codes.to(cache), scale, wanted)
    untouched = [slot for slot in range(12) if slot not in real.tolist()]
    for scale in scales:
        assert (scale.flatten(0, 1)[untouched] == 77).all()


def test_the_twin_writes_the_same_codes_but_where_rounding_is_close() -> None:
    for cache in (torch.int8, torch.float8_e4m3fn):
        arguments = (*projected(5, 4, 2, 64, torch.float32), torch.arange(5, device=DEVICE), *table(64))
        slots = torch.tensor([3, 1, 0, 6, 7], device=DEVICE)
        found = written(rotate_and_write, (*arguments, slots), (2, 4, 2, 64), cache)
        expected = written(reference.rotate_and_write, (*arguments, slots), (2, 4, 2, 64), cache)
        for ours, theirs in zip(found[1:3], expected[1:3], strict=True):
            assert (ours.float() != theirs.float()).float().mean() < 0.01
        for ours, theirs in zip(found[3:], expected[3:], strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-6, atol=0)


@pytest.mark.parametrize("function", [rotate_and_write, reference.rotate_and_write])
@pytest.mark.parametrize("head_dim", [6, 64, 80])
def test_a_cache_of_four_bits_gets_two_codes_in_a_byte_from_the_least_number_to_the_largest(head_dim, function) -> None:
    """Of every head the least number has code 0 and the largest 15, each value is the nearest of 16, in float64."""
    tokens, blocks, half = 6, 4, head_dim // 2
    slots = torch.tensor([11, 0, -1, 5, 6, 2], device=DEVICE)
    q, k, v = projected(tokens, 6, 3, head_dim, torch.float32)
    v[3, 1], v[4, 0], v[5, 2] = 0, 7.5, v[5, 2] + 100  # no numbers but one, and all on one side
    positions, (cos, sin) = torch.arange(tokens, device=DEVICE) * 7, table(head_dim)
    stored = [torch.full((blocks, 3, 3, half), 77, dtype=torch.uint8, device=DEVICE) for _ in range(2)]
    scales = [torch.full((blocks, 3, 3, 2), 77.0, dtype=torch.float16, device=DEVICE) for _ in range(2)]
    function(q, k, v, positions, cos, sin, *stored, slots, key_scale=scales[0], value_scale=scales[1])
    turned = reference.rotate(k.double(), cos[positions].double(), sin[positions].double())
    real = slots[slots >= 0].long()
    for codes, scale, wanted in zip(stored, scales, (turned, v.double()), strict=True):
        codes, scale = codes.flatten(0, 1), scale.flatten(0, 1)
        others = [slot for slot in range(12) if slot not in real.tolist()]
        assert (codes[others] == 77).all()
        assert (scale[others] == 77).all()
        x = wanted[slots >= 0]
        step, lowest = scale[real].double().split(1, -1)
        number = torch.cat((codes[real] % 16, codes[real] // 16), -1)
        assert torch.allclose(lowest, x.amin(-1, keepdim=True), rtol=2**-11, atol=1e-7)
        spread = (x.amax(-1, keepdim=True) - lowest).clamp(min=0)
        assert torch.allclose(step, spread / 15, rtol=2**-10, atol=2.0**-24)
        # Half a step; and what the rounded step loses at code 15, and the rounded lowest number below code 0.
        bound = step * (0.501 + 15 * 2**-10) + lowest.abs() * 2**-11 + 1e-6
        assert ((number * step + lowest - x).abs() <= bound).all()
        wide = (spread > 0.1).expand(x.shape)
        assert (number[(x == x.amin(-1, keepdim=True)) & wide] == 0).all()
        assert (number[(x == x.amax(-1, keepdim=True)) & wide] == 15).all()


def test_the_twin_writes_the_same_nibbles_of_values_bit_for_bit() -> None:
    """Values are not rotated; among them are ties between two codes, and heads of which float16 has the limits."""
    q, k, v = projected(5, 4, 2, 64, torch.float32)
    v[0, 0] = torch.arange(64, device=DEVICE) / 2 % 15.5
    v[1], v[2] = v[1] * 1e-6, v[2] * 3000
    slots, found = torch.tensor([3, 1, 0, 6, 7], device=DEVICE), []
    for function in (rotate_and_write, reference.rotate_and_write):
        stored = [torch.zeros((2, 4, 2, 32), dtype=torch.uint8, device=DEVICE) for _ in range(2)]
        scales = [torch.zeros((2, 4, 2, 2), dtype=torch.float16, device=DEVICE) for _ in range(2)]
        options = {"key_scale": scales[0], "value_scale": scales[1]}
        function(q, k, v, torch.arange(5, device=DEVICE), *table(64), *stored, slots, **options)
        found.append((stored[1], scales[1]))
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


def test_slots_beyond_two_to_the_fifteenth_blocks_and_a_cache_between_others() -> None:
    """Keys and values of one layer lie side by side in a larger tensor, as views."""
    whole = torch.zeros(2**15 + 9, 2, 1, 1, 16, device=DEVICE)
    keys, values = whole.unbind(1)
    q, k, v = projected(2, 2, 1, 16, torch.float32)
    slots, positions = (
        torch.tensor([2**15 + 7, 4], device=DEVICE),
        torch.tensor([0, 0], dtype=torch.int32, device=DEVICE),
    )
    rotate_and_write(q, k, v, positions, *table(16), keys, values, slots)
    assert torch.equal(keys[slots, 0], k)
    assert torch.equal(values[slots, 0], v)
    assert whole.count_nonzero() == 2 * 2 * 16


def test_a_step_without_tokens_writes_nothing() -> None:
    q, k, v = projected(0, 2, 1, 16, torch.float32)
    nothing = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    found = written(rotate_and_write, (q, k, v, nothing, *table(16), nothing), (1, 2, 1, 16), torch.float32)
    assert found[0].shape == (0, 2, 16)
    assert (found[1] == 77).all()


@pytest.mark.parametrize("function", [rotate_and_write, reference.rotate_and_write])
def test_scales_belong_to_a_cache_of_eight_bits_and_to_no_other(function) -> None:
    q, k, v = projected(1, 2, 1, 16, torch.float32)
    one, cache = torch.zeros(1, dtype=torch.int64, device=DEVICE), torch.zeros(1, 1, 1, 16, device=DEVICE)
    with pytest.raises(ValueError, match="cache of 8 or 4 bits"):
        function(q, k, v, one, *table(16), cache.to(torch.int8), cache.to(torch.int8), one)
    scale = torch.zeros(1, 1, 1, device=DEVICE)
    with pytest.raises(ValueError, match="cache of 8 or 4 bits"):
        function(q, k, v, one, *table(16), cache, cache, one, key_scale=scale, value_scale=scale)
