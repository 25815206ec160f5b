"""A worker that loads and saves pages of a store. Extends `Worker.submit` and `collect`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from reference_impl.core.worker import StepRun, Worker
from reference_impl.features.transfer.pages import LONGEST_WAIT, Pages
from reference_impl.interfaces import LayeredPageStore, PageStore, Reply, Step, Transfers


class PageWorker(Worker):
    """page_store: for the loads and saves of a step's transfers."""

    def __init__(self, *args: Any, page_store: PageStore | LayeredPageStore, **options: Any):
        super().__init__(*args, **options)
        self.pages = Pages(page_store, self.kv_cache)

    @torch.inference_mode()
    def submit(self, step: Step) -> StepRun:
        """Pages are read and written between two steps: after the moves of this one, before it writes."""
        self.kv_cache.transfer(step.transfers)
        self.pages.begin(step.transfers)
        self.pages.take_in(0.0 if step.rows else LONGEST_WAIT)
        return super().submit(replace(step, transfers=Transfers()))

    def collect(self, run: StepRun) -> Reply:
        reply = super().collect(run)
        ended, moved = self.pages.take_ended(), self.pages.take_moved()
        return replace(reply, transfers=ended, layers_moved=moved) if ended or moved else reply
