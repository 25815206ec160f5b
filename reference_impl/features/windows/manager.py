"""Block tables of layers with sliding windows: a group's table keeps only the blocks that its window still shows.

A block that lies before the window of every later query is freed while its request runs, and its place in the table is
NO_BLOCK from then on (as in vLLM's hybrid KV cache manager). When a request is admitted, a window's table has blocks
for the first chunk only: the others come and go.

Extends `KVManager.reserve`, and `lengths_of`, which `admit` asks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from reference_impl.core.kv_manager import KVManager, surely_computed
from reference_impl.interfaces import NO_BLOCK, BlockId, BlockPool, PrefixIndex, Request


class WindowedKVManager(KVManager):
    """A KV manager with sliding windows. windows: that of each KV group, or None. ValueError for a prefix index: blocks
    that a later prompt would need are given up."""

    def __init__(
        self, pool: BlockPool, block_size: int, *, windows: Sequence[int | None], index: PrefixIndex | None = None,
        **rest: Any,
    ):  # fmt: skip
        if index is not None:
            raise ValueError(
                f"prefix caching needs a model whose layers all see everything; this one has windows {list(windows)}"
            )
        super().__init__(pool, block_size, num_groups=len(windows), **rest)
        self.windows = tuple(windows)

    def reserve(self, request: Request, num_tokens: int) -> bool:
        """Makes room for the request's next num_tokens. Blocks before its windows are freed, even if that fails."""
        self.let_go(request, surely_computed(request))
        return super().reserve(request, num_tokens)

    def let_go(self, request: Request, num_computed: int) -> None:
        """Frees the blocks that no query at position num_computed or later sees."""
        for table, window in zip(request.block_tables, self.windows, strict=True):
            if window is not None:
                self._let_go(table, num_computed - window + 1)

    def _let_go(self, table: list[BlockId], first_seen: int) -> None:
        """Frees a table's blocks that lie wholly before position first_seen."""
        block = min(first_seen // self.block_size, len(table)) - 1
        while block >= 0 and table[block] != NO_BLOCK:
            self.references.release([table[block]])
            table[block] = NO_BLOCK
            block -= 1

    def lengths_of(self, num_tokens: int, first_end: int) -> list[int]:
        ends = (num_tokens if window is None else min(num_tokens, first_end) for window in self.windows)
        return [self.blocks_for(end) for end in ends]
