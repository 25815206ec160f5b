"""Drafts by a proposer, which need not be a model: see `interfaces.Proposer`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from reference_impl.core.worker import StepRun
from reference_impl.features.speculative.drafts import propose
from reference_impl.features.speculative.sources import Source
from reference_impl.features.speculative.step_source import StepSource
from reference_impl.interfaces import Opened, Proposer, Step


class Proposed(Source):
    def __init__(self, proposer: Proposer):
        self.proposer = proposer

    def of(self, run: StepRun) -> StepSource:
        return ProposedStep(self.proposer)

    def follow(self, step: Step, opened: Sequence[Opened]) -> None:
        for slot in step.closed:
            self.proposer.closed(slot)
        for new in opened:
            self.proposer.opened(new)


class ProposedStep(StepSource):
    def __init__(self, proposer: Proposer):
        self.proposer = proposer

    def draft(self, run: StepRun) -> Tensor | None:
        batch, t, w = run.batch, run.tensors, run.worker
        if batch.drafts and "draft.tokens" not in t:
            k, longest = max(batch.drafts), max(batch.context_lens)
            t["draft.tokens"] = propose(self.proposer, w.slots, t, k, w.model.config.vocab_size, longest)
        return None
