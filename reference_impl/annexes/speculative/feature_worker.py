"""A worker whose guesses come from a feature head. Extends `Worker.submit` (blocks are moved in both caches),
`DraftRun.add_arrays`, `compute` (guesses are made before the model runs) and `take` (behind it, the head keeps up)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from reference_impl.annexes.speculative.drafts import take_drafts
from reference_impl.annexes.speculative.feature_head import (
    FeatureDraft,
    KeepsHidden,
    arrays_of,
    lay_out_guesses,
    wrong_guesses,
)
from reference_impl.annexes.speculative.rejection import places
from reference_impl.annexes.speculative.worker import DraftRun, DraftWorker
from reference_impl.core.batch import HostBatch
from reference_impl.core.sampler import TorchSampler
from reference_impl.core.worker import StepRun
from reference_impl.interfaces import Step


class FeatureWorker(DraftWorker):
    """draft: what guesses, where a step's rows have drafts."""

    def __init__(self, model: Any, *args: Any, draft: FeatureDraft, **options: Any):
        self.tap: Any = KeepsHidden(model)
        super().__init__(self.tap, *args, **options)
        self.draft = draft
        draft.model.follow(model)
        self.reads_starts = self.needs_lengths(self.attention, draft.attention)
        # A sampler that is asked may do anything; guesses are drawn as ours would.
        self.draws = self.sampler if isinstance(self.sampler, TorchSampler) else TorchSampler()

    @property
    def makes_drafts(self) -> bool:
        return True

    @torch.inference_mode()
    def submit(self, step: Step) -> StepRun:
        moves = step.transfers
        if moves.swap_out or moves.copies or moves.swap_in:
            self.draft.kv_cache.transfer(moves)
        return super().submit(step)


class FeatureRun(DraftRun):
    worker: FeatureWorker
    passes: Sequence[HostBatch] = ()

    def add_arrays(self) -> None:
        super().add_arrays()
        if "draft.tokens" in self.batch.arrays:
            raise ValueError(
                f"step {self.step.step_id} names drafts, and this worker's feature head makes them: leave out one of "
                "Parts.draft_model and what names them"
            )
        self.passes = lay_out_guesses(self.rows, self.worker.slots)
        if self.passes:
            self.batch.arrays.update(
                arrays_of(self.passes, self.worker.draws, places(self.batch.arrays)), **wrong_guesses(self.batch)
            )

    def compute(self) -> None:
        w = self.worker
        if self.passes:
            self.q = w.draft.guess(self.passes, self.tensors, w.slots, w.draws)
            self.tensors["draft.tokens"] = take_drafts(w.slots, self.tensors)
        super().compute()
        if not self.batch.sampling:  # chunks of prompts, whose next tokens are known
            self._keep_up(None)

    def take(self, tokens: Tensor, kept: Tensor | None = None) -> None:
        super().take(tokens, kept)
        wrong = None
        if self.passes:
            t = self.tensors
            wrong = torch.zeros(len(self.batch.slots), dtype=torch.int64, device=tokens.device)
            wrong.index_copy_(0, t["draft.rows"], t["draft.num"] - self.accepted)
        self._keep_up(wrong)

    def _keep_up(self, wrong: Tensor | None) -> None:
        w = self.worker
        w.draft.keep_up(self.batch, self.tensors, w.slots, w.tap.features, wrong)
