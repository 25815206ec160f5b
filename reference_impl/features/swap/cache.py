"""Host memory for the blocks of requests that are swapped out: `PagedKVCache.host`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from reference_impl.core.kv_cache import block_ids
from reference_impl.interfaces import BlockPair

TRANSFERRED = 32 << 20  # bytes that are gathered on the device at a time, on their way to the host or back


class HostBlocks:
    """The host's copies of a cache's blocks. blocks: see `PagedKVCache.blocks`. host: for each of them a tensor in host
    memory, [num_host_blocks, layers of a group, 2, ...], so that each block is one copy."""

    def __init__(self, blocks: Sequence[Tensor], num_host_blocks: int):
        self.blocks = blocks
        pinned = blocks[0].device.type == "cuda"
        self.host = [
            torch.zeros((num_host_blocks, *each.shape[1:]), dtype=each.dtype, pin_memory=pinned) for each in blocks
        ]

    def swap_out(self, pairs: Sequence[BlockPair]) -> None:
        for blocks, host in zip(self.blocks, self.host, strict=True):
            for piece in _pieces(pairs, host[:1].nbytes):
                found = blocks.index_select(0, block_ids((pair.src for pair in piece), blocks.device))
                for pair, block in zip(piece, found, strict=True):
                    host[pair.dst].copy_(block, non_blocking=True)

    def swap_in(self, pairs: Sequence[BlockPair]) -> None:
        for blocks, host in zip(self.blocks, self.host, strict=True):
            for piece in _pieces(pairs, host[:1].nbytes):
                found = torch.empty((len(piece), *host.shape[1:]), dtype=host.dtype, device=blocks.device)
                for pair, block in zip(piece, found, strict=True):
                    block.copy_(host[pair.src], non_blocking=True)
                blocks.index_copy_(0, block_ids((pair.dst for pair in piece), blocks.device), found)


def _pieces(pairs: Sequence[BlockPair], block_bytes: int) -> Iterator[Sequence[BlockPair]]:
    size = max(1, TRANSFERRED // block_bytes)
    return (pairs[start : start + size] for start in range(0, len(pairs), size))
