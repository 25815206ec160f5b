"""Preemption by swapping: a preempted request's blocks move to host memory, and back when it is admitted again (as in
vLLM's first versions, Kwon et al. 2023), so that nothing is computed twice.

Extends `KVManager.admit`, which finds a request's blocks on the host, `free` and `take_transfers`; adds `swap_out`, see
`SwapsOut`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from reference_impl.core.kv_manager import KVManager, extend
from reference_impl.core.references import BlockReferences
from reference_impl.interfaces import NO_BLOCK, BlockId, BlockPair, BlockPool, Request, Transfers

Tables = list[list[BlockId]]  # one per KV group


class SwappingKVManager(KVManager):
    """A KV manager that swaps. host_pool: blocks of host memory for requests that are swapped out."""

    def __init__(self, pool: BlockPool, block_size: int, *, host_pool: BlockPool, **rest: Any):
        super().__init__(pool, block_size, **rest)
        self.host = BlockReferences(host_pool)
        self.on_host: dict[str, Tables] = {}  # of swapped-out requests: host blocks
        self._returning: dict[str, Tables] = {}  # the same, of those that this step's transfers bring back
        self._swap_out: list[BlockPair] = []
        self._swap_in: list[BlockPair] = []

    def swap_out(self, request: Request) -> bool:
        """Moves the request's blocks with computed tokens to the host; reserved ones are only freed. False, and nothing
        changed, if they do not fit there.

        If it had nothing to compute, its last token is computed again when it is back, as `admit` promises.
        """
        if request.id in self._returning:
            self._stay_on_host(request)
            return True
        computed = min(request.num_computed_tokens, request.num_tokens - 1)
        tables = self.to_save(request, computed)
        wanted = _num_blocks(tables)
        host = self.host.take(wanted) if wanted else None
        if host is None:
            return False
        there = _as_many(tables, host)
        self._swap_out += _pairs(tables, there)
        self.free(request)
        request.num_computed_tokens = computed
        self.on_host[request.id] = there
        return True

    def to_save(self, request: Request, num_computed: int) -> Tables:
        """The request's blocks with computed tokens, by KV group."""
        used = self.blocks_for(num_computed)
        return [table[:used] for table in request.block_tables]

    def admit(self, request: Request, num_tokens: int, budget: int) -> bool:
        if request.id in self.on_host:
            return self._bring_back(request, num_tokens, budget)
        return super().admit(request, num_tokens, budget)

    def _bring_back(self, request: Request, num_tokens: int, budget: int) -> bool:
        there = self.on_host[request.id]
        lengths = self.lengths_of(num_tokens, request.num_computed_tokens + budget)
        # Of a request whose drafts turned out to be wrong, more blocks may have been saved than it has tokens for.
        missing = [max(0, length - len(table)) for table, length in zip(there, lengths, strict=True)]
        blocks = self.references.take(_num_blocks(there) + sum(missing))
        if blocks is None:
            return False
        tables = _as_many(there, blocks)
        self._swap_in += _pairs(there, tables)
        extend(tables, missing, iter(blocks))
        request.block_tables, request.num_cached_tokens = tables, 0
        self._returning[request.id] = self.on_host.pop(request.id)
        return True

    def _stay_on_host(self, request: Request) -> None:
        """Undoes `_bring_back` in the same step: nothing was moved yet, so its blocks on the device are empty."""
        given = {block for table in request.block_tables for block in table}
        self._swap_in = [pair for pair in self._swap_in if pair.dst not in given]
        for table in request.block_tables:
            self.references.release(table)
        request.block_tables = [[] for _ in request.block_tables]
        self.on_host[request.id] = self._returning.pop(request.id)

    def free(self, request: Request) -> None:
        if request.id in self._returning:
            self._stay_on_host(request)
        super().free(request)
        for table in self.on_host.pop(request.id, ()):
            self.host.release(table)

    def step_submitted(self, step_id: int) -> None:
        """Called when a step was submitted. Host blocks that it reads are not reused before it is collected, either."""
        super().step_submitted(step_id)
        self.host.step_submitted(step_id)

    def step_collected(self, step_id: int) -> None:
        super().step_collected(step_id)
        self.host.step_collected(step_id)

    def take_transfers(self) -> Transfers:
        transfers = super().take_transfers()
        if not self._swap_out and not self._swap_in:
            return transfers
        transfers = replace(transfers, swap_out=tuple(self._swap_out), swap_in=tuple(self._swap_in))
        self._swap_out, self._swap_in = [], []
        # Only now: what this step swaps out goes to the host first, and must not fall on what it has yet to bring back.
        for tables in self._returning.values():
            for table in tables:
                self.host.release(table)
        self._returning = {}
        return transfers


def _num_blocks(tables: Tables) -> int:
    return sum(block != NO_BLOCK for table in tables for block in table)


def _as_many(tables: Tables, blocks: list[BlockId]) -> Tables:
    """Tables of the same shape, with blocks that are taken off the end of the list."""
    return [[NO_BLOCK if block == NO_BLOCK else blocks.pop() for block in table] for table in tables]


def _pairs(sources: Sequence[list[BlockId]], targets: Sequence[list[BlockId]]) -> list[BlockPair]:
    return [
        BlockPair(src, dst)
        for from_, to in zip(sources, targets, strict=True)
        for src, dst in zip(from_, to, strict=True)
        if src != NO_BLOCK
    ]
