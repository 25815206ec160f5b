"""Turns tokens into blocks: each request's block table grows as its tokens are computed."""

from __future__ import annotations

from reference_impl.interfaces import BlockPool, Request


class KVManager:
    """One block table per request, over one pool."""

    def __init__(self, pool: BlockPool, block_size: int):
        self.pool, self.block_size = pool, block_size

    @property
    def num_available(self) -> int:
        return self.pool.num_free

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)  # ceiling

    def reserve(self, request: Request, num_tokens: int) -> bool:
        """Blocks for the request's next num_tokens, or False and nothing changed."""
        missing = self.blocks_for(request.num_computed_tokens + num_tokens) - len(request.block_table)
        if missing > self.pool.num_free:
            return False
        if missing > 0:
            request.block_table += self.pool.allocate(missing)
        return True

    def free(self, request: Request) -> None:
        self.pool.decref(request.block_table)
        request.block_table.clear()
