"""A worker that penalises tokens that a text has already. Extends `StepRun.sample` (scores) and `take` (counts)."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from reference_impl.core.sampler import TorchSampler
from reference_impl.core.staging import to_device
from reference_impl.core.worker import StepRun, Worker
from reference_impl.features.penalties.counts import Penalties, TokenCounts, penalised


class PenaltyWorker(Worker):
    """A sampler that is asked sees the requests, and does this by itself."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.counts = TokenCounts(self.slots.device)
        self.slots.followers.append(self.counts)


class PenaltyRun(StepRun):
    worker: PenaltyWorker
    penalties: Penalties | None = None

    def sample(self) -> None:
        w = self.worker
        if isinstance(w.sampler, TorchSampler):
            slots = [self.batch.slots[row] for row in self.batch.sampling]
            self.penalties = w.counts.of(slots, [w.slots.host[slot].sampling for slot in slots])
        if self.penalties is not None:
            guessed = self.guessed(self.penalties.arrays["rows"]) if self.batch.drafts else None
            self.scores = penalised(self.scores, self.penalties, guessed)
        super().sample()

    def guessed(self, rows: np.ndarray) -> tuple[Tensor, Tensor] | None:
        """Of the P logits with penalties, `rows`, the guesses before their positions: (which of the P, token)."""
        first = np.searchsorted(self.batch.sampling, np.array(self.batch.sampling)[rows])  # logits of the same row
        before = rows - first
        if not before.any():
            return None
        which = np.repeat(np.arange(len(rows)), before)
        nth = np.arange(len(which)) - np.repeat(np.cumsum(before) - before, before)
        t = to_device({"which": which, "first": first[which], "nth": nth}, self.worker.model.device)
        slot, position = self.tensors["sampling_slots"][t["first"]], self.tensors["sample_positions"][t["first"]]
        tokens = self.worker.slots.tokens[slot, position + t["nth"]]  # drafts lie behind what is known
        return t["which"], tokens.long()

    def take(self, tokens: Tensor, kept: Tensor | None = None) -> None:
        super().take(tokens, kept)
        if self.penalties is not None:
            w, slots = self.worker, self.batch.slots
            holds = [w.slots.host[slots[row]].holds for row in self.batch.sampling]
            w.counts.add(self.penalties, tokens, holds, kept)
