"""Changes of single tokens' scores (`SamplingParams.logit_bias`, `allowed_token_ids`, `min_tokens`), in two features:
biases come before penalties, as in vLLM, and what is ruled out comes after them, so that it stays out."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from reference_impl.core.sampler import TorchSampler
from reference_impl.core.worker import StepRun
from reference_impl.core.worker_feature import DraftPositions, ForRequests, StepPart
from reference_impl.features.biases.biases import left_over, moved
from reference_impl.interfaces import Opened


class Biases(ForRequests):
    """Adds `logit_bias`, unless the sampler is asked: such a sampler does this itself."""

    def is_asked(self, request: Opened) -> bool:
        return bool(request.sampling.logit_bias)

    def part(self, run: StepRun) -> StepPart | None:
        is_own = isinstance(run.worker.sampler, TorchSampler)
        return BiasPart() if is_own and not self.slots.isdisjoint(run.batch.slots) else None

    def move_draft_scores(self, scores: Tensor, at: DraftPositions) -> Tensor:
        return moved(scores, at.requests)


class BiasPart(StepPart):
    def needs_logits(self, run: StepRun) -> bool:
        return True

    def move_scores(self, run: StepRun) -> None:
        run.scores = moved(run.scores, requests_of(run))


class Exclusions(ForRequests):
    """Rules out all but `allowed_token_ids`, and tokens that end a text before `min_tokens`. ends: the model's end
    tokens."""

    def __init__(self, ends: Sequence[int]):
        super().__init__()
        self.ends = ends

    def is_asked(self, request: Opened) -> bool:
        return bool(request.sampling.min_tokens) or request.sampling.allowed_token_ids is not None

    def part(self, run: StepRun) -> StepPart | None:
        return None if self.slots.isdisjoint(run.batch.slots) else ExclusionPart(self.ends)

    def move_draft_scores(self, scores: Tensor, at: DraftPositions) -> Tensor:
        return left_over(scores, at.requests, self.ends, at.positions)


class ExclusionPart(StepPart):
    def __init__(self, ends: Sequence[int]):
        self.ends = ends

    def needs_logits(self, run: StepRun) -> bool:
        return True

    def move_scores(self, run: StepRun) -> None:
        run.scores = left_over(run.scores, requests_of(run), self.ends, run.tensors["sample_positions"])


def requests_of(run: StepRun) -> list[Opened]:
    """The request of each of the step's logits."""
    return [run.worker.slots.host[run.batch.slots[row]] for row in run.batch.sampling]
