"""A worker that moves scores by token (`SamplingParams.logit_bias`, `allowed_token_ids`, `min_tokens`). Extends
`StepRun.sample`, twice: biases come before penalties, as in vLLM, and what the others rule out stays out behind them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from reference_impl.core.sampler import TorchSampler
from reference_impl.core.worker import StepRun, Worker
from reference_impl.features.biases.biases import has_biases, left_over, moved
from reference_impl.interfaces import Opened, Step


class _BiasedSlots(set[int]):
    """Those whose requests have any."""

    def follow(self, step: Step, opened: Sequence[Opened]) -> None:
        self.difference_update(step.closed, [new.slot for new in opened])
        self.update(new.slot for new in opened if has_biases(new.sampling))


class BiasWorker(Worker):
    """A sampler that is asked adds biases by itself, as it does penalties."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.biased = _BiasedSlots()
        self.slots.followers.append(self.biased)
        vocab_size = self.model.config.vocab_size
        self.ends = [token for token in self.model.config.eos_token_ids if token < vocab_size]

    def sampled_slots(self, run: StepRun) -> list[Opened] | None:
        """Of each of the logits its request; None if none has biases."""
        slots = [run.batch.slots[row] for row in run.batch.sampling]
        return None if self.biased.isdisjoint(slots) else [self.slots.host[slot] for slot in slots]


class BiasRun(StepRun):
    worker: BiasWorker

    def sample(self) -> None:
        requests = self.worker.sampled_slots(self)
        if requests is not None and isinstance(self.worker.sampler, TorchSampler):
            self.scores = moved(self.scores, requests)
        super().sample()


class FloorRun(StepRun):
    worker: BiasWorker

    def sample(self) -> None:
        w = self.worker
        if (requests := w.sampled_slots(self)) is not None:
            self.scores = left_over(self.scores, requests, w.ends, self.tensors["sample_positions"])
        super().sample()
