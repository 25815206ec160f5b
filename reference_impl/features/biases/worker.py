"""Changes of single tokens' scores (`SamplingParams.logit_bias`, `allowed_token_ids`, `min_tokens`), in two features:
biases come before penalties, as in vLLM, and what is ruled out comes after them, so that it stays out."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from reference_impl.core.sampler import TorchSampler
from reference_impl.core.worker import StepRun
from reference_impl.core.worker_feature import DraftPositions, ForRequests, StepPart
from reference_impl.interfaces import Opened


class Biases(ForRequests):
    """Adds `logit_bias`, unless the sampler is asked: such a sampler does this itself."""

    def is_asked(self, request: Opened) -> bool:
        return bool(request.sampling.logit_bias)

    def part(self, run: StepRun) -> StepPart | None:
        is_own = isinstance(run.worker.sampler, TorchSampler)
        if not is_own or self.slots.isdisjoint(run.batch.slots):
            return None
        from reference_impl.features.biases.biases import BiasPart

        return BiasPart()

    def move_draft_scores(self, scores: Tensor, at: DraftPositions) -> Tensor:
        from reference_impl.features.biases.biases import moved

        return moved(scores, at.requests)


class Exclusions(ForRequests):
    """Rules out all but `allowed_token_ids`, and tokens that end a text before `min_tokens`. ends: the model's end
    tokens."""

    def __init__(self, ends: Sequence[int]):
        super().__init__()
        self.ends = ends

    def is_asked(self, request: Opened) -> bool:
        return bool(request.sampling.min_tokens) or request.sampling.allowed_token_ids is not None

    def part(self, run: StepRun) -> StepPart | None:
        if self.slots.isdisjoint(run.batch.slots):
            return None
        from reference_impl.features.biases.biases import ExclusionPart

        return ExclusionPart(self.ends)

    def move_draft_scores(self, scores: Tensor, at: DraftPositions) -> Tensor:
        from reference_impl.features.biases.biases import left_over

        return left_over(scores, at.requests, self.ends, at.positions)
