"""Prefix cache by a chain of hashes over full blocks (automatic prefix caching in vLLM).

    digest[-1] = SHA-256(0, key)                               whose prefix it is
    digest[i]  = SHA-256(1, digest[i - 1], tokens of block i)

A digest stands for everything up to its block, so one flat dict from digests to blocks is a whole tree of prefixes.
A hit is not compared with the tokens: it is only as reliable as the hash. Hence a cryptographic one, 8 bytes for each
token, and a first byte that separates keys from blocks, so no two prefixes are hashed from the same bytes.
"""

from __future__ import annotations

import hashlib
import heapq
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from reference_impl.interfaces import BlockId


@dataclass(eq=False, slots=True)
class Link:
    """One indexed block."""

    digest: bytes
    block: BlockId
    parent: Link | None
    used: int  # the clock when it was last matched or inserted
    num_children: int = 0
    queued: bool = False  # has an entry in the heap of leaves, at most one


class HashIndex:
    """A `PrefixIndex` by hashes. match and insert cost O(tokens): one hash for each block, O(1) besides."""

    def __init__(self, block_size: int):
        if block_size < 1:
            raise ValueError(f"block_size: expected at least 1, got {block_size}")
        self.block_size = block_size
        self._pack = struct.Struct(f"<{block_size}q").pack
        self._links: dict[bytes, Link] = {}
        self._indexed: set[BlockId] = set()
        self._clock = 0  # each match and each insert is one tick
        self._leaves: list[tuple[int, Link]] = []  # heap; see evict

    def __len__(self) -> int:
        return len(self._links)

    def links(self) -> list[Link]:
        """All links, read-only; each comes after its parent."""
        return list(self._links.values())

    def match(self, tokens: Sequence[int], key: bytes) -> list[BlockId]:
        """The blocks of the longest indexed prefix of `tokens`; they count as used now."""
        path = self._find(self.digests(tokens, key))
        self._use(path)
        return [link.block for link in path]

    def insert(self, tokens: Sequence[int], key: bytes, blocks: Sequence[BlockId]) -> list[BlockId]:
        """Indexes `blocks` as holding `tokens`; returns the blocks that stand for them from now on.

        ValueError, and nothing changed, if the lengths do not fit or a block already holds another prefix.
        """
        digests = list(self.digests(tokens, key))
        path = self._find(digests)
        check_insert(tokens, blocks, self.block_size, [link.block for link in path], self._indexed)
        parent = path[-1] if path else None
        for digest, block in list(zip(digests, blocks, strict=True))[len(path) :]:
            link = Link(digest, block, parent, self._clock)
            if parent:
                parent.num_children += 1
            self._links[link.digest] = parent = link
            self._indexed.add(link.block)
            path.append(link)
        self._use(path)
        if path:
            self._queue_if_leaf(path[-1])
        return [link.block for link in path]

    def evict(self, num_blocks: int, evictable: Callable[[BlockId], bool]) -> list[BlockId]:
        """Forgets up to num_blocks leaves, the least recently used first; returns their blocks.

        One tick uses one path, and a path ends in one leaf, so no two leaves were last used at the same tick. Of the
        blocks used at one tick the deepest goes first, since the others are no leaves while it is there.
        A heap entry may be stale: its link was used, and perhaps continued, since. It is corrected when it is
        popped, so that a match never touches the heap, and the heap is never longer than the index.
        Cost: O(log leaves) for each block evicted, each stale entry (once), and each older leaf that is not evictable.
        """
        evicted: list[BlockId] = []
        kept = []
        while self._leaves and len(evicted) < num_blocks:
            used, link = entry = heapq.heappop(self._leaves)
            if link.used != used:
                link.queued = False
                self._queue_if_leaf(link)
            elif not evictable(link.block):
                kept.append(entry)
            else:
                del self._links[link.digest]
                self._indexed.remove(link.block)
                evicted.append(link.block)
                if link.parent:
                    link.parent.num_children -= 1
                    self._queue_if_leaf(link.parent)
        for entry in kept:
            heapq.heappush(self._leaves, entry)
        return evicted

    def digests(self, tokens: Sequence[int], key: bytes) -> Iterator[bytes]:
        """Yields the digest of each full block."""
        digest = hashlib.sha256(b"\0" + key).digest()
        for end in range(self.block_size, len(tokens) + 1, self.block_size):
            packed = self._pack(*tokens[end - self.block_size : end])
            digest = hashlib.sha256(b"\1" + digest + packed).digest()
            yield digest

    def _find(self, digests: Iterable[bytes]) -> list[Link]:
        path = []
        for digest in digests:
            link = self._links.get(digest)
            if link is None:  # nor is anything behind it: a block is never indexed without the ones before it
                break
            path.append(link)
        return path

    def _use(self, path: list[Link]) -> None:
        self._clock += 1
        for link in path:
            link.used = self._clock

    def _queue_if_leaf(self, link: Link) -> None:
        if not link.num_children and not link.queued:
            link.queued = True
            heapq.heappush(self._leaves, (link.used, link))


def check_insert(
    tokens: Sequence[int], blocks: Sequence[BlockId], block_size: int, known: list[BlockId], indexed: set[BlockId]
) -> None:
    """Raises ValueError unless `blocks` can hold `tokens`, whose first blocks are `known`; `indexed`: those in the
    index."""
    if len(tokens) != len(blocks) * block_size:
        expected = f"{len(blocks)} blocks x {block_size} = {len(blocks) * block_size} tokens"
        raise ValueError(f"insert: expected {expected}, got {len(tokens)} tokens; index full blocks only")
    seen: set[BlockId] = set()
    for position, block in enumerate(blocks):
        if position < len(known) and block == known[position]:
            continue
        if block in indexed or block in seen:
            where = "is indexed under another prefix" if block in indexed else "is given twice"
            raise ValueError(f"insert: expected a block of its own at position {position}, got {block}, which {where}")
        seen.add(block)
