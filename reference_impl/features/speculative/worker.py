"""A worker's feature that verifies drafts: those that a step's rows name, or that the worker makes (Leviathan et al.
2023).

    source   makes the drafts of a step: a proposer, a draft model, heads, the model itself (sources.py and others)
    form     where they lie, and which are kept: a chain (chain.py) or a tree (verified_trees.py)

Drafts lie behind a row's known tokens before the model runs. Tokens at the drafts of requests without a seed are drawn
by rejection. A draft is kept if it is the token that was chosen there, and all drafts before it are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from reference_impl.core.worker import StepRun
from reference_impl.core.worker_feature import WorkerFeature
from reference_impl.features.speculative.sources import NamedDrafts, Source
from reference_impl.interfaces import Opened, Step, Transfers

if TYPE_CHECKING:
    from reference_impl.features.speculative.draft_part import DraftPart


class Drafting(WorkerFeature):
    """Verifies drafts. source: makes them; without one they come with the steps. has_bounds: whether the host must know
    where a step's rows begin (assembly/drafting.py).

    typical: whether drafts are kept by `candidates.typical`, which is lossy, in place of `chain.verify` and
    `rejection.verified`.
    """

    def __init__(self, source: Source | None, has_bounds: bool, typical: bool = False):
        self.source, self.has_bounds = source or NamedDrafts(), source is not None and has_bounds
        self.typical = typical
        self.every_step = self.has_bounds or self.source.keeps_up
        self.drafted_in: int | None = None  # the last step with drafts

    def reads_starts(self, run: StepRun) -> bool:
        """Whether the step's rows may begin earlier than it says, which the host must know: the step may have been
        planned before it was known how many drafts of the last steps were right."""
        if not self.has_bounds or self.drafted_in is None:
            return False
        return run.step.step_id <= self.drafted_in + run.worker.max_in_flight

    def follow(self, step: Step, opened: Sequence[Opened]) -> None:
        self.source.follow(step, opened)

    def move_blocks(self, transfers: Transfers) -> None:
        self.source.move_blocks(transfers)

    def part(self, run: StepRun) -> DraftPart | None:
        """The part of a step that needs it. A worker whose steps have no drafts imports nothing for them."""
        is_needed = run.batch.drafts or self.reads_starts(run) or self.source.is_needed(run)
        if not is_needed:
            return None
        from reference_impl.features.speculative.draft_part import DraftPart

        return DraftPart(self, run)
