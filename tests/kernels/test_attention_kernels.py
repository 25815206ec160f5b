"""Flash attention and paged decode against their twins and float64, in the interpreter or on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from reference_impl.kernels import paged_decode as decode_module
from reference_impl.kernels import reference
from reference_impl.kernels.flash_attention import flash_attention
from reference_impl.kernels.paged_decode import paged_decode
from tests.kernels.paged import DEVICE, RAGGED, RAGGED_FEW, check, decoded, make, random_tree

DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()
DECODE = [(1, n) for n in (1, 15, 16, 17, 63, 64, 65, 511, 512, 513, 576, 1025)]
DECODE_FEW = [(1, n) for n in (1, 15, 64, 65, 257)]  # a tile has 64 keys, or 32
# The interpreter computes each tile in about the same time, whatever its numbers: all lengths and dtypes are slow.
WHICH = [(torch.float16, RAGGED_FEW, DECODE_FEW)] + [
    pytest.param(dtype, RAGGED, DECODE, marks=[] if torch.cuda.is_available() else pytest.mark.slow) for dtype in DTYPES
]
HEADS = [(4, 4, 64), (8, 2, 40), (5, 1, 16), (6, 2, 80)]  # heads, KV heads, head_dim: MHA, GQA, MQA; no powers of two


@pytest.mark.parametrize(("dtype", "ragged", "decode"), WHICH)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), HEADS)
def test_ragged_rows_and_contexts_around_tiles_and_splits(heads, kv_heads, head_dim, dtype, ragged, decode) -> None:
    case = make(ragged, heads, kv_heads, head_dim, dtype)
    check(flash_attention, reference.flash_attention, case.ragged)
    case = make(decode, heads, kv_heads, head_dim, dtype)
    check(paged_decode, reference.paged_decode, case.decode)


# A cap changes scores, a window which of them there are: the fast tests have one of each kind together. Without any it
# is the test above.
WINDOWS = [(window, cap, RAGGED_FEW, DECODE_FEW) for window, cap in ((None, 5.0), (1, None), (64, 5.0), (100, None))]
WINDOWS += [
    pytest.param(window, cap, RAGGED, DECODE, marks=pytest.mark.slow)
    for window in (None, 1, 7, 64, 100, 513)
    for cap in (None, 5.0)
]


@pytest.mark.parametrize(("window", "softcap", "ragged", "decode"), WINDOWS)
def test_windows_and_soft_caps(window, softcap, ragged, decode) -> None:
    case = make(ragged, 2, 1, 16, torch.float16)
    check(flash_attention, reference.flash_attention, case.ragged, window=window, softcap=softcap)
    case = make(decode, 2, 1, 16, torch.float16)
    check(paged_decode, reference.paged_decode, case.decode, window=window, softcap=softcap)


EIGHT_BITS = [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2]


CACHES = [
    (window, cache, RAGGED_FEW, DECODE_FEW)
    for window, cache in zip((None, 30) * 2, [*EIGHT_BITS, torch.uint8], strict=True)
]
CACHES += [
    pytest.param(window, cache, RAGGED, DECODE, marks=pytest.mark.slow)
    for window in (None, 30)
    for cache in (*EIGHT_BITS, torch.uint8)
]


@pytest.mark.parametrize(("window", "cache", "ragged", "decode"), CACHES)
def test_a_cache_of_eight_or_four_bits_with_scales_per_slot_and_head(window, cache, ragged, decode) -> None:
    case = make(ragged, 4, 2, 32, torch.float16, cache=cache)
    check(flash_attention, reference.flash_attention, case.ragged, window=window, **case.options)
    case = make(decode, 4, 2, 32, torch.float16, cache=cache)
    check(paged_decode, reference.paged_decode, case.decode, window=window, **case.options)


@pytest.mark.parametrize("cache", [*EIGHT_BITS, torch.uint8])
def test_small_values_are_not_lost_beside_a_key_that_gets_most_of_the_weight(cache) -> None:
    """An attention sink of value 0: its weight is 1, that of 511 others 2^-14. In float16 such a weight times the scale
    of a value of size 0.02 would be 0."""
    case = make([(1, 512)], 1, 1, 16, torch.float16, cache=cache)
    keys, values = torch.zeros(case.keys.shape), torch.full(case.values.shape, 100.0)
    sink = int(case.block_table[0, 0]), 0
    keys[sink], values[sink] = 39.0, 0.0
    case.q.fill_(1.0)
    if cache is not torch.uint8:
        case.keys, case.values = keys.to(DEVICE, cache), values.to(DEVICE, cache)
    case.options["key_scale"].fill_(1 / 16)  # a score of 16 x 39 / 16, times 1 / 4: 9.75
    case.options["value_scale"].fill_(0.02 / 100)
    if cache is torch.uint8:  # a score of 9.375, and values of 0.015
        case.keys[:], case.values[:] = 0, 0xFF
        case.keys[sink], case.values[sink] = 0xFF, 0
        case.options["key_scale"][:] = torch.tensor([2.5 / 16, 0.0])
        case.options["value_scale"][:] = torch.tensor([0.001, 0.0])
    check(paged_decode, reference.paged_decode, case.decode, **case.options)
    check(flash_attention, reference.flash_attention, case.ragged, **case.options)


def test_one_scale_for_the_whole_cache_is_a_tensor_without_strides() -> None:
    case = make(DECODE_FEW, 4, 2, 32, torch.float16, cache=torch.int8)
    one = torch.tensor(0.02, device=DEVICE).expand(case.options["key_scale"].shape)
    check(paged_decode, reference.paged_decode, case.decode, key_scale=one, value_scale=one)


def test_scales_that_do_not_fit_the_cache_or_each_other_are_refused() -> None:
    quantized, plain = (make([(1, 20)], 4, 2, 16, torch.float16, cache=cache) for cache in (torch.int8, None))
    scale = quantized.options["key_scale"]
    for case, given in ((plain, (scale, scale)), (quantized, (None, None)), (quantized, (scale, None))):
        with pytest.raises(ValueError, match="key_scale and value_scale with a cache of 8 or 4 bits, and only then"):
            paged_decode(*case.decode, key_scale=given[0], value_scale=given[1])
    with pytest.raises(ValueError, match="with the same strides"):
        paged_decode(*quantized.decode, key_scale=scale, value_scale=scale.mT.contiguous().mT)
    four = make([(1, 20)], 4, 2, 16, torch.float16, cache=torch.uint8)
    for case, given in ((four, scale), (quantized, four.options["key_scale"])):
        with pytest.raises(ValueError, match="of a cache of 4 bits one dimension more"):
            paged_decode(*case.decode, key_scale=given, value_scale=given)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size"),
    [(5, 1, 18, 3), (6, 2, 80, 16), pytest.param(3, 3, 64, 5, marks=pytest.mark.slow)],
)
def test_of_four_bits_attention_is_that_of_the_numbers_that_the_codes_stand_for(
    heads, kv_heads, head_dim, block_size
) -> None:
    """By the definition, in float64. Head sizes are no powers of two: what pads them must stay out of sums."""
    rows = [(1, 70), (3, 41), (17, 17), (1, 1)]
    case = make(rows, heads, kv_heads, head_dim, torch.float32, block_size=block_size, cache=torch.uint8)
    keys, values = (
        decoded(cache, case.options[name]) for cache, name in ((case.keys, "key_scale"), (case.values, "value_scale"))
    )
    wanted = torch.empty(case.q.shape, dtype=torch.float64, device=DEVICE)
    for row, (queries, context) in enumerate(rows):
        slots = [(int(case.block_table[row, i // block_size]), i % block_size) for i in range(context)]
        for i in range(queries):
            token, seen = int(case.query_start_loc[row]) + i, slots[: context - queries + i + 1]
            for head in range(heads):
                key, value = (
                    torch.stack([t[block, at, head * kv_heads // heads] for block, at in seen]) for t in (keys, values)
                )
                weight = (key @ case.q[token, head].double() * case.scale).softmax(0)
                wanted[token, head] = weight @ value
    found = flash_attention(*case.ragged, **case.options)
    assert (found - wanted).abs().max() < 1e-5
    last = case.query_start_loc[1:].long() - 1
    alone = (case.q[last], *case.decode[1:])
    assert (paged_decode(*alone, **case.options) - wanted[last]).abs().max() < 1e-5
    assert (reference.flash_attention(*case.ragged, **case.options) - wanted).abs().max() < 1e-5


# 16 is everywhere else; a tile has 32 keys, or 64.
@pytest.mark.parametrize("block_size", [1, pytest.param(8, marks=pytest.mark.slow), 64, 128])
def test_block_sizes(block_size) -> None:
    case = make([(7, 140), (1, 130)], 2, 1, 16, torch.float32, block_size=block_size)
    check(flash_attention, reference.flash_attention, case.ragged)
    case = make([(1, 20), (1, 265)], 2, 1, 16, torch.float32, block_size=block_size)
    check(paged_decode, reference.paged_decode, case.decode)


def test_block_ids_above_two_to_the_fifteenth() -> None:
    case = make([(3, 20)], 2, 1, 16, torch.float16, block_size=1, first_block=2**15 + 5)
    check(flash_attention, reference.flash_attention, case.ragged)
    case = make([(1, 20)], 2, 1, 16, torch.float16, block_size=1, first_block=2**15 + 5)
    check(paged_decode, reference.paged_decode, case.decode)


@pytest.mark.parametrize("window", [None, 20])
def test_drafts_in_a_tree_see_their_ancestors_only(window) -> None:
    """More of them: test_tree_attention.py."""
    rows = [(5, 18), (64, 163), (1, 1), (63, 64)]
    case = make(rows, 2, 1, 16, torch.float32)
    check(flash_attention, reference.flash_attention, case.ragged, ancestors=random_tree(rows), window=window)


def test_a_tree_that_is_a_chain_is_causal() -> None:
    rows = [(5, 18), (64, 100)]
    case = make(rows, 4, 2, 16, torch.float32)
    chain = torch.tensor([(1 << i + 1) - 1 if i < 63 else -1 for queries, _ in rows for i in range(queries)])
    expected = flash_attention(*case.ragged)
    assert torch.equal(flash_attention(*case.ragged, ancestors=chain.to(DEVICE)), expected)


def test_padding_rows_give_zeros() -> None:
    case = make([(1, 130), (1, 3)], 4, 2, 16, torch.float32)
    case.seq_lens[1] = 0
    assert paged_decode(*case.decode)[1].abs().max() == 0
    check(paged_decode, reference.paged_decode, case.decode)


OPTIONS: list[dict[str, Any]] = [{}, {"window": 20}, {"softcap": 5.0}, {"cache": torch.int8}]
PADS = [(1,), (0, 7), (300,), (2, 129)]


@pytest.mark.parametrize(
    ("pads", "options"),
    [
        pytest.param(pads, options, marks=[] if row == column else pytest.mark.slow)
        for row, pads in enumerate(PADS)
        for column, options in enumerate(OPTIONS)
    ],
    ids=str,
)
def test_queries_of_padding_rows_give_zeros(pads: tuple[int, ...], options: dict[str, Any]) -> None:
    """Rows of length 0 whose queries pad a step, behind rows whose results stay as they are."""
    rows = [(3, 40), (1, 5), (66, 67)]
    case = make([*rows, *((queries, queries) for queries in pads)], 2, 1, 32, torch.float32, **options)
    real, padded = 70, case.seq_lens.clone()
    padded[len(rows) :] = 0
    alone = (case.q[:real], *case.ragged[1:3], case.block_table[:3], case.query_start_loc[:4], case.seq_lens[:3])
    before = flash_attention(*alone, case.scale, **case.options)
    arguments = (*case.ragged[:5], padded, case.scale)
    found, plain = (compute(*arguments, **case.options) for compute in (flash_attention, reference.flash_attention))
    for result in (found, plain):
        assert torch.equal(result[real:], torch.zeros_like(result[real:]))
    assert torch.equal(found[:real], before)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    case = make([(1, 230), (1, 90), (1, 400)], 2, 1, 16, torch.float16)
    together = paged_decode(*case.decode)
    q, keys, values, table, seq_lens, _, scale = case.decode
    for row in range(3):
        alone = slice(row, row + 1)
        found = paged_decode(q[alone], keys, values, table[alone], seq_lens[alone], int(seq_lens[row]), scale)
        assert torch.equal(found[0], together[row])


def test_chunks_of_a_prompt_give_what_the_whole_prompt_gives() -> None:
    case = make([(150, 150)], 2, 1, 16, torch.float32)
    whole = flash_attention(*case.ragged)
    q, keys, values, table, _, _, scale = case.ragged
    parts = []
    for start, end in ((0, 1), (1, 40), (40, 150)):
        locations = torch.tensor([0, end - start], dtype=torch.int32, device=DEVICE)
        length = torch.tensor([end], dtype=torch.int32, device=DEVICE)
        parts.append(flash_attention(q[start:end], keys, values, table, locations, length, scale))
    assert (torch.cat(parts) - whole).abs().max() < 1e-6


@pytest.mark.parametrize("threshold", [1e-4, pytest.param(1e-2, marks=pytest.mark.slow), 0.3])
def test_what_skip_softmax_leaves_out_stays_under_its_bound(threshold) -> None:
    """Keys that matter come first, so that later tiles can be left out: 2 n x threshold x max |value|."""
    case = make([(40, 300)], 2, 1, 32, torch.float32)
    slots = reference.context_slots(case.block_table[0], 300, 16)
    case.keys.flatten(0, 1)[slots[40:]] *= 0.05
    case.keys.flatten(0, 1)[slots[:40]] *= 6
    exact = flash_attention(*case.ragged)
    found = flash_attention(*case.ragged, skip_threshold=threshold)
    difference = (found - exact).abs().max()
    assert difference <= 2 * 300 * threshold * case.values.flatten(0, 1)[slots].abs().max()
    assert difference > 0, "nothing was left out: the test shows nothing"


def test_merging_knows_empty_splits() -> None:
    means = torch.stack([torch.full((2, 4), torch.nan), torch.ones(2, 4), torch.full((2, 4), 4.0)])
    lse = torch.tensor([[-torch.inf] * 2, [0.0, 1.0], [1.0, -torch.inf]])
    merged = reference.merge_splits(means, lse)
    assert torch.allclose(merged, torch.tensor([[3.0] * 4, [1.0] * 4]))


def test_merging_does_not_overflow() -> None:
    lse = torch.tensor([[1000.0], [1001.0]])
    merged = reference.merge_splits(torch.tensor([[[0.0]], [[3.0]]]), lse)
    assert merged.item() == pytest.approx(2.0)


def test_splits_of_another_size_give_the_same(monkeypatch) -> None:
    case = make([(1, n) for n in (1, 65, 513, 1328)], 2, 1, 16, torch.float32)  # SPLIT is between the last two
    expected = paged_decode(*case.decode)
    monkeypatch.setattr(decode_module, "splits_of", lambda *_: (2, 3))
    for programs in (3, 1):  # of a row: one for each split, and one that has all
        monkeypatch.setattr(decode_module, "grid_of", lambda rows, heads, *_, of=programs: (heads, rows, of))
        assert (paged_decode(*case.decode) - expected).abs().max() < 1e-6


def test_float64_is_refused_because_the_kernels_would_round_it() -> None:
    case = make([(1, 3)], 2, 1, 16, torch.float64)
    with pytest.raises(TypeError, match="got float64"):
        paged_decode(*case.decode)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's own fault")
def test_the_interpreter_refuses_bfloat16() -> None:
    case = make([(1, 3)], 2, 1, 16, torch.bfloat16)
    with pytest.raises(TypeError, match="interpreter computes bfloat16 wrongly"):
        flash_attention(*case.ragged)
    with pytest.raises(TypeError, match="expected float32 or float16"):
        paged_decode(*case.decode)


def test_strides_that_the_kernel_does_not_know_are_refused() -> None:
    case = make([(1, 3)], 4, 2, 16, torch.float32)
    case.keys = case.keys.transpose(2, 3).contiguous().transpose(2, 3)
    with pytest.raises(ValueError, match="head_dim contiguous"):
        flash_attention(*case.ragged)
    with pytest.raises(ValueError, match="head_dim contiguous"):
        paged_decode(*case.decode)
