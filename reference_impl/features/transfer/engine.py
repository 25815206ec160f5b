"""Moves pages to and from a store (`PageStore`): the engine begins steps without rows for transfers alone, and tells
the KV manager what the worker reports of them."""

from __future__ import annotations

import warnings

from reference_impl.core.engine import Engine
from reference_impl.core.engine_feature import Afterwards, EngineFeature, Flight
from reference_impl.interfaces import FetchesPages, Reply


class MovesPages(EngineFeature):
    """Begins and follows transfers of pages. pages: the engine's KV manager."""

    def __init__(self, engine: Engine, pages: FetchesPages):
        self.engine, self.pages = engine, pages

    def has_work(self) -> bool:
        """Whether transfers are to begin or be cancelled; those that have begun end with later steps or in `close`."""
        return self.pages.num_unsent > 0

    def begin(self, now: float) -> None:
        self.pages.expire(now)

    def needs_step(self) -> bool:
        return self.pages.num_transfers > 0

    def collected(self, flight: Flight, reply: Reply) -> tuple[Reply, Afterwards]:
        if reply.transfers or reply.layers_moved:
            self.pages.transfers_moved(reply.layers_moved)
            self.pages.transfers_ended(reply.transfers)
        return reply, None

    def save(self) -> None:
        """Runs steps until all pages are saved, up to the store's timeout."""
        while self.engine.lost is None and self.pages.num_transfers:
            self.engine.step()

    def close(self) -> None:
        """Waits for pages that are being saved, unless there are unfinished requests."""
        try:
            if not self.engine.requests:
                self.save()
        except Exception as error:  # a worker that is gone saves nothing, and is to be closed all the same
            warnings.warn(f"closed before all pages were saved: {error}", RuntimeWarning, stacklevel=2)
