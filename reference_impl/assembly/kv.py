"""The engine's KV manager: the core's, with the features that its model and options need.

A feature that a model or an option does not need is left out, so that a step does not pass through it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from reference_impl.core.kv_manager import surely_computed
from reference_impl.features.overlap.references import DeferredReferences, OverlappedKVManager
from reference_impl.features.pins.manager import PinningKVManager
from reference_impl.features.swap.manager import SwappingKVManager, Tables
from reference_impl.features.transfer.stored import FetchingKVManager
from reference_impl.features.windows.manager import WindowedKVManager
from reference_impl.interfaces import BlockPool, LayeredPageStore, PageStore, PrefixIndex, Request


class FullKVManager(PinningKVManager, OverlappedKVManager):
    """For models whose layers all see everything, without host memory."""


class WithHostMemory(SwappingKVManager, FullKVManager):
    """Host blocks that a running step reads are not reused before it is collected, either."""

    def __init__(self, pool: BlockPool, block_size: int, *, host_pool: BlockPool, **rest: Any):
        super().__init__(pool, block_size, host_pool=host_pool, **rest)
        self.host: DeferredReferences = DeferredReferences(host_pool)

    def step_submitted(self, step_id: int) -> None:
        super().step_submitted(step_id)
        self.host.step_submitted(step_id)

    def step_collected(self, step_id: int) -> None:
        super().step_collected(step_id)
        self.host.step_collected(step_id)


class WithWindows(WindowedKVManager, FullKVManager):
    pass


class WithWindowsAndHostMemory(WindowedKVManager, WithHostMemory):
    def _to_save(self, request: Request, num_computed: int) -> Tables:
        """What no window shows any more is freed, and not saved."""
        self.let_go(request, min(num_computed, surely_computed(request)))
        return super()._to_save(request, num_computed)


class StoredKVManager(FetchingKVManager, FullKVManager):
    """Blocks of cancelled transfers are among those to wait for."""

    @property
    def num_releasing(self) -> int:
        return super().num_releasing + self.num_coming


class StoredWithHostMemory(StoredKVManager, WithHostMemory):
    pass


def kv_manager(
    pool: BlockPool,
    block_size: int,
    windows: Sequence[int | None] = (None,),
    index: PrefixIndex | None = None,
    host_pool: BlockPool | None = None,
) -> FullKVManager:
    """Block tables over one pool.

    windows: per KV group its sliding window, or None. index: where computed prefixes can be found again; only for
    models whose layers all see everything. host_pool: blocks of host memory for requests that are swapped out.
    """
    if tuple(windows) == (None,):
        if host_pool is None:
            return FullKVManager(pool, block_size, index=index)
        return WithHostMemory(pool, block_size, index=index, host_pool=host_pool)
    if host_pool is None:
        return WithWindows(pool, block_size, windows=windows, index=index)
    return WithWindowsAndHostMemory(pool, block_size, windows=windows, index=index, host_pool=host_pool)


def stored_kv_manager(
    pool: BlockPool,
    block_size: int,
    index: PrefixIndex,
    store: PageStore | LayeredPageStore,
    root: bytes,
    host_pool: BlockPool | None = None,
) -> StoredKVManager:
    """Block tables over one pool, with a page store behind their prefix cache; see `FetchingKVManager`."""
    options: dict[str, Any] = {"index": index, "store": store, "root": root}
    if host_pool is None:
        return StoredKVManager(pool, block_size, **options)
    return StoredWithHostMemory(pool, block_size, **options, host_pool=host_pool)
