"""A worker's feature that gives hidden states of prompts (`Engine.add(pooling=...)`)."""

from __future__ import annotations

from reference_impl.core.worker import StepRun
from reference_impl.core.worker_feature import ForRequests, StepPart
from reference_impl.interfaces import Opened


class Pooling(ForRequests):
    def is_asked(self, request: Opened) -> bool:
        return request.pooling is not None

    def part(self, run: StepRun) -> StepPart | None:
        if self.slots.isdisjoint(run.batch.slots):
            return None
        from reference_impl.features.pooling.pooling import PoolPart

        return PoolPart()
