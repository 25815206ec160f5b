"""A worker that scores prompts (`SamplingParams.prompt_logprobs`). Extends `StepRun.stage` and `compute`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from reference_impl.core.staging import to_device
from reference_impl.core.worker import StepRun, Worker
from reference_impl.features.scoring.scoring import Scored, add_scored, launch_scores
from reference_impl.interfaces import Opened, Step


class _ScoredSlots(set[int]):
    """Those whose prompts have log-probabilities."""

    def follow(self, step: Step, opened: Sequence[Opened]) -> None:
        self.difference_update(step.closed, [new.slot for new in opened])
        self.update(new.slot for new in opened if new.sampling.prompt_logprobs is not None)


class ScoreWorker(Worker):
    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.scored = _ScoredSlots()
        self.slots.followers.append(self.scored)


class ScoreRun(StepRun):
    worker: ScoreWorker
    scored: Scored | None = None

    def stage(self) -> None:
        if not self.worker.scored.isdisjoint(self.batch.slots):
            self.scored = add_scored(self.batch, self.worker.slots)
        super().stage()

    def compute(self) -> None:
        super().compute()
        if self.scored is not None:
            self.reports["prompt_logprobs"] = launch_scores(self.logits, self.scored, self.worker.slots)
            rows = to_device({"sampling": self.scored.sampling}, self.logits.device)["sampling"]
            self.logits = self.scores = self.logits[rows]
