"""A worker's feature that scores prompts (`SamplingParams.prompt_logprobs`)."""

from __future__ import annotations

from reference_impl.core.staging import to_device
from reference_impl.core.worker import StepRun
from reference_impl.core.worker_feature import ForRequests, StepPart
from reference_impl.features.scoring.scoring import Scored, add_scored, launch_scores
from reference_impl.interfaces import Opened


class PromptScores(ForRequests):
    def is_asked(self, request: Opened) -> bool:
        return request.sampling.prompt_logprobs is not None

    def part(self, run: StepRun) -> StepPart | None:
        return None if self.slots.isdisjoint(run.batch.slots) else ScorePart()


class ScorePart(StepPart):
    scored: Scored | None = None

    def lay_out(self, run: StepRun) -> None:
        self.scored = add_scored(run.batch, run.worker.slots)

    def after_model(self, run: StepRun) -> None:
        if self.scored is not None:
            run.reports["prompt_logprobs"] = launch_scores(run.logits, self.scored, run.worker.slots)
            rows = to_device({"sampling": self.scored.sampling}, run.logits.device)["sampling"]
            run.logits = run.scores = run.logits[rows]
