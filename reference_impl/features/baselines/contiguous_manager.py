"""The engine over contiguous memory.

Any scheduler runs over it: paging is not what makes continuous batching possible, it makes more requests fit.
"""

from __future__ import annotations

from reference_impl.features.baselines.contiguous_allocator import ContiguousAllocator, Fit
from reference_impl.interfaces import Request, Transfers


class ContiguousKVManager:
    """The engine's KV manager over contiguous runs: whole blocks, one after the other, for the longest output.

    Nothing is shared, cached or swapped, and since all memory is reserved at the start, no request is preempted.
    """

    def __init__(self, num_blocks: int, block_size: int, fit: Fit = "first"):
        self.block_size = block_size
        self.allocator = ContiguousAllocator(num_blocks * block_size, fit)

    def admit(self, request: Request, num_tokens: int, budget: int) -> bool:
        longest = max(request.num_tokens, request.max_total_tokens - 1)  # the last token is never read
        blocks = -(-longest // self.block_size)
        start = self.allocator.allocate(request.id, blocks * self.block_size)
        if start is None:
            return False
        first = start // self.block_size
        request.block_tables = [list(range(first, first + blocks))]
        request.num_computed_tokens = request.num_cached_tokens = 0
        return True

    def reserve(self, request: Request, num_tokens: int) -> bool:
        """Counts the tokens that the step will write as used; there is always room for them."""
        self.allocator.write(request.id, request.num_computed_tokens + num_tokens)
        return True

    def commit(self, request: Request) -> None:
        pass

    def fork(self, parent: Request, child: Request) -> None:
        raise ValueError(f"request {child.id!r}: a contiguous run cannot be shared; use one request per sample")

    def free(self, request: Request) -> None:
        if request.id in self.allocator.runs:
            self.allocator.free(request.id)
        request.block_tables = [[]]

    def swap_out(self, request: Request) -> bool:
        return False

    def take_transfers(self) -> Transfers:
        return Transfers()

    @property
    def num_available(self) -> int:
        """The number of free blocks, whether a request can have them or not."""
        return sum(length for _, length in self.allocator.holes) // self.block_size
