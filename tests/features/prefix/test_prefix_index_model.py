"""Both prefix indexes find, keep and evict the same blocks as a dict from prefixes to blocks, whatever comes."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from reference_impl.features.prefix.hash_index import HashIndex
from reference_impl.features.prefix.radix_index import RadixIndex
from tests.examples import examples

KEYS = (b"", b"a", b"tenant")


class NaiveIndex:
    """What the contract says, as slowly as it says it: every prefix, as a tuple of tokens, has its block."""

    def __init__(self, block_size: int):
        self.block_size, self.clock = block_size, 0
        self.block: dict[tuple, int] = {}
        self.used: dict[tuple, int] = {}

    def prefixes(self, tokens, key):
        ends = range(self.block_size, len(tokens) + 1, self.block_size)
        return [(key, tuple(tokens[:end])) for end in ends]

    def find(self, tokens, key):
        return list(itertools.takewhile(lambda p: p in self.block, self.prefixes(tokens, key)))

    def touch(self, prefixes):
        self.clock += 1
        self.used.update(dict.fromkeys(prefixes, self.clock))
        return [self.block[p] for p in prefixes]

    def match(self, tokens, key):
        return self.touch(self.find(tokens, key))

    def insert(self, tokens, key, blocks):
        prefixes = self.prefixes(tokens, key)
        for prefix, block in zip(prefixes, blocks, strict=True):
            self.block.setdefault(prefix, block)
        return self.touch(prefixes)

    def leaves(self):
        inner = {(key, tokens[: -self.block_size]) for key, tokens in self.block}
        return [p for p in self.block if p not in inner]

    def evict(self, num_blocks, evictable):
        evicted = []
        while len(evicted) < num_blocks:
            leaves = [p for p in self.leaves() if evictable(self.block[p])]
            if not leaves:
                break
            oldest = min(leaves, key=lambda p: (self.used[p], -len(p[1])))
            evicted.append(self.block.pop(oldest))
        return evicted

    def match_length(self, tokens, key):
        owned = [t for k, t in self.block if k == key]
        return max((common(t, tokens) for t in owned), default=0)


def common(a, b) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def check_tree(index: RadixIndex) -> list[int]:
    """What must be true of the tree's own records; returns its blocks."""
    blocks, nodes, todo = [], [], list(index.roots.items())
    while todo:
        (key, first), node = todo.pop()
        assert node.key == key
        assert node.segment[0] == first, "a child hangs under the tokens of its first block"
        assert len(node.segment) == len(node.blocks) > 0
        assert node.level[key, first] is node
        blocks += node.blocks
        nodes.append(node)
        todo += node.children.items()
    place = {node: i for i, node in enumerate(index._order)}
    assert set(place) == set(nodes)
    assert all(place[child] < place[node] for node in nodes for child in node.children.values())
    return blocks


def check_chain(index: HashIndex) -> list[int]:
    """What must be true of the chain's own records; returns its blocks."""
    links = list(index._links.values())
    queued = [link for _, link in index._leaves]
    assert len(queued) == len(set(queued)) <= len(index), "the heap is never longer than the index"
    assert all(link.num_children == sum(child.parent is link for child in links) for link in links)
    assert {link for link in links if not link.num_children} <= set(queued) <= set(links)
    return [link.block for link in links]


class Indexes(RuleBasedStateMachine):
    """Any order of matches, inserts and evictions; blocks are taken from the lowest numbers that are free."""

    @initialize(block_size=st.integers(1, 3))
    def start(self, block_size: int) -> None:
        self.block_size, self.model = block_size, NaiveIndex(block_size)
        self.hash, self.radix = HashIndex(block_size), RadixIndex(block_size)
        self.indexes = (self.hash, self.radix)

    def fresh(self, n: int) -> list[int]:
        taken = set(self.model.block.values())
        return list(itertools.islice((b for b in itertools.count() if b not in taken), n))

    tokens = st.lists(st.integers(0, 1), max_size=8)
    keys = st.sampled_from(KEYS)

    @rule(tokens=tokens, key=keys)
    def match(self, tokens, key) -> None:
        expected = self.model.match(tokens, key)
        for index in self.indexes:
            assert index.match(tokens, key) == expected
        assert self.radix.match_length(tokens, key) // self.block_size == len(expected)

    @rule(tokens=tokens, key=keys)
    def match_length(self, tokens, key) -> None:
        assert self.radix.match_length(tokens, key) == self.model.match_length(tokens, key)

    @rule(tokens=tokens, key=keys, computed_again=st.integers(0, 8))
    def insert(self, tokens, key, computed_again) -> None:
        """Of what is indexed already, the last `computed_again` blocks were computed into blocks of their own."""
        full = len(tokens) // self.block_size
        known = [self.model.block[p] for p in self.model.find(tokens, key)]
        known = known[: max(0, len(known) - computed_again)]
        blocks = known + self.fresh(full - len(known))
        tokens = tokens[: full * self.block_size]
        expected = self.model.insert(tokens, key, blocks)
        for index in self.indexes:
            assert index.insert(tokens, key, blocks) == expected
            assert index.match(tokens, key) == expected
        self.model.match(tokens, key)

    @precondition(lambda self: self.model.block)
    @rule(data=st.data(), tokens=tokens, key=keys)
    def a_block_of_another_prefix_is_refused(self, data, tokens, key) -> None:
        full = len(tokens) // self.block_size
        tokens = tokens[: full * self.block_size]
        stolen = data.draw(st.sampled_from(sorted(self.model.block.values())))
        own = {position: self.model.block[p] for position, p in enumerate(self.model.find(tokens, key))}
        wrong = [position for position in range(full) if own.get(position) != stolen]
        if wrong:
            blocks = self.fresh(full)
            blocks[data.draw(st.sampled_from(wrong))] = stolen
            for index in self.indexes:
                with pytest.raises(ValueError, match=f"got {stolen}, which is indexed under another prefix"):
                    index.insert(tokens, key, blocks)

    @rule(data=st.data(), n=st.integers(0, 8))
    def evict_with_single_blocks_in_use(self, data, n) -> None:
        blocks = sorted(self.model.block.values())
        in_use = data.draw(st.sets(st.sampled_from(blocks))) if blocks else set()
        self.evict(n, in_use)

    @rule(n=st.integers(0, 8), requests=st.lists(st.tuples(tokens, keys), max_size=4))
    def evict_with_whole_prefixes_in_use(self, n, requests) -> None:
        self.evict(n, {self.model.block[p] for tokens, key in requests for p in self.model.find(tokens, key)})

    def evict(self, n: int, in_use: set[int]) -> None:
        expected = self.model.evict(n, lambda block: block not in in_use)
        for index in self.indexes:
            assert index.evict(n, lambda block: block not in in_use) == expected

    @invariant()
    def no_block_is_lost_or_indexed_twice(self) -> None:
        blocks = sorted(self.model.block.values())
        assert sorted(check_chain(self.hash)) == sorted(check_tree(self.radix)) == blocks
        assert len(self.hash) == len(self.radix) == len(blocks) == len(set(blocks))

    def teardown(self) -> None:
        everything = self.model.evict(10**6, lambda block: True)
        for index in self.indexes:
            assert index.evict(10**6, lambda block: True) == everything
            assert len(index) == 0
        assert not self.radix.roots, "a key that has no blocks left takes no memory"


TestIndexes = Indexes.TestCase
TestIndexes.settings = settings(max_examples=examples(100), stateful_step_count=40)


@given(
    requests=st.lists(
        st.tuples(st.lists(st.integers(0, 2**63 - 1), max_size=6), st.binary(max_size=3)), min_size=1, max_size=8
    ),
    block_size=st.integers(1, 3),
)
def test_any_tokens_and_keys_match_as_far_as_they_are_equal(requests, block_size):
    model = NaiveIndex(block_size)
    indexes = HashIndex(block_size), RadixIndex(block_size)
    numbers = itertools.count()
    for tokens, key in requests:
        tokens = tokens[: len(tokens) // block_size * block_size]
        blocks = list(itertools.islice(numbers, len(tokens) // block_size))
        expected = model.insert(tokens, key, blocks)
        assert [index.insert(tokens, key, blocks) for index in indexes] == [expected, expected]
    for (tokens, _), (_, key) in itertools.product(requests, requests):
        expected = model.match(tokens, key)
        assert [index.match(tokens, key) for index in indexes] == [expected, expected]


@pytest.mark.parametrize(("make", "check"), [(HashIndex, check_chain), (RadixIndex, check_tree)])
def test_memory_is_bounded_by_what_is_indexed(make, check):
    """A long life of matches, growth and eviction leaves no records of what is gone, and none of old uses."""
    index, generator = make(1), random.Random(0)
    free = list(range(40))
    for _ in range(5000):
        tokens, key = [generator.randrange(2) for _ in range(8)], b"%d" % generator.randrange(1000)
        known = index.match(tokens, key)
        missing = len(tokens) - len(known)
        free += index.evict(missing - len(free), lambda block, known=known: block not in known)
        index.insert(tokens, key, known + [free.pop() for _ in range(missing)])
    assert len(index) + len(free) == 40
    assert len(check(index)) == len(index)
