"""The paged backend: every row reads its own context, through its block table, and nothing else."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reference_impl.assembly.batch import build_batch
from reference_impl.core.attention import SHORT, TorchAttention, by_length
from reference_impl.core.kv_cache import PagedKVCache
from reference_impl.interfaces import NO_BLOCK, KVSpec, Request, Row, SamplingParams, StepPlan
from reference_impl.kernels import reference

CPU = torch.device("cpu")
HEADS, KV_HEADS, HEAD_DIM, SCALE = 4, 2, 8, 0.3


def formula(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None, cap: float | None) -> torch.Tensor:
    """Query by query, head by head, by the definition: position p sees p - window + 1 ... p."""
    out, past = torch.empty_like(q), k.shape[0] - q.shape[0]
    for i in range(q.shape[0]):
        p = past + i
        seen = slice(0 if window is None else max(0, p - window + 1), p + 1)
        for h in range(HEADS):
            kv_head = h * KV_HEADS // HEADS
            scores = k[seen, kv_head] @ q[i, h] * SCALE
            if cap is not None:
                scores = cap * torch.tanh(scores / cap)
            out[i, h] = scores.softmax(0) @ v[seen, kv_head]
    return out


def attend_in_pages(
    rows: Sequence[tuple[int, int]],
    block_size: int,
    windows: Sequence[int | None] = (None,),
    softcap: float | None = None,
    seed: int = 0,
) -> float:
    """Rows of (query_len, context_len) over shuffled pages, NaN wherever no row may look; one layer per KV group.

    Blocks that have left a window are given up. Returns the worst error against the formula, over all groups.
    """
    chance, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    specs = [
        KVSpec(1, KV_HEADS, HEAD_DIM, block_size, bits_per_value=64, layers=(layer,), window=w)
        for layer, w in enumerate(windows)
    ]
    needed = [-(-context // block_size) for _, context in rows]
    num_blocks = sum(needed) * len(specs) + 5
    ids = chance.sample(range(num_blocks), num_blocks - 5)
    cache = PagedKVCache(specs, num_blocks, torch.float64, CPU)
    cache.data.fill_(torch.nan)
    requests, plan, contexts = {}, [], []
    for number, ((query_len, context), blocks) in enumerate(zip(rows, needed, strict=True)):
        name, start = str(number), context - query_len
        tables = []
        for layer, window in enumerate(windows):
            table, ids = ids[:blocks], ids[blocks:]
            first = 0 if window is None else max(0, start - window + 1) // block_size
            tables.append([NO_BLOCK] * first + table[first:])
            contexts.append(torch.randn(2, context, KV_HEADS, HEAD_DIM, generator=generator, dtype=torch.float64))
            for position in range(first * block_size, start):  # what earlier steps have written
                slot = table[position // block_size], position % block_size
                for page, written in zip(cache.layer(layer), contexts[-1], strict=True):
                    page[slot] = written[position]
        requests[name] = Request(name, [0] * context, context, SamplingParams(), 0, 0.0, block_tables=tables)
        plan.append(Row(name, start, query_len, True))
    batch = build_batch(StepPlan(1, tuple(plan)), requests, specs, CPU)
    attention = TorchAttention(SCALE, torch.float64, softcap)
    attention.plan(batch)
    worst = 0.0
    for layer, window in enumerate(windows):
        context_of = {name: contexts[int(name) * len(windows) + layer] for name in batch.request_ids}
        q = torch.randn(batch.num_tokens, HEADS, HEAD_DIM, generator=generator, dtype=torch.float64)
        new = [context_of[r][:, -n:] for r, n in zip(batch.request_ids, batch.query_lens, strict=True)]
        found = attention.forward(q, *torch.cat(new, dim=1), layer, cache, batch).split(batch.query_lens)
        for name, query, out in zip(batch.request_ids, q.split(batch.query_lens), found, strict=True):
            assert out.isfinite().all()
            worst = max(worst, float((out - formula(query, *context_of[name], window, softcap)).abs().max()))
    return worst


ROWS = [
    [(1, 1)],
    [(1, 40)],
    [(1, 1), (1, 40), (1, 17)],
    [(5, 18), (1, 33), (9, 9), (1, 2), (1, 16)],
    [(12, 46), (3, 3)],
    [(1, 16), (16, 32), (1, 32)],
    [(5, 18), (5, 30), (2, 2), (5, 5), (2, 33), (1, 4), (1, 3), (17, 20), (17, 40)],
]


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("rows", ROWS, ids=str)
def test_each_row_reads_its_own_pages(rows, block_size) -> None:
    for seed in range(3):
        assert attend_in_pages(rows, block_size, seed=seed) < 1e-13


@pytest.mark.parametrize("window", [1, 2, 7, 16, 17, 46])
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("rows", ROWS, ids=str)
def test_a_window_sees_itself_and_the_window_minus_one_positions_before(rows, block_size, window) -> None:
    assert attend_in_pages(rows, block_size, [window]) < 1e-13


@pytest.mark.parametrize("window", [3, 4, 5])
@pytest.mark.parametrize("context", [3, 4, 5, 8, 9, 12, 13])
@pytest.mark.parametrize("query_len", [1, 3])
def test_the_edge_of_the_window_is_right_where_it_meets_the_edge_of_a_block(query_len, context, window) -> None:
    assert attend_in_pages([(query_len, context)], 4, [window]) < 1e-13
    assert attend_in_pages([(query_len, context), (1, context + 1), (1, context)], 4, [window]) < 1e-13


@given(
    rows=st.lists(
        st.tuples(st.sampled_from([1, 1, 2, 3, 3, 9]), st.integers(0, 40)).map(lambda r: (r[0], sum(r))),
        min_size=1,
        max_size=5,
    ),
    block_size=st.sampled_from([1, 3, 4, 16]),
    windows=st.lists(st.none() | st.integers(1, 50), min_size=1, max_size=3),
    softcap=st.sampled_from([None, 0.8]),
    seed=st.integers(0, 100),
)
def test_any_mix_of_rows_windows_and_groups_gives_the_formula(rows, block_size, windows, softcap, seed) -> None:
    assert attend_in_pages(rows, block_size, windows, softcap, seed) < 1e-12


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 8, 20])
def test_a_window_is_measured_from_absolute_positions_not_from_the_start_of_a_chunk(chunk: int) -> None:
    """A prompt that is read in chunks has the attention of one that is read at once (vllm#3385, vllm#47332)."""
    length, window = 20, 6
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(length, HEADS, HEAD_DIM, generator=generator, dtype=torch.float64)
    k, v = torch.randn(2, length, KV_HEADS, HEAD_DIM, generator=generator, dtype=torch.float64)
    spec = KVSpec(1, KV_HEADS, HEAD_DIM, 4, bits_per_value=64, layers=(0,), window=window)
    cache, attention = PagedKVCache([spec], 8, torch.float64, CPU), TorchAttention(SCALE, torch.float64)
    request = Request("0", [0] * length, length, SamplingParams(), 0, 0.0, block_tables=[[3, 7, 1, 0, 6]])
    found = []
    for start in range(0, length, chunk):
        now = slice(start, min(start + chunk, length))
        row = Row("0", start, now.stop - start, False)
        batch = build_batch(StepPlan(1, (row,)), {"0": request}, [spec], CPU)
        attention.plan(batch)
        found.append(attention.forward(q[now], k[now], v[now], 0, cache, batch))
    assert float((torch.cat(found) - formula(q, k, v, window, None)).abs().max()) < 1e-13


def test_the_soft_cap_is_applied_to_scaled_scores_before_the_mask() -> None:
    rows = [(5, 18), (1, 33), (9, 9), (1, 2), (1, 16)]
    assert attend_in_pages(rows, 4, [None, 7], softcap=0.5) < 1e-13
    q, k = torch.ones(2, HEADS, HEAD_DIM).double(), torch.rand(2, KV_HEADS, HEAD_DIM).double()
    change = (formula(q, k, k, None, 0.5) - formula(q, k, k, None, None)).abs().max()
    assert float(change) > 1e-3, "the cap does not matter in this test"


def test_a_single_row_and_a_row_among_others_agree() -> None:
    """Short rows are computed together, padded to the longest; one alone takes another path."""
    assert attend_in_pages([(1, 23)], 4) < 1e-13
    assert attend_in_pages([(1, 23), (1, 40)], 4) < 1e-13
    assert attend_in_pages([(4, 23)], 4) < 1e-13
    assert attend_in_pages([(4, 23), (4, 40)], 4) < 1e-13


def test_short_rows_are_grouped_by_their_tokens_and_by_what_they_see() -> None:
    """Contexts of 100 and 9 tokens are far apart; behind a window of 8 they are alike, and are computed together."""
    assert by_length([1] * 4, [100, 60, 49, 9]) == [slice(0, 2), slice(2, 3), slice(3, 4)]
    assert by_length([2] * 2, [9, 12]) == [slice(0, 1), slice(1, 2)]  # the first is taken for the longest
    assert _planned([(1, 100), (1, 9)]) == ([], [(8, 2)])
    # Rows with drafts, and chunks; what a window of 8 leaves is 8 positions for the first query, and one more for
    # each behind it.
    long = (SHORT + 1, 40)
    full, windowed = _planned([(5, 60), (1, 9), (1, 12), (5, 31), (SHORT, 40), (SHORT, 50), long, long])
    assert full == [(12, 2), (60, 2), (50, 2)]
    assert windowed == [(8, 2), (12, 2), (SHORT + 7, 2)]


def _planned(rows: Sequence[tuple[int, int]]) -> tuple[list[tuple[int, int]], ...]:
    """Of rows of (query_len, context_len), without a window and with one of 8, the groups: what the longest sees, and
    how many rows."""
    specs = [
        KVSpec(1, KV_HEADS, HEAD_DIM, 4, bits_per_value=64, layers=(layer,), window=w)
        for layer, w in enumerate((None, 8))
    ]
    requests = {
        str(i): Request(str(i), [0] * n, n, SamplingParams(), 0, 0.0, block_tables=[[0] * 25] * 2)
        for i, (_, n) in enumerate(rows)
    }
    plan = StepPlan(1, tuple(Row(str(i), n - length, length, True) for i, (length, n) in enumerate(rows)))
    batch = build_batch(plan, requests, specs, CPU)
    TorchAttention(SCALE, torch.float64).plan(batch)
    found = []
    for group in batch.attention_plan:
        tokens = [range(batch.num_tokens)[b.tokens] for b in group.short]
        tokens += [range(batch.num_tokens)[tokens] for tokens, _ in group.others]
        assert sorted(i for each in tokens for i in each) == [*range(batch.num_tokens)]
        assert all(b.mask[:, 0, 0].shape == b.slots.shape for b in group.short)
        found.append([(b.slots.shape[1], b.slots.shape[0]) for b in group.short])
    return tuple(found)


def test_new_keys_and_values_land_at_their_slots_and_nowhere_else() -> None:
    """A cache whose update never writes passes a test of shapes; this looks at the values."""
    spec = KVSpec(2, KV_HEADS, HEAD_DIM, 4, bits_per_value=64)
    cache = PagedKVCache([spec], 6, torch.float64, CPU)
    request = Request("0", [0] * 7, 7, SamplingParams(), 0, 0.0, block_tables=[[5, 2]])
    batch = build_batch(StepPlan(1, (Row("0", 3, 4, True),)), {"0": request}, [spec], CPU)
    assert batch.slot_mapping.tolist() == [23, 8, 9, 10]
    k, v = torch.randn(2, 4, 2, 8, dtype=torch.float64)
    cache.write(1, k, v, batch)
    keys, values = cache.layer(1)
    assert torch.equal(keys[5, 3], k[0])
    assert torch.equal(keys[2, :3], k[1:])
    assert torch.equal(values[5, 3], v[0])
    assert torch.equal(values[2, :3], v[1:])
    assert int((cache.data != 0).sum()) == 2 * 4 * 2 * 8


def test_decode_rows_of_bfloat16_are_softly_capped_in_float32() -> None:
    """torch's fused attention takes its softmax in float32; the written-out one must not be worse."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, HEADS, HEAD_DIM, generator=generator).bfloat16()
    k, v = torch.randn(2, 300, KV_HEADS, HEAD_DIM, generator=generator).bfloat16()
    exact = formula(q.double(), k.double(), v.double(), None, 50.0)
    found = reference.attention_one_row(q, k, v, SCALE, softcap=50.0)
    assert found.dtype is torch.bfloat16
    assert float((found.double() - exact).abs().max()) <= float(exact.abs().max()) * 2**-8


@pytest.mark.parametrize("cap", [None, 5.0])
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_bad_key_or_value_has_no_effect_on_the_queries_before_it(
    bad: float, window: int | None, cap: float | None
) -> None:
    """Of one request: all queries of a prompt, of a chunk, and of rows with drafts. 0 x NaN is NaN."""
    generator = torch.Generator().manual_seed(0)
    sizes = ((30, 30), (6, 30), (30, 4))  # queries, keys that were there before

    def made(queries: int, past: int) -> list[torch.Tensor]:
        shapes = ((queries, HEADS), (past + queries, KV_HEADS), (past + queries, KV_HEADS))
        return [torch.randn(*shape, HEAD_DIM, generator=generator, dtype=torch.float64) for shape in shapes]

    for queries, past in sizes:
        for which in (1, 2):
            row = made(queries, past)
            right = formula(*row, window, cap)
            row[which][past + 3, 1, 5] = bad
            found = reference.attention_one_row(row[0], row[1], row[2], SCALE, window, cap)
            assert (found[:3] - right[:3]).abs().max() < 1e-12
            assert which == 1 or not found[3].isfinite().all()
    for which in (1, 2):
        q, k, v = (torch.stack(pair) for pair in zip(made(4, 20), made(4, 20), strict=True))
        right = torch.stack([formula(q[row], k[row], v[row], window, cap) for row in range(2)])
        (k, v)[which - 1][1, 22, 1, 5] = bad
        mask = torch.zeros(2, 1, 4, 24, dtype=torch.float64)
        mask[:] = mask.masked_fill(~reference.causal_mask(4, 24, CPU, window), -torch.inf)
        found = reference.attention_rows(q, k, v, mask, SCALE, cap)
        assert (found[0] - right[0]).abs().max() < 1e-12
        assert (found[1, :2] - right[1, :2]).abs().max() < 1e-12
        assert which == 1 or not found[1, 2].isfinite().all()
