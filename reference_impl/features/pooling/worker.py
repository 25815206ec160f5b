"""A worker that gives hidden states of prompts (`Engine.add(pooling=...)`). Extends `StepRun.stage` and `compute`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from reference_impl.core.batch import as_batch
from reference_impl.core.worker import StepRun, Worker
from reference_impl.features.pooling.pooling import Pooled, add_pooled, launch_pools, of_sampling
from reference_impl.interfaces import Opened, Step


class _PooledSlots(set[int]):
    """Those whose hidden states are asked for."""

    def follow(self, step: Step, opened: Sequence[Opened]) -> None:
        self.difference_update(step.closed, [new.slot for new in opened])
        self.update(new.slot for new in opened if new.pooling is not None)


class PoolWorker(Worker):
    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.pooled = _PooledSlots()
        self.slots.followers.append(self.pooled)


class PoolRun(StepRun):
    worker: PoolWorker
    pooled: Pooled | None = None

    def stage(self) -> None:
        if not self.worker.pooled.isdisjoint(self.batch.slots):
            self.pooled = add_pooled(self.batch, self.worker.slots)
        super().stage()

    def compute(self) -> None:
        """With the hidden states between: those of prompts are summed, the others become logits."""
        if self.pooled is None:
            return super().compute()
        w = self.worker
        self.tensors |= w.slots.look_up(self.tensors, max(self.batch.context_lens))
        hidden = w.model.hidden_states(as_batch(self.batch, self.tensors, w.kv_specs), w.kv_cache, w.attention)
        self.reports["pooled"] = launch_pools(hidden, self.pooled)
        self.logits = self.scores = w.model.logits(of_sampling(hidden, self.pooled))
        self.ran = () if w.names_kernels is None else tuple(sorted(w.names_kernels.ran))
