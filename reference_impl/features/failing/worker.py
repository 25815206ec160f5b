"""Where numbers stopped being finite: the worker computes a request's tokens once more, alone, and looks. Extends
`Worker.explain`, which is called for a request that fails, and for no other."""

from __future__ import annotations

import torch

from reference_impl.core.worker import Worker
from reference_impl.features.failing.first import first_not_finite
from reference_impl.interfaces import Step


class ExplainingWorker(Worker):
    @torch.inference_mode()
    def explain(self, step: Step, at: int) -> str:
        row = step.rows[at]
        # The plan counts all guesses of the step before as right; behind those that were lies whatever memory held.
        end = min(row.start + row.length, max(1, int(self.slots.computed[row.slot])))
        tokens = self.slots.tokens[row.slot, :end].long()
        return f"{super().explain(step, at)}; {first_not_finite(self.model, tokens)}"
