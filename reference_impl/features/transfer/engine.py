"""Pages on their way to and from a store (`PageStore`): the engine begins steps without rows for transfers alone, and
tells the KV manager what the worker reports of them.

It extends `Engine.update`, `has_work` and `close`.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from reference_impl.core.engine import Engine, FinishedStep
from reference_impl.interfaces import FetchesPages, Reply, Request, Step, StepPlan


class TransferringEngine(Engine):
    def __init__(self, *parts: Any, **options: Any):
        super().__init__(*parts, **options)
        self.pages = self.kv if isinstance(self.kv, FetchesPages) else None

    def transfers(self, plan: StepPlan) -> bool:
        """Whether a step without rows is needed: some transfers are to begin, or have not ended."""
        return plan.transfers.is_work or (self.pages is not None and self.pages.num_transfers > 0)

    def has_work(self) -> bool:
        """Also where nothing is computed, and transfers are to begin; those that have begun end with later steps, or
        in `close`."""
        return (self.pages is not None and self.pages.num_unsent > 0) or super().has_work()

    def update(self, plan: StepPlan, step: Step, reply: Reply, requests: Mapping[str, Request]) -> FinishedStep:
        if reply.transfers or reply.layers_moved:
            if self.pages is None:
                raise ValueError(
                    f"the reply to step {reply.step_id} speaks of transfers "
                    f"{[*reply.layers_moved, *(end.id for end in reply.transfers)]}; "
                    f"{type(self.kv).__name__} has begun none"
                )
            self.pages.transfers_moved(reply.layers_moved)
            self.pages.transfers_ended(reply.transfers)
        return super().update(plan, step, reply, requests)

    def save_pages(self) -> None:
        """Steps until all pages are saved, up to the store's timeout."""
        while self.pages is not None and self.pages.num_transfers:
            self.step()

    def close(self) -> None:
        """With no unfinished requests, waits for pages that are being saved."""
        try:
            if not self.requests:
                self.save_pages()
        except Exception as error:  # a worker that is gone saves nothing, and is to be closed all the same
            warnings.warn(f"closed before all pages were saved: {error}", RuntimeWarning, stacklevel=2)
        finally:
            super().close()
