"""KV managers of two features together."""

from __future__ import annotations

from reference_impl.core.kv_manager import surely_computed
from reference_impl.features.swap.manager import SwappingKVManager, Tables
from reference_impl.features.transfer.stored import FetchingKVManager
from reference_impl.features.windows.manager import WindowedKVManager
from reference_impl.interfaces import Request


class WindowedSwappingKVManager(WindowedKVManager, SwappingKVManager):
    def to_save(self, request: Request, num_computed: int) -> Tables:
        """The tables to save, after the blocks that no window shows any more are freed: they are not saved."""
        self.let_go(request, min(num_computed, surely_computed(request)))
        return super().to_save(request, num_computed)


class FetchingSwappingKVManager(FetchingKVManager, SwappingKVManager):
    pass
