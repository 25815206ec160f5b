"""The block pool: integers, counted exactly."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from reference_impl.core.block_pool import BlockPool, OutOfBlocks
from reference_impl.core.kv_manager import KVManager
from reference_impl.interfaces import Request, SamplingParams


class Pool(RuleBasedStateMachine):
    """Allocating, sharing and dropping in any order, against a plain Counter."""

    @initialize(n=st.integers(1, 9))
    def start(self, n: int) -> None:
        self.pool, self.n, self.model = BlockPool(n), n, Counter()

    @rule(n=st.integers(0, 10))
    def allocate(self, n: int) -> None:
        free = self.n - len(self.model)
        if n > free:
            with pytest.raises(OutOfBlocks, match=f"asked for {n} blocks, {free} of {self.n} are free"):
                self.pool.allocate(n)
            return
        blocks = self.pool.allocate(n)
        assert len(set(blocks)) == len(blocks) == n
        assert not set(blocks) & set(self.model)
        self.model.update(blocks)

    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        ids = data.draw(st.lists(st.sampled_from(sorted(self.model)), max_size=5)) if self.model else []
        self.pool.incref(ids)
        self.model.update(ids)

    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        held = sorted(self.model.elements())
        chosen = data.draw(st.lists(st.integers(0, len(held) - 1), unique=True)) if held else []
        ids = [held[i] for i in chosen]
        freed = self.pool.decref(ids)
        self.model -= Counter(ids)
        assert sorted(freed) == sorted({i for i in ids if not self.model[i]})
        self.model = +self.model

    @invariant()
    def counts_are_exact(self) -> None:
        assert self.pool.num_free == self.n - len(self.model)
        assert [self.pool.ref_count(b) for b in range(self.n)] == [self.model[b] for b in range(self.n)]


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=30, deadline=None, derandomize=True, database=None)


def test_a_failed_allocation_takes_nothing() -> None:
    pool = BlockPool(3)
    pool.allocate(2)
    with pytest.raises(OutOfBlocks):
        pool.allocate(2)
    assert pool.num_free == 1
    assert len(pool.allocate(1)) == 1


def test_a_block_freed_twice_is_an_error() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.decref(blocks)
    with pytest.raises(ValueError, match="freed twice"):
        pool.decref(blocks)
    assert pool.num_free == 2


@pytest.mark.parametrize("block", [-1, 3, 99])
def test_a_block_that_the_pool_does_not_have_is_refused(block: int) -> None:
    """-1 is no block, though Python would take the last one."""
    pool = BlockPool(3)
    pool.allocate(3)
    for change in (pool.incref, pool.decref):
        with pytest.raises(ValueError, match=f"{change.__name__}: expected blocks 0 to 2, got {block}"):
            change([0, block])
    with pytest.raises(ValueError, match=f"ref_count: expected blocks 0 to 2, got {block}"):
        pool.ref_count(block)
    assert [pool.ref_count(b) for b in range(3)] == [1, 1, 1]


def test_what_is_refused_changes_nothing() -> None:
    pool = BlockPool(4)
    first, shared, free = *pool.allocate(2), 3
    pool.incref([shared])
    for ids in ([first, free], [first, first], [shared, shared, shared], [first, shared, 7]):
        with pytest.raises(ValueError, match="decref"):
            pool.decref(ids)
    with pytest.raises(ValueError, match="incref"):
        pool.incref([first, free])
    assert [pool.ref_count(b) for b in (first, shared, free)] == [1, 2, 0]
    assert pool.num_free == 2
    assert pool.decref([shared, first, shared]) == [first, shared]


def test_a_free_block_cannot_be_shared() -> None:
    with pytest.raises(ValueError, match="block 1 is free"):
        BlockPool(2).incref([1])


def test_a_freed_block_is_reused_last() -> None:
    pool = BlockPool(4)
    first = pool.allocate(1)
    pool.decref(first)
    assert first[0] not in pool.allocate(3)


@pytest.mark.parametrize("n", [0, -1])
def test_a_pool_without_blocks_is_refused(n: int) -> None:
    with pytest.raises(ValueError, match="num_blocks: expected at least 1"):
        BlockPool(n)


def request(computed: int = 0, blocks: list[int] | None = None) -> Request:
    r = Request("r", [1] * 100, 100, SamplingParams(), 0, 0.0, num_computed_tokens=computed)
    r.block_tables = [blocks or []]
    return r


@pytest.mark.parametrize(
    ("computed", "new", "blocks"), [(0, 1, 1), (0, 4, 1), (0, 5, 2), (3, 1, 1), (4, 1, 2), (7, 2, 3), (8, 4, 3)]
)
def test_reserve_gives_exactly_the_blocks_that_the_tokens_need(computed: int, new: int, blocks: int) -> None:
    manager, r = KVManager(BlockPool(10), 4), request()
    assert manager.reserve(r, computed or 1)
    r.num_computed_tokens = computed
    assert manager.reserve(r, new)
    assert len(r.block_table) == blocks
    assert manager.num_available == 10 - blocks


def test_reserve_gives_all_or_nothing_and_keeps_what_the_request_has() -> None:
    manager, r = KVManager(BlockPool(3), 4), request()
    assert manager.reserve(r, 5)
    table, r.num_computed_tokens = list(r.block_table), 5
    assert not manager.reserve(r, 8)
    assert r.block_table == table
    assert manager.num_available == 1
    assert manager.reserve(r, 7)
    assert r.block_table[:2] == table


def test_free_gives_every_block_back_once() -> None:
    manager, r = KVManager(BlockPool(3), 4), request()
    manager.reserve(r, 12)
    manager.free(r)
    manager.free(r)
    assert r.block_table == []
    assert manager.num_available == 3
