"""A worker's feature that penalises tokens which a text has already: it changes scores, and counts what is sampled."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from reference_impl.core.sampler import TorchSampler
from reference_impl.core.staging import to_device
from reference_impl.core.worker import StepRun
from reference_impl.core.worker_feature import DraftPositions, StepPart, WorkerFeature
from reference_impl.features.penalties.counts import Penalties, TokenCounts, penalised
from reference_impl.interfaces import Opened, Step


class PenaltyFeature(WorkerFeature):
    """Applies penalties, unless the sampler is asked: such a sampler sees the requests and does this itself."""

    def __init__(self, device: torch.device):
        self.counts = TokenCounts(device)
        self.slots = self.counts.places.keys()  # also of those to come

    def follow(self, step: Step, opened: Sequence[Opened]) -> None:
        self.counts.follow(step, opened)

    def part(self, run: StepRun) -> StepPart | None:
        is_own = isinstance(run.worker.sampler, TorchSampler)
        return PenaltyPart(self.counts) if is_own and not self.slots.isdisjoint(run.batch.slots) else None

    def move_draft_scores(self, scores: Tensor, at: DraftPositions) -> Tensor:
        penalties = self.counts.of(at.slots, [request.sampling for request in at.requests])
        return scores if penalties is None else penalised(scores, penalties, drafts_before(penalties, at))


class PenaltyPart(StepPart):
    penalties: Penalties | None = None

    def __init__(self, counts: TokenCounts):
        self.counts = counts

    def needs_logits(self, run: StepRun) -> bool:
        return True

    def move_scores(self, run: StepRun) -> None:
        slots = [run.batch.slots[row] for row in run.batch.sampling]
        self.penalties = self.counts.of(slots, [run.worker.slots.host[slot].sampling for slot in slots])
        if self.penalties is not None:
            before = None if run.drafts_before is None else run.drafts_before(run, self.penalties.arrays["rows"])
            run.scores = penalised(run.scores, self.penalties, before)

    def taken(self, run: StepRun, tokens: Tensor) -> None:
        if self.penalties is not None:
            holds = [run.worker.slots.host[run.batch.slots[row]].holds for row in run.batch.sampling]
            self.counts.add(self.penalties, tokens, holds, run.kept)


def drafts_before(penalties: Penalties, at: DraftPositions) -> tuple[Tensor, Tensor] | None:
    """The drafts before the positions of rows with penalties, in the form of `penalised`: (which of the P rows, token);
    None: there are none."""
    rows, before = penalties.arrays["rows"], at.before
    if isinstance(before, Tensor):
        t = to_device({"rows": rows, "which": np.repeat(np.arange(len(rows)), before.shape[1])}, before.device)
        return (t["which"], before[t["rows"]].flatten()) if before.shape[1] else None
    if not before:
        return None
    which, back = np.repeat(np.arange(len(rows)), before), np.tile(np.arange(before, 0, -1), len(rows))
    arrays = {"which": which, "row": rows[which], "slot": np.array(at.slots)[rows[which]], "back": back}
    t = to_device(arrays, at.tables.device)
    return t["which"], at.tables.tokens[t["slot"], at.positions[t["row"]] - t["back"]].long()
