"""A worker's feature for rows that sample under grammars: a step in two halves (as in XGrammar's overlap with the GPU).

The forward pass begins while the step before may still run; the masks follow when its tokens are known, and rule out
what they do not allow. Masks come for each row of the step, and are needed for each of its logits: a row with drafts
has one for its last known token, and one behind each draft. Where the worker drafted, a mask that allows nothing means
that its draft is cut: the grammar forbids it, or has no mask behind it.
"""

from __future__ import annotations

from reference_impl.core.worker import StepRun
from reference_impl.core.worker_feature import StepPart, WorkerFeature


class Masking(WorkerFeature):
    def part(self, run: StepRun) -> StepPart | None:
        if not run.step.takes_masks:
            return None
        from reference_impl.features.grammars.masks import MaskPart

        return MaskPart()
