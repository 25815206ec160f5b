"""Attention of draft trees, and of the rows beside them, against the definition: what a row would see whose own
tokens were those of one path alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from reference_impl.kernels import reference
from reference_impl.kernels.flash_attention import flash_attention
from tests.kernels.paged import DEVICE, Case, check, make, random_tree


def sees(rows: Sequence[tuple[int, int]], plain: Sequence[int] = (), seed: int = 0) -> Tensor:
    """Random trees; 0 for rows that are none."""
    found, first = random_tree([(min(q, 64), n) for q, n in rows], seed), 0
    parts = []
    for number, (queries, _) in enumerate(rows):
        own = found[first : first + min(queries, 64)]
        parts.append(torch.zeros(queries, dtype=torch.int64, device=DEVICE) if number in plain else own)
        first += min(queries, 64)
    return torch.cat(parts)


def by_paths(case: Case, ancestors: Tensor, window: int | None = None) -> Tensor:
    """Each query of a tree by itself, behind the context and its ancestors, as in a text; other rows as they are."""
    out = torch.empty_like(case.q)
    size = case.keys.shape[1]
    for row, length in enumerate(case.seq_lens.tolist()):
        first, end = case.query_start_loc[row : row + 2].tolist()
        slots = reference.context_slots(case.block_table[row], length, size)
        keys, values = (cache.flatten(0, 1)[slots] for cache in (case.keys, case.values))
        context = list(range(length - (end - first)))
        if not ancestors[first]:
            out[first:end] = reference.attention_one_row(case.q[first:end], keys, values, case.scale, window)
            continue
        for query in range(first, end):
            bits = int(ancestors[query]) % 2**64
            seen = context + [len(context) + i for i in range(64) if bits >> i & 1]
            assert seen[-1] == len(context) + query - first
            path = keys[seen], values[seen]
            out[query] = reference.attention_one_row(case.q[query : query + 1], *path, case.scale, window)[0]
    return out


def check_both(case: Case, ancestors: Tensor, window: int | None = None) -> None:
    """The twin in float64 is the definition; the kernel is as near to it as plain torch."""
    exact = Case(case.q.double(), case.keys.double(), case.values.double(), *case.ragged[3:], case.options)
    found = reference.flash_attention(*exact.ragged, ancestors=ancestors, window=window)
    assert float((found - by_paths(exact, ancestors, window)).abs().max()) < 1e-12
    check(flash_attention, reference.flash_attention, case.ragged, ancestors=ancestors, window=window)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(2, 2, 64), (5, 1, 16), pytest.param(6, 2, 80, marks=pytest.mark.slow)]
)
def test_a_node_sees_the_context_and_its_path(heads: int, kv_heads: int, head_dim: int) -> None:
    rows = [(5, 18), (64, 140), (1, 1), (40, 40), (63, 64), (29, 61)]
    check_both(make(rows, heads, kv_heads, head_dim, torch.float32), sees(rows))


@pytest.mark.parametrize("window", [3, 33, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 7, 20, 100))])
def test_a_window_goes_by_positions_of_which_siblings_share_one(window: int) -> None:
    rows = [(5, 18), (64, 163), (1, 1), (40, 40), (1, 70), (70, 90)]
    check_both(make(rows, 2, 1, 16, torch.float32), sees(rows, plain=(4, 5)), window)


# Each block size with four of the distances, each distance with two of the block sizes; the rest is slow.
AROUND = [
    pytest.param(behind, block_size, marks=[] if (row - column) % 2 == 0 else pytest.mark.slow)
    for row, behind in enumerate((0, 1, 15, 16, 17, 31, 32, 33))
    for column, block_size in enumerate((1, 4, 16, 32))
]


@pytest.mark.parametrize(("behind", "block_size"), AROUND)
def test_trees_around_the_ends_of_blocks_and_tiles(behind: int, block_size: int) -> None:
    rows = [(31, behind + 31), (33, behind + 33)]
    check_both(make(rows, 2, 1, 16, torch.float32, block_size=block_size), sees(rows, seed=behind))


def test_beside_trees_chunks_and_decoding_rows_are_causal() -> None:
    """A chunk may be longer than 64, and of any place among the rows."""
    rows = [(1, 90), (130, 150), (29, 70), (1, 1), (65, 65), (7, 100)]
    ancestors = sees(rows, plain=(0, 1, 3, 4))
    case = make(rows, 2, 1, 32, torch.float32)
    check_both(case, ancestors)
    mixed, causal = flash_attention(*case.ragged, ancestors=ancestors), flash_attention(*case.ragged)
    is_plain = ancestors == 0
    assert float((mixed - causal)[is_plain].abs().max()) < 1e-6
    assert float((mixed - causal)[~is_plain].abs().max()) > 1e-2


def test_a_path_down_a_tree_is_what_a_chain_of_its_tokens_is() -> None:
    """The nodes of one path moved to where their positions belong: as the engine does with those that are kept."""
    parents, path = [-1, -1, 0, 0, 1, 3, 3], [0, 3, 6]
    own, context = 1 + len(parents), 21
    bits = [1]
    for node, parent in enumerate(parents):
        bits.append(bits[parent + 1] | 1 << node + 1)
    case = make([(own, context + own)], 4, 2, 16, torch.float32, block_size=4)
    tree = flash_attention(*case.ragged, ancestors=torch.tensor(bits, device=DEVICE))
    kept = [0, *(node + 1 for node in path)]
    slots = reference.context_slots(case.block_table[0], context + own, 4)
    for cache in (case.keys, case.values):
        flat = cache.flatten(0, 1)
        flat[slots[context : context + len(kept)]] = flat[slots[[context + i for i in kept]]]
    starts, lens = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([0, len(kept)], [context + len(kept)]))
    chain = flash_attention(case.q[kept], case.keys, case.values, case.block_table, starts, lens, case.scale)
    assert float((chain - tree[kept]).abs().max()) < 1e-6


# Each option with one of the caches; the other half is slow.
WITH_A_CACHE = [
    pytest.param(cache, options, marks=[] if number % 3 == 0 else pytest.mark.slow, id=f"{options}-{cache}")
    for number, (cache, options) in enumerate(
        (cache, options)
        for cache in (torch.int8, torch.float8_e4m3fn)
        for options in ({}, {"softcap": 5.0}, {"window": 9}, {"window": 40, "softcap": 5.0})
    )
]


@pytest.mark.parametrize(("cache", "options"), WITH_A_CACHE)
def test_with_a_cache_of_eight_bits_windows_and_soft_caps_together(cache: torch.dtype, options: dict[str, Any]) -> None:
    rows = [(5, 18), (64, 163), (40, 40), (1, 70), (70, 90)]
    case = make(rows, 2, 1, 32, torch.float16, cache=cache)
    ancestors = sees(rows, plain=(3, 4))
    check(flash_attention, reference.flash_attention, case.ragged, ancestors=ancestors, **options, **case.options)


@st.composite
def shapes(draw: st.DrawFn) -> tuple[list[tuple[int, int]], dict[str, Any]]:
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        queries = draw(st.integers(1, 20) | st.just(64))
        rows.append((queries, queries + draw(st.integers(0, 40))))
    kv_heads = draw(st.integers(1, 2))
    return rows, {
        "heads": kv_heads * draw(st.integers(1, 3)), "kv_heads": kv_heads, "head_dim": draw(st.sampled_from([8, 24])),
        "block_size": draw(st.sampled_from([1, 3, 8, 16])), "seed": draw(st.integers(0, 9)),
        "window": draw(st.none() | st.integers(1, 50)), "plain": draw(st.sets(st.integers(0, 2))),
    }  # fmt: skip


@settings(max_examples=12, deadline=None, derandomize=True, database=None)
@given(shape=shapes())
def test_any_trees_beside_any_rows(shape: tuple[list[tuple[int, int]], dict[str, Any]]) -> None:
    rows, o = shape
    case = make(rows, o["heads"], o["kv_heads"], o["head_dim"], torch.float32, block_size=o["block_size"],
                seed=o["seed"])  # fmt: skip
    check_both(case, sees(rows, plain=sorted(o["plain"]), seed=o["seed"]), o["window"])
