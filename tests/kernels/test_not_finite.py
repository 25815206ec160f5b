"""A row with NaN or infinity stays one in every kernel, as in its twin or by definition; the others stay equal."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from reference_impl.kernels import reference
from reference_impl.kernels.flash_attention import flash_attention
from reference_impl.kernels.fused_linear import fused_linear
from reference_impl.kernels.fused_linear_w4a16 import fused_linear_w4a16
from reference_impl.kernels.gates import gelu_tanh_and_mul, silu_and_mul
from reference_impl.kernels.gates_fp8 import silu_and_mul_fp8
from reference_impl.kernels.gemm import gemm
from reference_impl.kernels.gemm_fp4 import gemm_fp4
from reference_impl.kernels.gemm_fp8 import gemm_fp8
from reference_impl.kernels.gemm_fp8_blocks import gemm_fp8_blocks
from reference_impl.kernels.gemm_w4a16 import gemm_w4a16
from reference_impl.kernels.gemm_w8a8 import gemm_w8a8
from reference_impl.kernels.gemm_w8a16 import gemm_w8a16
from reference_impl.kernels.grouped_gemm import grouped_gemm
from reference_impl.kernels.lora import lora_expand, lora_shrink
from reference_impl.kernels.paged_decode import paged_decode
from reference_impl.kernels.quantize_rows import quantize_groups_fp8, quantize_rows_fp8, quantize_rows_int8
from reference_impl.kernels.rms_norm import add_rms_norm, add_rms_norm_fp8, rms_norm
from reference_impl.kernels.rotate_and_write import rotate_and_write
from tests.kernels.paged import DEVICE, Case, make

BAD = pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
ROW, COLUMN = 1, 5  # of the number that is none


def rows(bad: float, width: int, dtype: torch.dtype = torch.float16) -> Tensor:
    x = torch.randn(3, width, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[ROW, COLUMN] = bad
    return x.to(DEVICE)


def fine(x: Tensor) -> Tensor:
    return torch.where(x.isfinite(), x, 0)


@BAD
@pytest.mark.parametrize(
    ("quantize", "twin"),
    [
        (quantize_rows_int8, reference.quantize_rows_int8),
        (quantize_rows_fp8, reference.quantize_rows_fp8),
        (quantize_groups_fp8, reference.quantize_groups_fp8),
        (silu_and_mul_fp8, reference.silu_and_mul_fp8),
        (
            lambda x: add_rms_norm_fp8(x, torch.zeros_like(x), None, 1e-6)[:2],
            lambda x: reference.add_rms_norm_fp8(x, torch.zeros_like(x), None, 1e-6)[:2],
        ),
    ],
    ids=["int8", "fp8", "fp8 groups", "silu to fp8", "norm to fp8"],
)
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy, in the interpreter
def test_what_shares_a_scale_with_a_number_that_is_none_has_the_scale_nan(
    bad: float, quantize: Callable[[Tensor], tuple[Tensor, Tensor]], twin: Callable[[Tensor], tuple[Tensor, Tensor]]
) -> None:
    """Whatever its codes are, no product of them is a number."""
    x = rows(bad, 260)
    (codes, scale), (_, expected) = quantize(x), twin(x)
    assert torch.equal(scale.isnan(), expected.isnan())
    broken = torch.zeros_like(scale, dtype=torch.bool)
    broken[ROW, 0 if scale.dim() == 2 else ...] = True
    assert torch.equal(scale.isnan(), broken)
    same_codes, same_scale = quantize(fine(x))
    others = [row for row in range(3) if row != ROW]
    assert torch.equal(codes.view(torch.uint8)[others], same_codes.view(torch.uint8)[others])
    assert torch.equal(scale[~broken], same_scale[~broken])


WEIGHT = torch.randn(48, 64, generator=torch.Generator().manual_seed(1))
INT8 = (WEIGHT * 30).to(torch.int8).to(DEVICE)
NORM = torch.ones(64, dtype=torch.float16, device=DEVICE)


Layer = Callable[[Tensor], Tensor]


def by_codes(
    product: Callable[..., Tensor], quantize: Callable[[Tensor], tuple[Tensor, Tensor]], weight: Tensor
) -> Layer:
    weight_scale = torch.full((48,), 0.03, device=DEVICE)
    return lambda x: product(*quantize(x), weight.to(DEVICE), weight_scale, torch.float16)


def by_groups(product: Callable[..., Tensor], quantize: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Layer:
    weight = WEIGHT.to(DEVICE, torch.float8_e4m3fn)
    return lambda x: product(*quantize(x), weight, torch.full((1, 1), 0.03, device=DEVICE), torch.float16)


CODES = torch.randint(16, WEIGHT.shape, generator=torch.Generator().manual_seed(2))
SCALES = torch.full((2, 48), 0.03, dtype=torch.float16, device=DEVICE)  # of groups of 32
E4M3, E8M0 = (torch.full((48, n), byte, dtype=torch.uint8, device=DEVICE) for n, byte in ((4, 0x38), (2, 127)))  # 1
EXPERTS = torch.stack([WEIGHT, -WEIGHT]).half().to(DEVICE)
EACH = torch.tensor([0, 1, 3], dtype=torch.int32, device=DEVICE)  # expert 0 has row 0, expert 1 the others
ADAPTER = torch.tensor([1, 0, 0], dtype=torch.int32, device=DEVICE)
DOWN = torch.stack([WEIGHT[:8], -WEIGHT[:8]]).half().to(DEVICE)
UP = torch.randn(2, 24, 64, generator=torch.Generator().manual_seed(3)).half().to(DEVICE)


def expanded(expand: Callable[..., Tensor]) -> Layer:
    return lambda x: expand(x, UP, ADAPTER, torch.ones(3, 24, dtype=torch.float16, device=DEVICE))


def four_bits(group_size: int) -> Tensor:
    return reference.pack_int4(CODES, group_size).to(DEVICE)


def added(norm: Callable[..., tuple[Tensor, Tensor]]) -> Layer:
    return lambda x: norm(x, x, NORM, 1e-6)[0]


PRODUCTS: dict[str, list[Layer]] = {
    "gemm": [partial(f, weight=WEIGHT.half().to(DEVICE)) for f in (gemm, reference.gemm)],
    "w8a16": [
        partial(f, weight=INT8, scales=torch.full((1, 48), 0.03, device=DEVICE))
        for f in (gemm_w8a16, reference.gemm_w8a16)
    ],
    "fused": [
        partial(f, weight=WEIGHT.half().to(DEVICE), norm=NORM, eps=1e-6, gate="silu")
        for f in (fused_linear, reference.fused_linear)
    ],
    "w8a8": [
        by_codes(gemm_w8a8, quantize_rows_int8, INT8),
        by_codes(reference.gemm_w8a8, reference.quantize_rows_int8, INT8),
    ],
    "fp8": [
        by_codes(gemm_fp8, quantize_rows_fp8, WEIGHT.to(torch.float8_e4m3fn)),
        by_codes(reference.gemm_fp8, reference.quantize_rows_fp8, WEIGHT.to(torch.float8_e4m3fn)),
    ],
    "fp8 blocks": [
        by_groups(gemm_fp8_blocks, quantize_groups_fp8),
        by_groups(reference.gemm_fp8_blocks, reference.quantize_groups_fp8),
    ],
    "w4a16": [
        partial(f, packed=four_bits(32), scales=SCALES, group_size=32) for f in (gemm_w4a16, reference.gemm_w4a16)
    ],
    "fused w4a16": [
        partial(f, packed=four_bits(32), scales=SCALES, norm=NORM, eps=1e-6, gate="silu")
        for f in (fused_linear_w4a16, reference.fused_linear_w4a16)
    ],
    "nvfp4": [
        partial(f, packed=four_bits(64), scales=E4M3, tensor_scale=torch.full((48,), 0.03, device=DEVICE))
        for f in (gemm_fp4, reference.gemm_fp4)
    ],
    "mxfp4": [partial(f, packed=four_bits(64), scales=E8M0) for f in (gemm_fp4, reference.gemm_fp4)],
    "experts": [partial(f, weights=EXPERTS, expert_offsets=EACH) for f in (grouped_gemm, reference.grouped_gemm)],
    "lora shrink": [partial(f, a=DOWN, adapter_index=ADAPTER, scale=0.5) for f in (lora_shrink, reference.lora_shrink)],
    "lora expand": [expanded(lora_expand), expanded(reference.lora_expand)],
    "norm": [partial(f, weight=NORM, eps=1e-6) for f in (rms_norm, reference.rms_norm)],
    "add and norm": [added(add_rms_norm), added(reference.add_rms_norm)],
    "silu": [silu_and_mul, reference.silu_and_mul],
    "gelu": [gelu_tanh_and_mul, reference.gelu_tanh_and_mul],
}


@BAD
@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")  # numpy, in the interpreter
def test_a_row_with_a_number_that_is_none_gives_what_its_twin_gives(name: str, bad: float) -> None:
    kernel, twin = PRODUCTS[name]
    x = rows(bad, 64)
    found, expected = kernel(x), twin(x)
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.isposinf(), expected.isposinf())
    assert torch.equal(found.isneginf(), expected.isneginf())
    assert not found[ROW].isfinite().all()
    others = [row for row in range(3) if row != ROW]
    assert torch.equal(found[others], kernel(fine(x))[others])


SCALED = {  # where the scale of a group, block or output goes
    "w8a16": "scales", "w4a16": "scales", "fused w4a16": "scales", "nvfp4": "tensor_scale", "fused": "norm",
    "fused w4a16, norm": "norm", "norm": "weight",
}  # fmt: skip


@BAD
@pytest.mark.parametrize("name", SCALED)
@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")  # numpy, in the interpreter
def test_a_scale_that_is_no_number_gives_what_it_gives_in_the_twin(name: str, bad: float) -> None:
    found = []
    for product in PRODUCTS[name.split(",")[0]]:
        assert isinstance(product, partial)
        scales = product.keywords[SCALED[name]].clone()
        scales.view(-1)[COLUMN] = bad
        found.append(product.func(fine(rows(0.0, 64)), **{**product.keywords, SCALED[name]: scales}))
    assert not found[0].isfinite().all()
    for kind in (torch.isnan, torch.isposinf, torch.isneginf):
        assert torch.equal(kind(found[0]), kind(found[1]))


@BAD
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy, in the interpreter
def test_so_does_the_scale_of_a_block(bad: float) -> None:
    weight = torch.randn(200, 64, generator=torch.Generator().manual_seed(1)).to(DEVICE, torch.float8_e4m3fn)
    scales = torch.tensor([[0.03], [bad]], device=DEVICE)
    operands = (*reference.quantize_groups_fp8(rows(0.5, 64)), weight, scales, torch.float16)
    for product in (gemm_fp8_blocks, reference.gemm_fp8_blocks):
        found = product(*operands)
        assert found[:, :128].isfinite().all()
        assert found[:, 128:].isnan().all()


LARGEST = torch.finfo(torch.float32).max


@pytest.mark.parametrize(("number", "by"), [(LARGEST, LARGEST), (1e19, 1e20), (1.0, LARGEST), (1e-30, 1e30)])
@pytest.mark.parametrize("width", [64, 16385])
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # numpy, in the interpreter
def test_a_norm_is_a_number_also_where_number_times_weight_is_none(number: float, by: float, width: int) -> None:
    x = torch.ones(2, width, device=DEVICE)
    x[1] = number
    weight = torch.full((width,), by, device=DEVICE)
    expected = reference.rms_norm(x, weight, 1e-6)
    assert expected.isfinite().all()
    torch.testing.assert_close(rms_norm(x, weight, 1e-6), expected)
    codes, scale, _ = add_rms_norm_fp8(x, torch.zeros_like(x), weight, 1e-6)
    twins, twins_scale, _ = reference.add_rms_norm_fp8(x, torch.zeros_like(x), weight, 1e-6)
    torch.testing.assert_close(scale, twins_scale)
    torch.testing.assert_close(codes.float(), twins.float(), rtol=0.13, atol=0.0)  # a code further


@BAD
@pytest.mark.parametrize("cache", [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8])
@pytest.mark.parametrize("function", [rotate_and_write, reference.rotate_and_write], ids=["kernel", "twin"])
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy, in the interpreter
def test_a_head_with_a_number_that_is_none_has_the_scale_nan_in_a_cache(
    bad: float, cache: torch.dtype, function: Callable[..., Tensor]
) -> None:
    """The value of one head. What is read of it is NaN, all else is as it was."""
    tokens, kv_heads, head_dim, four = 3, 2, 16, cache is torch.uint8
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(tokens, kv_heads, head_dim, generator=random).half().to(DEVICE) for _ in range(3))
    table = torch.ones(tokens, 1, head_dim, device=DEVICE)
    order = torch.arange(tokens, dtype=torch.int32, device=DEVICE)

    def scales(values: Tensor) -> Tensor:
        stored = [torch.zeros(1, 4, kv_heads, head_dim // (1 + four), dtype=cache, device=DEVICE) for _ in range(2)]
        shape, dtype = ((1, 4, kv_heads, 2), torch.float16) if four else ((1, 4, kv_heads), torch.float32)
        key_scale, value_scale = (torch.zeros(shape, dtype=dtype, device=DEVICE) for _ in range(2))
        function(q, k, values, order, table, table, *stored, order, key_scale=key_scale, value_scale=value_scale)
        return value_scale[..., 0] if four else value_scale

    expected = scales(v)
    v[ROW, 1, COLUMN] = bad
    found = scales(v)
    broken = torch.zeros_like(found, dtype=torch.bool)
    broken[0, ROW, 1] = True
    assert torch.equal(found.isnan(), broken)
    assert torch.equal(found[~broken], expected[~broken])


ROWS = [(5, 70), (1, 3)]  # queries and context; head 1 of the first row, or a key of it, has the bad number
PLACE = 67  # of the bad key: two queries come before it, three see it
QUIET = pytest.mark.filterwarnings(  # numpy, in the interpreter
    "ignore:((invalid value|overflow|divide by zero) encountered|All-NaN):RuntimeWarning"
)


def asked_of(attention: Callable[..., Tensor], **options: Any) -> tuple[Case, tuple[Any, ...], int]:
    """A case, its arguments, and how many queries its first row has: for paged decode one."""
    decodes = attention is paged_decode
    rows = [(1 if decodes else queries, context) for queries, context in ROWS]
    case = make(rows, 4, 2, 16, torch.float16, **options)
    return case, case.decode if decodes else case.ragged, rows[0][0]


def twin_of(attention: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """In float32: in 16 bits torch's attention on a CPU has zeros where a score is infinite."""
    twin = reference.paged_decode if attention is paged_decode else reference.flash_attention

    def wide(*arguments: Any, **options: Any) -> Tensor:
        return twin(
            *(t.float() if isinstance(t, Tensor) and t.dtype is torch.float16 else t for t in arguments), **options
        )

    return wide


def attended(case: Case, query: int, window: int | None = None, softcap: float | None = None, **_: Any) -> Tensor:
    """[heads, head_dim] by the definition, in float64: of what this query of the first row sees of a 16-bit cache."""
    position = int(case.seq_lens[0] - case.query_start_loc[1]) + query
    seen = range(0 if window is None else max(0, position - window + 1), position + 1)
    slots = [(int(case.block_table[0, i // 16]), i % 16) for i in seen]
    found = torch.zeros(case.q.shape[1:], dtype=torch.float64)
    for head, q in enumerate(case.q[query].double()):
        kv_head = head * case.keys.shape[2] // len(found)
        key, value = (torch.stack([t[slot][kv_head] for slot in slots]).double() for t in (case.keys, case.values))
        score = key @ q * case.scale
        score = softcap * (score / softcap).tanh() if softcap else score
        found[head] = (score.softmax(0) @ value).cpu()
    return found


@pytest.mark.parametrize(
    ("options", "bad", "attention"),
    [
        ({}, torch.nan, flash_attention),
        ({}, torch.nan, paged_decode),
        ({}, torch.inf, flash_attention),
        ({}, torch.inf, paged_decode),
        ({}, -torch.inf, paged_decode),
        ({}, -torch.inf, flash_attention),
        ({"window": 20, "softcap": 5.0}, torch.inf, flash_attention),
        ({"window": 20, "softcap": 5.0}, -torch.inf, paged_decode),
        ({"window": 20, "softcap": 5.0}, torch.nan, flash_attention),
        ({"window": 20, "softcap": 5.0}, torch.nan, paged_decode),
        ({"skip_threshold": 0.9}, torch.nan, flash_attention),
    ],
)
@QUIET
def test_attention_to_a_number_that_is_none_is_what_it_is_by_definition(
    options: dict[str, Any], bad: float, attention: Callable[..., Tensor]
) -> None:
    """In a query, key or value. Other rows keep their bits. In the kernel, queries of the row that do not see the bad
    number may be either where their tile has it: 0 x NaN is NaN; in the twin they are numbers. Of a tile that is left
    out no value is read."""
    for where in ("q", "keys", "values")[: 2 if "skip_threshold" in options else 3]:
        case, arguments, queries = asked_of(attention)
        kept = attention(*arguments, **options)
        seeing = [query for query in range(queries) if 70 - queries + query >= PLACE]
        if where == "q":
            case.q[seeing, 1, COLUMN] = bad
        else:
            getattr(case, where)[int(case.block_table[0, PLACE // 16]), PLACE % 16, 0, COLUMN] = bad
        expected = torch.stack([attended(case, query, **options) for query in seeing])
        assert bad in (torch.inf, -torch.inf) or not expected.isfinite().all()
        for function in (attention, twin_of(attention)):
            found = function(*arguments, **options).cpu()
            for kind in (torch.isnan, torch.isposinf, torch.isneginf):
                assert torch.equal(kind(found[seeing]), kind(expected)), where
        unseeing = [query for query in range(queries) if query not in seeing]
        assert found[unseeing].isfinite().all()
        assert torch.equal(attention(*arguments, **options)[queries:], kept[queries:])


@QUIET
def test_no_tile_with_a_key_that_is_none_is_left_out() -> None:
    """The largest score of its tile without it is far below the row's largest."""
    case = make([(1, 300)], 1, 1, 16, torch.float16)
    case.q.fill_(1.0)
    case.keys[:] = torch.where(case.keys.isnan(), case.keys, -4)
    case.keys[case.block_table[0, 0].long()] = 4
    assert flash_attention(*case.ragged, skip_threshold=0.01).isfinite().all()
    case.keys[int(case.block_table[0, 10]), 5, 0, COLUMN] = torch.nan
    assert flash_attention(*case.ragged, skip_threshold=0.01).isnan().all()


@pytest.mark.parametrize("attention", [flash_attention, paged_decode])
@pytest.mark.parametrize("cache", [torch.int8, torch.uint8])
@QUIET
def test_what_sees_a_scale_that_is_nan_is_nan(cache: torch.dtype, attention: Callable[..., Tensor]) -> None:
    """Caches have such scales for numbers that are none. Heads that read the other KV head keep their bits."""
    for name in ("key_scale", "value_scale"):
        case, arguments, queries = asked_of(attention, cache=cache)
        kept = attention(*arguments, **case.options)
        seeing = [query for query in range(queries) if 70 - queries + query >= PLACE]
        case.options[name][int(case.block_table[0, PLACE // 16]), PLACE % 16, 0] = torch.nan
        for function in (attention, twin_of(attention)):
            found = function(*arguments, **case.options)
            assert found[seeing, :2].isnan().all(), name
            assert found[:, 2:].isfinite().all()
            assert found[queries:].isfinite().all()
        found = attention(*arguments, **case.options)
        assert torch.equal(found[:, 2:], kept[:, 2:])
        assert torch.equal(found[queries:], kept[queries:])


LONG = 300  # keys: five splits of paged decode, three tiles of flash attention
MINUS_INFINITY: list[Any] = [  # keys with this score: none, a split, two, the last, a tile, all but one, some, all
    (), range(64), range(64, 128), range(256, LONG), range(128), {*range(LONG)} - {200}, {0, 70, 299}, range(LONG),
]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "dtype", "attention"),
    [
        ({}, torch.float16, flash_attention),
        ({"window": 150}, torch.float32, flash_attention),
        ({"skip_threshold": 0.01}, torch.float16, flash_attention),
        ({}, torch.float16, paged_decode),
        ({"window": 150}, torch.float32, paged_decode),
    ],
)
@QUIET
def test_a_score_of_minus_infinity_weighs_nothing_also_where_all_of_a_split_or_tile_are_such(
    options: dict[str, Any], dtype: torch.dtype, attention: Callable[..., Tensor]
) -> None:
    """A query that has no other score gets zeros, as from torch's attention."""
    case = make([(1, LONG)] * len(MINUS_INFINITY), 1, 1, 16, dtype)
    case.q[:, :, COLUMN] = 1
    expected = torch.zeros(len(MINUS_INFINITY), 1, 16, dtype=torch.float64)
    for row, keys in enumerate(MINUS_INFINITY):
        for key in keys:
            case.keys[int(case.block_table[row, key // 16]), key % 16, 0, COLUMN] = -torch.inf
        if {*range(LONG - options.get("window", LONG), LONG)} - {*keys}:
            alone = dataclasses.replace(case, block_table=case.block_table[row:], q=case.q[row:])
            expected[row] = attended(alone, 0, options.get("window"))
    arguments = case.decode if attention is paged_decode else case.ragged
    error = 0.03 if "skip_threshold" in options else 2e-3
    for function in (attention, twin_of(attention)):
        torch.testing.assert_close(function(*arguments, **options).double().cpu(), expected, atol=error, rtol=2e-3)


def test_a_query_of_a_tree_is_what_it_was_where_it_does_not_see_the_number_that_is_none() -> None:
    """Tokens 1 and 2 are drafts behind token 0, and token 3 is one behind token 1."""
    case = make([(4, 20)], 4, 2, 16, torch.float16)
    ancestors = torch.tensor([0b0001, 0b0011, 0b0101, 0b1011], device=DEVICE)
    before = reference.flash_attention(*case.ragged, ancestors=ancestors)
    case.values[int(case.block_table[0, 1]), 1, 0, COLUMN] = torch.nan  # token 1's, at position 17
    found = reference.flash_attention(*case.ragged, ancestors=ancestors)
    assert found[[1, 3], :2, COLUMN].isnan().all()
    torch.testing.assert_close(found[[0, 2]], before[[0, 2]], atol=2e-3, rtol=2e-3)


BEYOND = 300.0  # a half whose square, as of a gate and an up projection, float16 does not have


def overflowing() -> dict[str, list[Callable[[], tuple[Tensor, ...]]]]:
    """Fused kernels and their twins, with results between float16's largest number and float32's."""
    x = torch.full((3, 128), 1.0, dtype=torch.float16, device=DEVICE)
    x[ROW] = BEYOND
    y = torch.zeros(3, 64, dtype=torch.float16, device=DEVICE)
    y[ROW, COLUMN] = BEYOND  # a norm of 8
    weight = torch.full((64,), 6e4, dtype=torch.float16, device=DEVICE)

    def written(function: Callable[..., Tensor], cache: torch.dtype) -> tuple[Tensor, ...]:
        """Of a rotation by 45 degrees of 6e4, beside its like: 8.5e4."""
        four = cache is torch.uint8
        heads = torch.full((1, 1, 16), 6e4, dtype=torch.float16, device=DEVICE)
        cos = torch.full((1, 1, 16), 0.5**0.5, device=DEVICE)
        sin = cos * torch.tensor([-1.0] * 8 + [1.0] * 8, device=DEVICE)
        stored = [torch.zeros(1, 1, 1, 16 // (1 + four), dtype=cache, device=DEVICE) for _ in range(2)]
        shape, dtype = ((1, 1, 1, 2), torch.float16) if four else ((1, 1, 1), torch.float32)
        scales = [torch.zeros(shape, dtype=dtype, device=DEVICE) for _ in range(2)]
        order = torch.zeros(1, dtype=torch.int32, device=DEVICE)
        options = {} if cache is torch.float16 else {"key_scale": scales[0], "value_scale": scales[1]}
        q = function(heads, heads, heads, order, cos, sin, *stored, order, **options)
        return q, scales[0][..., 0] if four else scales[0], stored[0].float() if cache is torch.float16 else q

    found: dict[str, list[Callable[[], tuple[Tensor, ...]]]] = {
        "silu to fp8": [lambda f=f: f(x)[1:] for f in (silu_and_mul_fp8, reference.silu_and_mul_fp8)],
        "norm to fp8": [
            lambda f=f: f(y, y, weight, 1e-6)[1:] for f in (add_rms_norm_fp8, reference.add_rms_norm_fp8)
        ],
    }  # fmt: skip
    for cache in (torch.float16, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8):
        both = (rotate_and_write, reference.rotate_and_write)
        found[f"rotated into {cache}"] = [partial(written, f, cache) for f in both]
    return found


@pytest.mark.parametrize("name", overflowing())
@QUIET
def test_what_float16_does_not_have_is_the_same_in_a_fused_kernel_and_its_twin(name: str) -> None:
    """It is finite where it is rounded to 8 bits only, NaN in 4 bits, and infinity in float16."""
    kernel, twin = (function() for function in overflowing()[name])
    for found, expected in zip(kernel, twin, strict=True):
        torch.testing.assert_close(found.float(), expected.float(), rtol=2e-3, atol=1e-3, equal_nan=True)
    scale = kernel[1] if name.startswith("rotated") else kernel[0]
    assert bool(scale.isfinite().all()) == (name != "rotated into torch.uint8")
