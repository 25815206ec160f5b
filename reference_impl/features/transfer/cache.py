"""Blocks of a `PagedKVCache` as bytes, layer by layer, for a store beyond the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from reference_impl.core.kv_cache import PagedKVCache, block_ids
from reference_impl.interfaces import BlockId


class CachePages:
    """A `PagedKVCache` as a cache that `HoldsPages`."""

    def __init__(self, cache: PagedKVCache):
        self.cache, self.num_layers = cache, cache.specs[0].num_layers

    def read_pages(self, blocks: Sequence[BlockId], layer: int) -> list[bytes]:
        """The bytes of each block's part of a layer. Waits for the device."""
        ids, place = block_ids(blocks, self.cache.data.device), self.cache.place[layer]
        found = (of_blocks[:, place].index_select(0, ids).cpu() for of_blocks in self.cache.blocks)
        parts = [part.contiguous().view(torch.uint8) for part in found]
        return [b"".join(part[i].numpy().tobytes() for part in parts) for i in range(len(blocks))]

    def write_page(self, block: BlockId, layer: int, content: memoryview) -> None:
        """Writes a block's part of a layer. ValueError if the content has another length."""
        parts = [of_blocks[block, self.cache.place[layer]] for of_blocks in self.cache.blocks]
        if len(content) != (expected := sum(part.nbytes for part in parts)):
            raise ValueError(
                f"expected {expected} bytes for layer {layer} of a page, got {len(content)}: it is of another model or "
                "cache"
            )
        start = 0
        for part in parts:
            found = torch.frombuffer(bytearray(content[start : start + part.nbytes]), dtype=part.dtype)
            part.copy_(found.view(part.shape))
            start += part.nbytes
