"""What one call to the engine's KV manager, with its features, gives, keeps and evicts; `test_serving_model.py` tries
any order of calls."""

from __future__ import annotations

import pytest

from reference_impl.assembly.kv import kv_manager
from reference_impl.core.block_pool import BlockPool
from reference_impl.core.kv_manager import KVManager
from reference_impl.features.prefix.hash_index import HashIndex
from reference_impl.features.prefix.radix_index import RadixIndex
from reference_impl.interfaces import NO_BLOCK, PrefixIndex, Request, SamplingParams


def make_request(name: str, tokens: list[int], groups: int = 1) -> Request:
    return Request(
        name, tokens, len(tokens), SamplingParams(), 0, 0.0, max_total_tokens=100, block_tables=[[]] * groups
    )


def compute(manager: KVManager, request: Request, num_tokens: int) -> None:
    """As a step does."""
    assert manager.reserve(request, num_tokens)
    request.num_computed_tokens += num_tokens
    manager.commit(request)


@pytest.fixture(params=[HashIndex, RadixIndex])
def index(request: pytest.FixtureRequest) -> PrefixIndex:
    return request.param(2)


def test_an_eviction_takes_what_is_missing_and_no_more(index: PrefixIndex) -> None:
    """In a small cache; in a large one a few more go at once."""
    manager = kv_manager(BlockPool(8), 2, index=index)
    for first in (1, 2):
        request = make_request(str(first), [first] * 6)
        assert manager.admit(request, 6, 6)
        compute(manager, request, 6)
        manager.free(request)
    assert (manager.pool.num_free, manager.num_available) == (2, 8)
    assert manager.admit(make_request("large", [3] * 5), 5, 5)
    assert len(manager.take_transfers().evicted) == 1
    assert len(index) == 5


def test_what_does_not_fit_evicts_nothing_and_holds_nothing(index: PrefixIndex) -> None:
    manager = kv_manager(BlockPool(6), 2, index=index)
    first = make_request("first", [1] * 4)
    running = make_request("running", [2] * 5)
    for request in (first, running):
        assert manager.admit(request, request.num_tokens, 9)
        compute(manager, request, request.num_tokens)
    manager.free(first)
    again = make_request("again", [1] * 9)
    assert not manager.admit(again, 9, 9), "5 blocks, of which 2 are cached and 1 is free"
    assert again.block_tables == [[]]
    assert (manager.num_available, len(index)) == (3, 4)
    assert manager.take_transfers().evicted == ()
    assert manager.admit(again, 5, 9)
    assert (again.num_computed_tokens, again.num_cached_tokens) == (4, 4)


def test_the_longest_cached_prefix_is_a_hit_up_to_the_last_block_before_the_last_token(index: PrefixIndex) -> None:
    manager = kv_manager(BlockPool(20), 2, index=index)
    first = make_request("first", [1, 2, 3, 4, 5, 6])
    assert manager.admit(first, 6, 6)
    compute(manager, first, 6)
    hits = {}
    for length in range(1, 10):
        request = make_request(str(length), [1, 2, 3, 4, 5, 6, 7, 8, 9][:length])
        assert manager.admit(request, length, 9)
        hits[length] = request.num_cached_tokens
        manager.free(request)
    assert hits == {1: 0, 2: 0, 3: 2, 4: 2, 5: 4, 6: 4, 7: 6, 8: 6, 9: 6}


@pytest.mark.parametrize("windows", [(None,), (4,), (None, 4)])
def test_who_comes_back_from_the_host_gets_blocks_for_what_is_known_and_windows_for_the_next_chunk(windows) -> None:
    """6 of 20 tokens are computed, in blocks of 2; the next step computes at most 5 of them."""
    manager = kv_manager(BlockPool(40), 2, windows, host_pool=BlockPool(40))
    for num_tokens, in_windows in ((20, 6), (9, 5), (7, 4)):
        request = make_request("a", [1] * num_tokens, len(windows))
        assert manager.admit(request, num_tokens, 6)
        request.num_cached_tokens = 2
        request.num_computed_tokens = 6
        assert manager.swap_out(request)
        assert request.block_tables == [[] for _ in windows]
        moved = {None: 3, 4: 2}  # a window of 4 shows positions 3, 4, 5 to the next token
        assert len(manager.take_transfers().swap_out) == sum(moved[window] for window in windows)
        assert manager.admit(request, num_tokens, 5)
        assert (request.num_computed_tokens, request.num_cached_tokens) == (6, 0)
        for table, window in zip(request.block_tables, windows, strict=True):
            assert len(table) == (-(-num_tokens // 2) if window is None else in_windows)
            assert [block == NO_BLOCK for block in table[:3]] == [window is not None, False, False]
        manager.free(request)
        manager.take_transfers()
        assert manager.num_available == 40


@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 6, 7, 8])
def test_a_window_keeps_the_blocks_that_the_next_query_sees_and_no_others(window: int) -> None:
    manager = kv_manager(BlockPool(20), 3, (window,))
    request = make_request("a", [1] * 40)
    assert manager.admit(request, 40, 4)
    while request.num_computed_tokens < 36:
        start = request.num_computed_tokens
        compute(manager, request, 4)
        seen = {position // 3 for position in range(max(0, start - window + 1), start + 4)}
        assert {place for place, block in enumerate(request.block_table) if block != NO_BLOCK} == seen
        assert manager.num_available == 20 - len(seen)


@pytest.mark.parametrize("windows", [(None,), (None, 3)])
def test_a_fork_that_goes_on_behind_a_shared_block_gets_its_copy_and_all_its_new_blocks(windows) -> None:
    """7 tokens in blocks of 2, of which 3 are shared: of each group a copy of the second block and two more."""
    groups = len(windows)
    manager = kv_manager(BlockPool(5 * groups), 2, windows)
    parent, child = make_request("parent", [1] * 3, groups), make_request("child", [1] * 7, groups)
    assert manager.admit(parent, 3, 9)
    parent.num_computed_tokens = child.num_computed_tokens = 3
    manager.fork(parent, child)
    assert not manager.reserve(child, 6), "one block too many"
    assert manager.take_transfers().copies == ()
    assert manager.reserve(child, 4)
    copies = manager.take_transfers().copies
    assert [pair.src for pair in copies] == [table[1] for table in parent.block_tables]
    assert [pair.dst for pair in copies] == [table[1] for table in child.block_tables]
    assert [len(table) for table in child.block_tables] == [4] * groups
    own = [block for table in child.block_tables for block in table[1:]]
    assert [manager.pool.ref_count(block) for block in own] == [1] * len(own)
    assert manager.num_available == 0
    manager.free(parent)
    manager.free(child)
    assert manager.num_available == 5 * groups


def test_a_fork_holds_the_indexed_blocks_before_those_it_shares(index: PrefixIndex) -> None:
    """The parent computed what somebody else had indexed meanwhile, and has not committed it. If it did so only later,
    the fork would hold an indexed block and not the one before it, which nobody could then evict."""
    manager = kv_manager(BlockPool(6), 2, index=index)
    other, parent, child = (make_request(name, [1, 2, 3, 4, 5]) for name in ("other", "parent", "child"))
    other.tokens = [1, 2, 7]
    assert manager.admit(parent, 5, 9)
    assert manager.admit(other, 3, 9)
    compute(manager, other, 3)
    parent.num_computed_tokens, child.num_computed_tokens = 5, 4
    manager.fork(parent, child)
    assert child.block_table == parent.block_table[:2]
    assert child.block_table[0] == other.block_table[0]
    manager.free(other)
    manager.free(parent)
    assert manager.num_available == 4
    assert manager.admit(make_request("large", [9] * 8), 8, 9)
    assert manager.num_available == 0


@pytest.mark.parametrize(("gives", "message"), [("in use", "is not indexed or is in use"), ("fewer", "gave 1 blocks")])
def test_an_index_of_your_own_that_evicts_wrongly_is_found_out(gives: str, message: str) -> None:
    class Wrong(HashIndex):
        def evict(self, num_blocks, evictable):
            return super().evict(1, evictable) if gives == "fewer" else super().evict(num_blocks, lambda block: True)

    manager = kv_manager(BlockPool(8), 2, index=Wrong(2))
    idle, running = make_request("idle", [1] * 6), make_request("running", [2] * 4)
    for request in (running, idle):
        assert manager.admit(request, request.num_tokens, 9)
        compute(manager, request, request.num_tokens)
    manager.free(idle)
    with pytest.raises(RuntimeError, match=message):
        manager.admit(make_request("large", [3] * 12), 12, 12)


def test_what_is_given_up_while_steps_run_comes_back_when_the_last_of_them_is_collected() -> None:
    pool = BlockPool(6)
    manager = kv_manager(pool, 2)
    first, second, third = (make_request(str(i), [i] * 4) for i in range(3))
    for request in (first, second, third):
        assert manager.admit(request, 4, 4)
    manager.step_submitted(1)
    manager.free(first)
    manager.step_submitted(2)
    manager.free(second)
    assert (manager.num_available, manager.num_releasing) == (0, 4)
    assert not manager.admit(make_request("new", [7] * 2), 2, 2)
    manager.step_collected(1)
    assert (manager.num_available, manager.num_releasing) == (2, 2)  # step 2 may use what was given up after it began
    manager.step_collected(2)
    assert (manager.num_available, manager.num_releasing) == (4, 0)
    manager.free(third)  # nothing runs
    assert manager.num_available == 6


def test_who_finds_no_room_for_the_rest_of_a_cached_prompt_leaves_nothing_that_comes_back_later(
    index: PrefixIndex,
) -> None:
    """Also while a step runs: who is told that blocks are coming waits for them."""
    manager = kv_manager(BlockPool(6), 2, index=index)
    first, running = make_request("first", [1] * 4), make_request("running", [2] * 5)
    for request in (first, running):
        assert manager.admit(request, request.num_tokens, 9)
        compute(manager, request, request.num_tokens)
    manager.free(first)
    manager.step_submitted(1)
    assert not manager.admit(make_request("again", [1] * 9), 9, 9)
    assert (manager.num_available, manager.num_releasing) == (3, 0)


def test_host_blocks_that_come_back_later_are_no_blocks_to_wait_for() -> None:
    device, host = BlockPool(4), BlockPool(4)
    manager = kv_manager(device, 2, host_pool=host)
    request = make_request("a", [1] * 5)
    assert manager.admit(request, 4, 4)
    compute(manager, request, 4)
    assert manager.swap_out(request)
    manager.take_transfers()
    manager.step_submitted(1)
    assert manager.admit(request, 5, 5)
    manager.take_transfers()
    assert (host.num_free, manager.num_releasing) == (2, 0)
    manager.step_collected(1)
    assert host.num_free == 4
