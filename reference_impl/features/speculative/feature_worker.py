"""A worker whose guesses come of the target's hidden states, by a feature head or Medusa heads. Extends
`ModelDraftRun.compute` and `take`: behind the model the draft is given those of the step's tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from reference_impl.features.speculative.feature_head import FeatureDraft, KeepsHidden
from reference_impl.features.speculative.medusa import MedusaDraft
from reference_impl.features.speculative.model_worker import ModelDraftRun, ModelDraftWorker


class FeatureWorker(ModelDraftWorker):
    """draft: what guesses, where a step's rows have drafts."""

    draft: FeatureDraft | MedusaDraft

    def __init__(self, model: Any, *args: Any, draft: FeatureDraft | MedusaDraft, **options: Any):
        draft.model.follow(model)
        self.tap: Any = KeepsHidden(model)
        super().__init__(self.tap, *args, draft=draft, **options)


class FeatureRun(ModelDraftRun):
    worker: FeatureWorker
    known: Mapping[str, Tensor]  # of the step's batch, what the draft computes it by; with what was looked up

    def compute(self) -> None:
        super().compute()
        self.known = self.tensors
        if not self.batch.sampling:  # chunks of prompts, whose next tokens are known
            self._keep_up(None)

    def take(self, tokens: Tensor, kept: Tensor | None = None) -> None:
        super().take(tokens, kept)
        wrong = None
        if self.batch.drafts:
            t, of_slot = self.tensors, self.worker.slots.computed.new_zeros(self.worker.slots.num_slots + 1)
            of_slot.index_copy_(0, t["draft.slots"], t["draft.num"] - self.accepted)
            wrong = of_slot.index_select(0, self.known["slots"])
        self._keep_up(wrong)

    def _keep_up(self, wrong: Tensor | None) -> None:
        w = self.worker
        if self.step.keeps_up:
            with self.watched():
                w.draft.keep_up(self.batch, self.known, w.slots, w.tap.features, wrong)
