"""A worker's feature that penalises tokens which a text has already: it changes scores, and counts what is sampled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from reference_impl.core.sampler import TorchSampler
from reference_impl.core.worker import StepRun
from reference_impl.core.worker_feature import DraftPositions, StepPart, WorkerFeature
from reference_impl.interfaces import Opened, SamplingParams, Step

if TYPE_CHECKING:
    from reference_impl.features.penalties.counts import TokenCounts


def has_penalties(sampling: SamplingParams) -> bool:
    return sampling.repetition_penalty != 1 or bool(sampling.presence_penalty or sampling.frequency_penalty)


class PenaltyFeature(WorkerFeature):
    """Applies penalties, unless the sampler is asked: such a sampler sees the requests and does this itself."""

    counts: TokenCounts | None = None  # from the first request with penalties on

    def __init__(self, device: torch.device):
        self.device = device

    def follow(self, step: Step, opened: Sequence[Opened]) -> None:
        if self.counts is None and any(has_penalties(new.sampling) for new in opened):
            from reference_impl.features.penalties.counts import TokenCounts

            self.counts = TokenCounts(self.device)
            self.slots = self.counts.places.keys()  # also of those to come
        if self.counts is not None:
            self.counts.follow(step, opened)

    def part(self, run: StepRun) -> StepPart | None:
        is_own = isinstance(run.worker.sampler, TorchSampler)
        if self.counts is None or not is_own or self.slots.isdisjoint(run.batch.slots):
            return None
        from reference_impl.features.penalties.counts import PenaltyPart

        return PenaltyPart(self.counts)

    def move_draft_scores(self, scores: Tensor, at: DraftPositions) -> Tensor:
        if self.counts is None:
            return scores
        from reference_impl.features.penalties.counts import drafts_before, penalised

        penalties = self.counts.of(at.slots, [request.sampling for request in at.requests])
        return scores if penalties is None else penalised(scores, penalties, drafts_before(penalties, at))
