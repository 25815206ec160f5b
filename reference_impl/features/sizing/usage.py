"""How the memory of the KV cache is used at this moment, slot by slot."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from reference_impl.interfaces import NO_BLOCK, BlockId, BlockPool, Request


@dataclass(frozen=True)
class MemoryUse:
    """Every block is free, cached or held; every slot of a held block is filled, ahead or tail.

    Shared blocks count once. A slot holds one token of one KV group, for all layers of that group.
    """

    block_size: int
    free_blocks: int
    cached_blocks: int  # full of keys and values that a later prompt may find, and not in use
    held_blocks: int  # in the block table of at least one request
    references: int  # entries of all block tables; more than held_blocks where blocks are shared
    filled_slots: int  # keys and values that were computed
    ahead_slots: int  # reserved for tokens that are known (the rest of a prompt) or, at the worst case, may come
    tail_slots: int  # the end of a last block: internal fragmentation, below block_size for each table

    @property
    def held_slots(self) -> int:
        return self.held_blocks * self.block_size

    @property
    def waste(self) -> float:
        """The share of the held slots that is empty now; 0 where nothing is held."""
        return 1 - self.filled_slots / self.held_slots if self.held_slots else 0.0


def memory_use(pool: BlockPool, num_blocks: int, block_size: int, requests: Iterable[Request]) -> MemoryUse:
    """The memory use, counted from the block tables of all unfinished requests. num_blocks: the pool's."""
    filled: dict[BlockId, int] = {}
    known: dict[BlockId, int] = {}  # slots for tokens that the request has, computed or not
    last: dict[BlockId, bool] = {}
    references = 0
    for request in requests:
        for table in request.block_tables:
            for index, block in enumerate(table):
                if block == NO_BLOCK:
                    continue
                references += 1
                first = index * block_size
                filled[block] = max(filled.get(block, 0), _within(request.num_computed_tokens - first, block_size))
                known[block] = max(known.get(block, 0), _within(request.num_tokens - first, block_size))
                last[block] = last.get(block, True) and index == len(table) - 1
    # Behind the known tokens: the tail if the block is the last of its table, otherwise reserved for what may come.
    behind = {block: block_size - max(known[block], filled[block]) for block in filled}
    tail = sum(slots for block, slots in behind.items() if last[block])
    held, computed = len(filled), sum(filled.values())
    return MemoryUse(
        block_size=block_size,
        free_blocks=pool.num_free,
        cached_blocks=num_blocks - pool.num_free - held,
        held_blocks=held,
        references=references,
        filled_slots=computed,
        ahead_slots=held * block_size - computed - tail,
        tail_slots=tail,
    )


def _within(tokens: int, block_size: int) -> int:
    return max(0, min(block_size, tokens))
