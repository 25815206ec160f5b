"""A worker's feature that gives hidden states of prompts (`Engine.add(pooling=...)`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from reference_impl.core.worker import StepRun
from reference_impl.core.worker_feature import ForRequests, StepPart
from reference_impl.features.pooling.pooling import Pooled, add_pooled, launch_pools, of_sampling
from reference_impl.interfaces import AttentionBackend, Batch, KVCache, Opened


class Pooling(ForRequests):
    def is_asked(self, request: Opened) -> bool:
        return request.pooling is not None

    def part(self, run: StepRun) -> StepPart | None:
        return None if self.slots.isdisjoint(run.batch.slots) else PoolPart()


class PoolPart(StepPart):
    def lay_out(self, run: StepRun) -> None:
        pooled = add_pooled(run.batch, run.worker.slots)
        if pooled is not None:
            run.model = PoolingModel(run.model, pooled, run.reports)


class PoolingModel:
    """Stands before a model for one step: hidden states of prompts are summed and reported, others become logits."""

    def __init__(self, model: Any, pooled: Pooled, reports: dict[str, Callable[[], Any]]):
        self.model, self.pooled, self.reports = model, pooled, reports

    def __call__(self, batch: Batch, kv_cache: KVCache, attention: AttentionBackend) -> Tensor:
        hidden = self.model.hidden_states(batch, kv_cache, attention)
        self.reports["pooled"] = launch_pools(hidden, self.pooled)
        logits: Tensor = self.model.logits(of_sampling(hidden, self.pooled))
        return logits
