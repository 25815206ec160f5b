"""A worker whose rows sample under grammars: a step in two halves (as in XGrammar's overlap with the GPU).

The forward pass begins while the step before may still run; the masks follow when its tokens are known. Extends
`StepRun.end`, which then waits for `MaskWorker.finish`, and `sample`, which rules out what the masks do.
"""

from __future__ import annotations

from functools import partial
from typing import NoReturn

import torch

from reference_impl.core.worker import StepRun, Worker
from reference_impl.features.grammars.masks import Allowed, check_mask, masked, one_of
from reference_impl.interfaces import Masks


class MaskWorker(Worker):
    @torch.inference_mode()
    def finish(self, run: StepRun, masks: Masks) -> None:
        """ValueError if they are another step's, or are not masks; RuntimeError if the step waits for none."""
        step = run.step
        if not (isinstance(run, MaskRun) and run.waits):
            raise RuntimeError(f"step {step.step_id} waits for no masks: it was submitted without, or has them")
        if (masks.step_id, len(masks.rows)) != (step.step_id, len(step.rows)):
            raise ValueError(
                f"step {step.step_id} of {len(step.rows)} rows got masks of step {masks.step_id} for {len(masks.rows)}"
            )
        run.allow(masks)
        run.end()


class MaskRun(StepRun):
    waits = False
    allowed: Allowed | None = None

    def end(self) -> None:
        if self.step.takes_masks and self.allowed is None:
            self.waits, self.wait = True, partial(_refuse, self.step.step_id)
        else:
            self.waits = False
            super().end()

    def allow(self, masks: Masks) -> None:
        """Masks come for each row of the step, and are needed for each of the logits: of a row with guesses several."""
        rows, found, first = [], [], 0
        for place, row in enumerate(self.batch.sampling):
            if place and self.batch.sampling[place - 1] != row:
                first = place
            given, number = masks.rows[self.batch.order[row]], 1 + (self.batch.drafts[row] if self.batch.drafts else 0)
            if given is not None and not self.is_cut(row, mask := one_of(given, place - first, number), place - first):
                check_mask(mask, self.worker.model.config.vocab_size, self.batch.request_ids[row])
                rows.append(place)
                found.append(mask)
        self.allowed = Allowed(rows, found)

    def is_cut(self, row: int, mask: bytes, nth: int) -> bool:
        """Whether it stands behind a guess that will not be kept. row: of the batch; nth: of its masks."""
        return False

    def sample(self) -> None:
        if self.allowed is not None:
            self.scores = masked(self.scores, self.allowed)
        super().sample()


def _refuse(step_id: int) -> NoReturn:
    raise RuntimeError(f"step {step_id} was submitted with takes_masks: call finish before collect")
