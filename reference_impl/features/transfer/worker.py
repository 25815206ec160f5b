"""A worker's feature that loads and saves pages of a store, between two steps."""

from __future__ import annotations

from dataclasses import replace

from reference_impl.core.worker_feature import WorkerFeature
from reference_impl.features.transfer.pages import LONGEST_WAIT, Pages
from reference_impl.interfaces import KVCache, Reply, Step
from reference_impl.interfaces.pages import LayeredPageStore, PageStore


class PageMoves(WorkerFeature):
    """Moves pages for a step's transfers. store: for their loads and saves."""

    def __init__(self, store: PageStore | LayeredPageStore, kv_cache: KVCache):
        self.pages = Pages(store, kv_cache)

    def move_pages(self, step: Step) -> None:
        self.pages.begin(step.transfers)
        self.pages.take_in(0.0 if step.rows else LONGEST_WAIT)

    def collected(self, reply: Reply) -> Reply:
        ended, moved = self.pages.take_ended(), self.pages.take_moved()
        return replace(reply, transfers=ended, layers_moved=moved) if ended or moved else reply
