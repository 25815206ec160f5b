"""The engine's KV manager: the core's, or one with windows, host memory, or a page store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from reference_impl.core.kv_manager import KVManager
from reference_impl.interfaces import BlockPool, PrefixIndex

if TYPE_CHECKING:
    from reference_impl.features.transfer.stored import FetchingKVManager
    from reference_impl.interfaces.pages import LayeredPageStore, PageStore


def kv_manager(
    pool: BlockPool,
    block_size: int,
    windows: Sequence[int | None] = (None,),
    index: PrefixIndex | None = None,
    host_pool: BlockPool | None = None,
) -> KVManager:
    """The KV manager for these options, with block tables over one pool.

    windows: the sliding window of each KV group, or None. index: finds computed prefixes; only for models whose layers
    all see everything. host_pool: blocks of host memory for requests that are swapped out.
    """
    if tuple(windows) == (None,):
        if host_pool is None:
            return KVManager(pool, block_size, index=index)
        from reference_impl.features.swap.manager import SwappingKVManager

        return SwappingKVManager(pool, block_size, index=index, host_pool=host_pool)
    if host_pool is None:
        from reference_impl.features.windows.manager import WindowedKVManager

        return WindowedKVManager(pool, block_size, windows=windows, index=index)
    from reference_impl.assembly.kv_combined import WindowedSwappingKVManager

    return WindowedSwappingKVManager(pool, block_size, windows=windows, index=index, host_pool=host_pool)


def stored_kv_manager(
    pool: BlockPool,
    block_size: int,
    index: PrefixIndex,
    store: PageStore | LayeredPageStore,
    root: bytes,
    host_pool: BlockPool | None = None,
) -> FetchingKVManager:
    """A KV manager with block tables over one pool, and a page store behind its prefix cache. See `FetchingKVManager`;
    host_pool: blocks of host memory for requests that are swapped out."""
    options: dict[str, Any] = {"index": index, "store": store, "root": root}
    if host_pool is None:
        from reference_impl.features.transfer.stored import FetchingKVManager

        return FetchingKVManager(pool, block_size, **options)
    from reference_impl.assembly.kv_combined import FetchingSwappingKVManager

    return FetchingSwappingKVManager(pool, block_size, **options, host_pool=host_pool)
