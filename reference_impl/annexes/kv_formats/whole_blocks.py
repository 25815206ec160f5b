"""A request begins at the start of a block: for a cache whose open blocks are its own (`open_blocks.py`).

A fork shares the full blocks alone, and a request that was swapped out goes on behind its full blocks. What the open
block held is computed again, at most block_size - 1 tokens: so what is kept in a request's slot is never shared, copied
or moved, and a shared block is never written. After a step that failed each request begins again where its open block
does.

`WholeBlocks` extends `KVManager.fork`, `WholeBlocksOnHost` `SwappingKVManager.swap_out` and `admit`, and
`WholeBlockPlanner` `ForkingPlanner.opened` and `close_all`.
"""

from __future__ import annotations

from reference_impl.annexes.beams.planning import ForkingPlanner
from reference_impl.annexes.swap.manager import SwappingKVManager
from reference_impl.core.kv_manager import KVManager
from reference_impl.core.planner import Sent
from reference_impl.interfaces import Opened, Request


class WholeBlocks(KVManager):
    def fork(self, parent: Request, child: Request) -> None:
        child.num_computed_tokens -= child.num_computed_tokens % self.block_size
        super().fork(parent, child)


class WholeBlocksOnHost(WholeBlocks, SwappingKVManager):
    def swap_out(self, request: Request) -> bool:
        """Not a request whose hidden states are summed: a token that is computed again would count twice."""
        return request.pooling != "mean" and super().swap_out(request)

    def admit(self, request: Request, num_tokens: int, budget: int) -> bool:
        if request.id in self.on_host:
            request.num_computed_tokens -= request.num_computed_tokens % self.block_size
        return super().admit(request, num_tokens, budget)


class WholeBlockPlanner(ForkingPlanner):
    def opened(self, sent: Sent) -> Opened:
        """RuntimeError for a request that begins within a block: what lies before it there is nowhere."""
        if sent.num_computed % self.block_size:
            raise RuntimeError(
                f"request {sent.request.id!r} begins at position {sent.num_computed}: expected a multiple of "
                f"block_size {self.block_size}, since kv_dtype 'kivi' keeps an open block in the request's slot alone"
            )
        return super().opened(sent)

    def close_all(self) -> None:
        for sent in self.sent.values():
            request = sent.request
            whole = 0 if request.pooling == "mean" else request.num_computed_tokens // self.block_size * self.block_size
            request.num_computed_tokens = min(request.num_computed_tokens, whole)
        super().close_all()
