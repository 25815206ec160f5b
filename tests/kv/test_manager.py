"""What one call to the core's KV manager gives, keeps and evicts, without any feature."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest

from reference_impl.core.block_pool import BlockPool
from reference_impl.core.kv_manager import KVManager, prefix_key
from reference_impl.interfaces import BlockId, Request, SamplingParams


class ListedPrefixes:
    """A `PrefixIndex` in the fewest lines: every prefix by itself, the least recently used first."""

    def __init__(self, block_size: int):
        self.block_size = block_size
        self.prefixes: dict[tuple[bytes, tuple[int, ...]], BlockId] = {}

    def __len__(self) -> int:
        return len(self.prefixes)

    def match(self, tokens: Sequence[int], key: bytes) -> list[BlockId]:
        ends = range(self.block_size, len(tokens) + 1, self.block_size)
        path = [*itertools.takewhile(self.prefixes.__contains__, ((key, tuple(tokens[:end])) for end in ends))]
        for prefix in reversed(path):  # a prefix is evicted before those that it continues
            self.prefixes[prefix] = self.prefixes.pop(prefix)
        return [self.prefixes[prefix] for prefix in path]

    def insert(self, tokens: Sequence[int], key: bytes, blocks: Sequence[BlockId]) -> list[BlockId]:
        for i, block in enumerate(blocks, start=1):
            self.prefixes.setdefault((key, tuple(tokens[: i * self.block_size])), block)
        return self.match(tokens, key)

    def evict(self, num_blocks: int, evictable: Callable[[BlockId], bool]) -> list[BlockId]:
        oldest = [prefix for prefix, block in self.prefixes.items() if evictable(block)][:num_blocks]
        return [self.prefixes.pop(prefix) for prefix in oldest]


def make_request(name: str, tokens: list[int], groups: int = 1) -> Request:
    return Request(
        name, tokens, len(tokens), SamplingParams(), 0, 0.0, max_total_tokens=100, block_tables=[[]] * groups
    )


def compute(manager: KVManager, request: Request, num_tokens: int) -> None:
    """As a step does."""
    assert manager.reserve(request, num_tokens)
    request.num_computed_tokens += num_tokens
    manager.commit(request)


def test_a_fork_shares_what_is_computed_and_nothing_that_is_reserved() -> None:
    manager = KVManager(BlockPool(20), 2)
    parent, child = make_request("parent", [1] * 5), make_request("child", [1] * 5)
    assert manager.admit(parent, 20, 20)
    parent.num_computed_tokens, child.num_computed_tokens = 5, 4
    manager.fork(parent, child)
    assert child.block_table == parent.block_table[:2]
    assert [manager.pool.ref_count(block) for block in parent.block_table] == [2, 2] + [1] * 8
    compute(manager, child, 1)
    assert manager.take_transfers().copies == (), "4 tokens are two full blocks; the fifth begins one of its own"
    manager.free(parent)
    manager.free(child)
    assert manager.num_available == 20


@pytest.mark.parametrize("groups", [1, 2])
def test_a_shared_block_is_copied_before_it_is_written(groups: int) -> None:
    manager = KVManager(BlockPool(4 * groups), 2, num_groups=groups)
    parent, child = make_request("parent", [1] * 3, groups), make_request("child", [1] * 4, groups)
    assert manager.admit(parent, 3, 9)
    parent.num_computed_tokens = child.num_computed_tokens = 3
    manager.fork(parent, child)
    assert manager.reserve(child, 1)
    copies = manager.take_transfers().copies
    assert [pair.src for pair in copies] == [table[1] for table in parent.block_tables]
    assert [pair.dst for pair in copies] == [table[1] for table in child.block_tables]
    assert manager.take_transfers().copies == (), "it is the child's own now, and was noted once"
    manager.free(parent)
    manager.free(child)
    assert manager.num_available == 4 * groups


def test_a_computed_prefix_is_found_again_until_its_blocks_are_needed() -> None:
    manager = KVManager(BlockPool(6), 2, index=ListedPrefixes(2))
    first = make_request("first", [1, 2, 3, 4, 5])
    assert manager.admit(first, 5, 9)
    compute(manager, first, 5)
    twin = make_request("twin", [1, 2, 3, 4, 6])
    assert manager.admit(twin, 5, 9)
    assert twin.num_computed_tokens == twin.num_cached_tokens == 4
    assert twin.block_table[:2] == first.block_table[:2]
    manager.free(first)
    manager.free(twin)
    assert (manager.num_available, manager.pool.num_free) == (6, 4)
    large = make_request("large", [7] * 9)
    assert manager.admit(large, 9, 9)
    assert len(manager.take_transfers().evicted) == 1, "the end of the prefix went, its first block stays"
    assert manager.num_available == 1
    again = make_request("again", [1, 2, 3])
    assert not manager.admit(again, 3, 9), "its first block is cached and the second would be new"
    assert manager.num_available == 1
    manager.free(large)
    assert manager.admit(again, 3, 9)
    assert again.num_cached_tokens == 2


def test_what_is_computed_twice_is_kept_once() -> None:
    manager = KVManager(BlockPool(6), 2, index=ListedPrefixes(2))
    first, second = make_request("first", [1, 2, 3]), make_request("second", [1, 2, 3])
    for request in (first, second):
        assert manager.admit(request, 3, 9)
    compute(manager, first, 3)
    compute(manager, second, 3)
    assert first.block_table[0] == second.block_table[0]
    assert manager.pool.ref_count(first.block_table[0]) == 3
    assert manager.pool.num_free == 3


def test_more_groups_than_one_have_no_prefix_cache() -> None:
    with pytest.raises(ValueError, match="one KV group; this one has 2"):
        KVManager(BlockPool(6), 2, index=ListedPrefixes(2), num_groups=2)


def test_two_owners_never_have_one_key() -> None:
    """Whoever chooses a salt or names an adapter could otherwise write the tag of the other, or its length, into it."""
    names = [None, "", "a", "b", "ab", "salt", "asalt", "asaltb", "saltb", "adapter", "adaptera", "a\0", "\udc80", "é"]
    for tag in (b"salt", b"adapter"):
        names += [f"a{tag.decode()}{chr(n)}" + "\0" * 7 + rest for n, rest in ((1, "a"), (1, "b"), (0, ""))]
    owners = list(itertools.product(names, names))
    assert len({prefix_key(*owner) for owner in owners}) == len(owners)
