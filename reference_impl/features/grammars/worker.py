"""A worker's feature for rows that sample under grammars: a step in two halves (as in XGrammar's overlap with the GPU).

The forward pass begins while the step before may still run; the masks follow when its tokens are known, and rule out
what they do not allow. Masks come for each row of the step, and are needed for each of its logits: a row with drafts
has one for its last known token, and one behind each draft. Where the worker drafted, a mask that allows nothing means
that its draft is cut: the grammar forbids it, or has no mask behind it.
"""

from __future__ import annotations

from reference_impl.core.worker import StepRun
from reference_impl.core.worker_feature import StepPart, WorkerFeature
from reference_impl.features.grammars.masks import Allowed, allows_any, check_mask, masked, one_of
from reference_impl.interfaces import Masks


class Masking(WorkerFeature):
    def part(self, run: StepRun) -> StepPart | None:
        return MaskPart() if run.step.takes_masks else None


class MaskPart(StepPart):
    allowed: Allowed | None = None

    def needs_logits(self, run: StepRun) -> bool:
        return True

    def waits(self, run: StepRun) -> bool:
        return self.allowed is None

    def allow(self, run: StepRun, masks: Masks) -> None:
        batch, vocab_size = run.batch, run.worker.model.config.vocab_size
        rows, found, first = [], [], 0
        for place, row in enumerate(batch.sampling):
            if place and batch.sampling[place - 1] != row:
                first = place
            given, number = masks.rows[batch.order[row]], 1 + (batch.drafts[row] if batch.drafts else 0)
            if given is None:
                continue
            mask, is_named = one_of(given, place - first, number), run.step.rows[batch.order[row]].drafts
            if place > first and not is_named and not allows_any(mask, vocab_size):
                continue  # it stands behind a draft that will not be kept
            check_mask(mask, vocab_size, batch.request_ids[row])
            rows.append(place)
            found.append(mask)
        self.allowed = Allowed(rows, found)
        run.masked = rows, [masks.rows[at] is not None for at in batch.order]

    def move_scores(self, run: StepRun) -> None:
        assert self.allowed is not None  # `waits`
        run.scores = masked(run.scores, self.allowed)


def finish(run: StepRun, masks: Masks) -> None:
    """Samples a step under its masks. ValueError if they are another step's, or are not masks; RuntimeError if the step
    waits for none."""
    step = run.step
    if not run.waits:
        raise RuntimeError(f"step {step.step_id} waits for no masks: it was submitted without, or has them")
    if (masks.step_id, len(masks.rows)) != (step.step_id, len(step.rows)):
        raise ValueError(
            f"step {step.step_id} of {len(step.rows)} rows got masks of step {masks.step_id} for {len(masks.rows)}"
        )
    (part,) = (part for part in run.parts if isinstance(part, MaskPart))
    part.allow(run, masks)
    run.end()
