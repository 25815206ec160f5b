"""Finds where numbers stopped being finite: the worker computes a request's tokens once more, alone, and looks. It is
called only for a request that fails."""

from __future__ import annotations

import torch

from reference_impl.core.decoder import Decoder
from reference_impl.core.slots import Slots
from reference_impl.core.worker_feature import WorkerFeature
from reference_impl.interfaces import Step


class Explaining(WorkerFeature):
    def __init__(self, model: Decoder, tables: Slots):
        self.model, self.tables = model, tables

    @torch.inference_mode()
    def explain(self, step: Step, at: int) -> str:
        from reference_impl.features.failing.first import first_not_finite

        if self.model.config.stage is not None:  # this one cannot compute alone, and the others wait for the next step
            return "of a model in stages the place is not looked for"
        row = step.rows[at]
        # The plan counts all drafts of the step before as right; behind those that were not lies whatever memory held.
        end = min(row.start + row.length, max(1, int(self.tables.computed[row.slot])))
        return first_not_finite(self.model, self.tables.tokens[row.slot, :end].long())
