"""Numbered blocks with reference counts (the allocator of PagedAttention, Kwon et al. 2023)."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence

from reference_impl.interfaces import BlockId


class OutOfBlocks(RuntimeError):
    """More blocks were asked for than are free."""


class BlockPool:
    """Hands out blocks 0 ... num_blocks - 1; a block returns when its last reference goes.

    First in, first out: the blocks freed last are allocated last, so that tests have time to see a use after free.
    """

    def __init__(self, num_blocks: int):
        if num_blocks < 1:
            raise ValueError(f"num_blocks: expected at least 1, got {num_blocks}")
        self.num_blocks = self.num_free = num_blocks
        self._free = deque(range(num_blocks))
        self._refs = [0] * num_blocks

    def ref_count(self, block: BlockId) -> int:
        self._check("ref_count", (block,))
        return self._refs[block]

    def allocate(self, n: int) -> list[BlockId]:
        """Takes n free blocks, each with one reference. OutOfBlocks, and nothing taken, if there are fewer."""
        if n > self.num_free:
            raise OutOfBlocks(f"asked for {n} blocks, {self.num_free} of {self.num_blocks} are free")
        self.num_free -= n
        blocks = [self._free.popleft() for _ in range(n)]
        for block in blocks:
            self._refs[block] = 1
        return blocks

    def incref(self, ids: Sequence[BlockId]) -> None:
        """Adds one reference to each. ValueError, and nothing changed, for a free block or one that does not exist."""
        self._check("incref", ids)
        for block in ids:
            if self._refs[block] < 1:
                raise ValueError(f"incref: block {block} is free, so it cannot be shared")
        for block in ids:
            self._refs[block] += 1

    def decref(self, ids: Sequence[BlockId]) -> list[BlockId]:
        """Drops one reference each; returns the blocks that became free.

        ValueError, and nothing changed, for a block with fewer references, or one that does not exist.
        """
        self._check("decref", ids)
        for block, count in Counter(ids).items():
            if self._refs[block] < count:
                raise ValueError(f"decref: block {block} is free already (freed twice?)")
        freed = []
        for block in ids:
            self._refs[block] -= 1
            if self._refs[block] == 0:
                self._free.append(block)
                freed.append(block)
        self.num_free += len(freed)
        return freed

    def _check(self, what: str, ids: Iterable[BlockId]) -> None:
        """Raises ValueError for a block that does not exist. Without it, -1 would be the last block to Python."""
        for block in ids:
            if not 0 <= block < self.num_blocks:
                raise ValueError(f"{what}: expected blocks 0 to {self.num_blocks - 1}, got {block}")
