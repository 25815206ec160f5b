"""A worker's feature that scores prompts (`SamplingParams.prompt_logprobs`)."""

from __future__ import annotations

from reference_impl.core.worker import StepRun
from reference_impl.core.worker_feature import ForRequests, StepPart
from reference_impl.interfaces import Opened


class PromptScores(ForRequests):
    def is_asked(self, request: Opened) -> bool:
        return request.sampling.prompt_logprobs is not None

    def part(self, run: StepRun) -> StepPart | None:
        if self.slots.isdisjoint(run.batch.slots):
            return None
        from reference_impl.features.scoring.scoring import ScorePart

        return ScorePart()
