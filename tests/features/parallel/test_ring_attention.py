"""Ring attention is attention: whatever the parts, the sizes of scores and the number of ranks; what each rank does."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from reference_impl.features.parallel.ring_attention import attend, contiguous, merge, pairs, ring_attention, zigzag
from reference_impl.features.parallel.threads import ThreadGroup
from tests.examples import examples

HEAD_DIM = 8
ORDERS = {"contiguous": contiguous, "zigzag": zigzag}


def drawn(num_tokens: int, num_heads: int, num_kv_heads: int, seed: int, size: float = 1.0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)

    def normal(heads: int) -> Tensor:
        return torch.randn(num_tokens, heads, HEAD_DIM, generator=generator, dtype=torch.float64)

    return size * normal(num_heads), normal(num_kv_heads), normal(num_kv_heads)


def in_a_ring(order: list[Tensor], q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, list[Any]]:
    """The outputs of all tokens, and the ranks."""
    ranks = [ThreadGroup.rank(group, i) for group in [ThreadGroup(len(order))] for i in range(len(order))]

    def one(rank: Any) -> Tensor:
        own = order[rank.rank]
        return ring_attention(rank, q[own], k[own], v[own], own, HEAD_DIM**-0.5)

    with ThreadPoolExecutor(len(order)) as pool:
        parts = list(pool.map(one, ranks))
    out = torch.empty_like(q)
    for own, part in zip(order, parts, strict=True):
        out[own] = part
    return out, ranks


def definition(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), is_causal=True, enable_gqa=True
    ).transpose(0, 1)


@pytest.mark.parametrize("name", ORDERS)
@given(
    num_tokens=st.integers(1, 40), size=st.integers(1, 5), heads=st.sampled_from([(1, 1), (4, 2), (6, 6), (6, 1)]),
    seed=st.integers(0, 999), large=st.sampled_from([1.0, 1e4]),
)  # fmt: skip
@settings(max_examples=examples(40))
def test_it_is_causal_attention(
    name: str, num_tokens: int, size: int, heads: tuple[int, int], seed: int, large: float
) -> None:
    q, k, v = drawn(num_tokens, *heads, seed, large)
    order = ORDERS[name](num_tokens, size)
    assert sorted(torch.cat(order).tolist()) == list(range(num_tokens))
    found, ranks = in_a_ring(order, q, k, v)
    torch.testing.assert_close(found, definition(q, k, v), atol=1e-11, rtol=1e-9)
    for rank in ranks:  # all parts but one pass through each rank
        kept_back = order[(rank.rank + 1) % size]
        others = num_tokens - len(kept_back)
        assert rank.num_bytes == (8 * (2 * heads[1] * HEAD_DIM + 1) * others if size > 1 else 0)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float16, 2e-3), (torch.bfloat16, 2e-2), (torch.float32, 1e-6)])
def test_partial_results_are_kept_in_float32(dtype: torch.dtype, bound: float) -> None:
    q, k, v = (x.to(dtype) for x in drawn(96, 4, 2, 1))
    found, _ = in_a_ring(zigzag(96, 4), q, k, v)
    assert found.dtype == dtype
    assert float((found.double() - definition(q.double(), k.double(), v.double())).abs().max()) <= bound
    out, lse = attend(q, k, v, 1.0, torch.ones(96, 96, dtype=torch.bool))
    assert {out.dtype, lse.dtype} == {torch.float32}


def test_rows_that_see_nothing_have_no_weight() -> None:
    q, k, v = drawn(5, 2, 1, 3)
    sees = torch.tensor([[True] * 5, [False] * 5, [False] * 4 + [True], [False] * 5, [True] * 5])
    nothing, none = attend(q, k, v, 1.0, torch.zeros_like(sees))
    assert not nothing.any()
    assert torch.all(none == -torch.inf)
    some = attend(q, k, v, 1.0, sees)
    for found in (merge(*some, nothing, none), merge(nothing, none, *some)):
        assert torch.equal(found[0], some[0])
        assert torch.equal(found[1], some[1])
    assert not torch.isnan(merge(nothing, none, nothing, none)[0]).any()


@given(num_tokens=st.integers(0, 60), size=st.integers(1, 6))
@settings(max_examples=examples(60))
def test_every_pair_is_computed_once(num_tokens: int, size: int) -> None:
    for order in ORDERS.values():
        assert int(pairs(order(num_tokens, size)).sum()) == num_tokens * (num_tokens + 1) // 2


def work(order: Callable[[int, int], list[Tensor]], size: int) -> tuple[Tensor, int]:
    """Pairs by rank, and those of the slowest rank of each turn, added: what the ring waits for."""
    found = pairs(order(1024, size))
    return found.sum(0), int(found.amax(1).sum())


@pytest.mark.parametrize("size", [2, 4, 8])
def test_zigzag_order_gives_each_rank_as_much(size: int) -> None:
    even, waited = work(zigzag, size)
    uneven, waited_longer = work(contiguous, size)
    assert int(even.max() - even.min()) == 0
    assert int(uneven.max()) / 1024**2 * 2 == pytest.approx((2 * size - 1) / size**2, rel=1e-2)
    assert waited <= 1.01 * 1024 * 1025 / 2 / size + 1024
    assert waited_longer > 1.4 * waited
