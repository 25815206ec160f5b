"""Where the drafts of a worker's steps come from; here the simplest: from the steps themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from reference_impl.core.worker import StepRun
from reference_impl.interfaces import Opened, Step, Transfers

if TYPE_CHECKING:
    from reference_impl.features.graphs.graphs import Recorder
    from reference_impl.features.graphs.worker import GraphWorker
    from reference_impl.features.speculative.draft_graphs import PassGraphs
    from reference_impl.features.speculative.model_source import Draft
    from reference_impl.features.speculative.step_source import StepSource


class Source:
    """Makes the drafts of a worker's steps. keeps_up: whether it is needed in steps without drafts, too; is_model:
    whether its own scores can be masked; most_nodes: the most drafts that a row may have as a tree."""

    keeps_up = is_model = makes_trees = False
    most_nodes = 0
    draft: Draft | None = None  # the model or the heads, if these draft
    graphs: PassGraphs | None = None  # of their passes, where they are replayed

    def of(self, run: StepRun) -> StepSource:
        """The source for this step."""
        from reference_impl.features.speculative.step_source import StepSource

        return StepSource()

    def is_needed(self, run: StepRun) -> bool:
        """Whether a step without drafts needs this source."""
        return False

    def follow(self, step: Step, opened: Sequence[Opened]) -> None: ...

    def move_blocks(self, transfers: Transfers) -> None: ...

    def use_graphs(self, worker: GraphWorker, recorder: Recorder, max_rows: int, max_len: int) -> None:
        """Replays its passes as CUDA graphs from now on, if it can: see `GraphWorker.use_graphs`."""


class NamedDrafts(Source):
    """The source of drafts that come with the steps."""
