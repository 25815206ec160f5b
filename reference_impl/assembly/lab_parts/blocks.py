"""A KV manager from functions of block tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from reference_impl.interfaces import BlockId, BlockPair, BlockPool, Request, Transfers

Copy = Callable[[BlockId, BlockId], None]


class BlocksByTable:
    """A KVManager without prefix cache or host memory, for models whose layers all see the whole context.

    append(table, num_tokens, num_new, copy): the block table for num_new tokens more than the num_tokens that a
    request has in the blocks of `table`; copy(src, dst) has a block copied before they are written. fork(table,
    num_tokens): the block table of a request that shares the first num_tokens. Both call pool, and are called only
    where pool has enough free blocks.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        append: Callable[[list[BlockId], int, int, Copy], list[BlockId]],
        fork: Callable[[list[BlockId], int], list[BlockId]],
    ):
        self.pool, self.block_size = pool, block_size
        self._append, self._fork = append, fork
        self._copies: list[BlockPair] = []
        self.num_copies = self.num_forks = 0

    @property
    def num_available(self) -> int:
        return self.pool.num_free

    def admit(self, request: Request, num_tokens: int, budget: int) -> bool:
        request.num_computed_tokens = request.num_cached_tokens = 0
        return self.reserve(request, num_tokens)

    def reserve(self, request: Request, num_tokens: int) -> bool:
        table, start = list(request.block_table), request.num_computed_tokens
        first, end = start // self.block_size, -(-(start + num_tokens) // self.block_size)
        copies = first < len(table) and self.pool.ref_count(table[first]) > 1
        if max(0, end - len(table)) + copies > self.pool.num_free:
            return False
        request.block_tables = [self._append(table, start, num_tokens, self._copy)]
        return True

    def _copy(self, src: BlockId, dst: BlockId) -> None:
        self.num_copies += 1
        self._copies.append(BlockPair(src, dst))

    def fork(self, parent: Request, child: Request) -> None:
        child.block_tables = [self._fork(list(parent.block_table), child.num_computed_tokens)]
        self.num_forks += 1

    def free(self, request: Request) -> None:
        self.pool.decref(request.block_table)
        request.block_tables = [[]]

    def take_transfers(self) -> Transfers:
        copies, self._copies = self._copies, []
        return Transfers(copies=tuple(copies))

    def commit(self, request: Request) -> None:
        """Does nothing: there is no prefix cache."""

    def pin(self, tokens: Sequence[int], key: bytes) -> list[BlockId]:
        return []  # nothing is cached

    def unpin(self, blocks: Sequence[BlockId]) -> None:
        assert not blocks

    def swap_out(self, request: Request) -> bool:
        return False  # there is no host memory: the scheduler drops the blocks
