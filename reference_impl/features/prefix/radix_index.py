"""Prefix cache as a radix tree (RadixAttention in SGLang, Zheng et al. 2024).

    key a: [system prompt: 3 blocks] -+- [question 1: 2 blocks]
                                      +- [question 2: 1 block] --- [answer: 4 blocks]
    key b: [other prompt: 5 blocks]

An edge is a run of tokens, cut to whole blocks, that leads to a node with the blocks holding their keys and values.
Prefixes are compared token by token: a hash only finds a child, it never decides a match.
A node is split where a prefix leaves it or ends in it, so that all its blocks were last used at the same moment.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from reference_impl.features.prefix.hash_index import check_insert
from reference_impl.interfaces import BlockId

BlockTokens = tuple[int, ...]  # [block_size]
Level = dict[tuple[bytes, BlockTokens], "Node"]  # nodes beside each other, by key and the tokens of their first block


@dataclass(eq=False, slots=True)
class Node:
    """A node of the tree: blocks[i] holds the keys and values of the tokens segment[i]."""

    key: bytes
    segment: list[BlockTokens]
    blocks: list[BlockId]
    children: Level = field(default_factory=dict)
    level: Level = field(default_factory=dict)  # where it hangs: its parent's children, or the roots

    def hang(self, level: Level) -> Node:
        self.level = level
        level[self.key, self.segment[0]] = self
        return self


class RadixIndex:
    """A `PrefixIndex` by a radix tree. match and insert cost O(tokens); a split moves the segment's part above it."""

    def __init__(self, block_size: int):
        if block_size < 1:
            raise ValueError(f"block_size: expected at least 1, got {block_size}")
        self.block_size = block_size
        self.roots: Level = {}
        self._indexed: set[BlockId] = set()
        self._order: OrderedDict[Node, None] = OrderedDict()  # all nodes, the least recently used first; see _use

    def __len__(self) -> int:
        return len(self._indexed)

    def nodes(self) -> list[Node]:
        """All nodes, read-only; the least recently used first, a child before its parent."""
        return list(self._order)

    def match(self, tokens: Sequence[int], key: bytes) -> list[BlockId]:
        """The blocks of the longest indexed prefix of `tokens`; they count as used now."""
        path, blocks, rest = self._find(self._full_blocks(tokens), key)
        self._split(path, rest)
        self._use(path)
        return blocks

    def match_length(self, tokens: Sequence[int], key: bytes) -> int:
        """How many tokens match, with those inside a block that does not match whole. Does not count as a use."""
        path, blocks, rest = self._find(self._full_blocks(tokens), key)
        level = path[-1].children if path else self.roots
        ahead = [path[-1].segment[-rest]] if rest else [first for owner, first in level if owner == key]
        start = len(blocks) * self.block_size
        inside = tokens[start : start + self.block_size]
        return start + max((common_length(inside, block_tokens) for block_tokens in ahead), default=0)

    def insert(self, tokens: Sequence[int], key: bytes, blocks: Sequence[BlockId]) -> list[BlockId]:
        """Indexes `blocks` as holding `tokens`; returns the blocks that stand for them from now on.

        ValueError, and nothing changed, if the lengths do not fit or a block already holds another prefix.
        """
        wanted = self._full_blocks(tokens)
        path, known, rest = self._find(wanted, key)
        check_insert(tokens, blocks, self.block_size, known, self._indexed)
        self._split(path, rest)
        segment, added = wanted[len(known) :], list(blocks)[len(known) :]
        if path and not path[-1].children:  # a leaf grows
            path[-1].segment += segment
            path[-1].blocks += added
        elif added:
            path.append(Node(key, segment, added).hang(path[-1].children if path else self.roots))
        self._indexed.update(added)
        self._use(path)
        return known + added

    def evict(self, num_blocks: int, evictable: Callable[[BlockId], bool]) -> list[BlockId]:
        """Forgets up to num_blocks leaves, the least recently used first; returns their blocks.

        A leaf node is cut from its end, block by block. Children stand before their parent in the order of use, so
        one walk from its front meets each node when everything below it is evicted or must stay: O(blocks evicted +
        older nodes that must stay), and those are the ones in use and the ones above them.
        """
        evicted: list[BlockId] = []
        emptied = []
        for node in self._order:
            if len(evicted) >= num_blocks:
                break
            if node.children:
                continue
            first = node.segment[0]
            while node.blocks and len(evicted) < num_blocks and evictable(node.blocks[-1]):
                evicted.append(node.blocks.pop())
                node.segment.pop()
            if not node.blocks:
                del node.level[node.key, first]
                emptied.append(node)
        for node in emptied:
            del self._order[node]
        self._indexed.difference_update(evicted)
        return evicted

    def _full_blocks(self, tokens: Sequence[int]) -> list[BlockTokens]:
        size, tokens = self.block_size, tuple(tokens)
        return [tokens[end - size : end] for end in range(size, len(tokens) + 1, size)]

    def _find(self, wanted: list[BlockTokens], key: bytes) -> tuple[list[Node], list[BlockId], int]:
        """The nodes that `wanted` leads through, the blocks that match, and how many of the last node's do not."""
        path: list[Node] = []
        blocks: list[BlockId] = []
        level, rest = self.roots, 0
        while not rest and len(blocks) < len(wanted) and (node := level.get((key, wanted[len(blocks)]))):
            common = common_length(wanted[len(blocks) : len(blocks) + len(node.blocks)], node.segment)
            path.append(node)
            blocks += node.blocks[:common]
            level, rest = node.children, len(node.blocks) - common
        return path, blocks, rest

    def _split(self, path: list[Node], rest: int) -> None:
        """Makes the path end with a whole node. The `rest` below keeps its place in the order: it was not used now."""
        if rest:
            below = path[-1]
            path[-1] = Node(below.key, below.segment[:-rest], below.blocks[:-rest]).hang(below.level)
            del below.segment[:-rest], below.blocks[:-rest]
            below.hang(path[-1].children)

    def _use(self, path: list[Node]) -> None:
        """Moves the path to the end of the order, its deepest node first: a child is evicted before its parent."""
        for node in reversed(path):
            self._order[node] = None
            self._order.move_to_end(node)


def common_length(a: Sequence, b: Sequence) -> int:
    """How many elements a and b have in common before the first difference."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
