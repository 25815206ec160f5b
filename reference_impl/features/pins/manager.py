"""Cached prefixes that stay: a pinned prefix is held like a request holds its blocks, so it is not evicted.

Adds `pin` and `unpin` to `KVManager`, see `PinsPrefixes`.
"""

from __future__ import annotations

from collections.abc import Sequence

from reference_impl.core.kv_manager import KVManager
from reference_impl.interfaces import BlockId


class PinningKVManager(KVManager):
    def pin(self, tokens: Sequence[int], key: bytes) -> list[BlockId]:
        """Hold the cached blocks of this prefix, so that they are not evicted until `unpin`; returns them."""
        blocks = [] if self.index is None else list(self.index.match(tokens, key))
        self.references.hold(blocks)
        return blocks

    def unpin(self, blocks: Sequence[BlockId]) -> None:
        self.references.release(blocks)
