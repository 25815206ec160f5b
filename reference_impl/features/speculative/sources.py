"""Where the drafts of a worker's steps come from. Here the two simplest: from the steps themselves, or a proposer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from reference_impl.core.staging import Arrays
from reference_impl.core.worker import StepRun
from reference_impl.interfaces import Opened, Proposer, Step, StepRow, Transfers

if TYPE_CHECKING:
    from reference_impl.features.grammars.drafts import AskMasks
    from reference_impl.features.graphs.graphs import Recorder
    from reference_impl.features.graphs.worker import GraphWorker
    from reference_impl.features.speculative.draft_graphs import PassGraphs
    from reference_impl.features.speculative.model_source import Draft
    from reference_impl.features.speculative.tree import Tree
    from reference_impl.features.speculative.tree_layout import Places, Rows


class StepSource:
    """Makes the drafts of one step. ask_masks: set while masks can be asked for (`DraftsLater`)."""

    ask_masks: AskMasks | None = None

    def lay_out(self, run: StepRun, rows: Sequence[StepRow]) -> None:
        """Adds the arrays that drafting a chain needs. rows: see `DraftPart`."""

    def draft(self, run: StepRun) -> Tensor | None:
        """Puts the D drafts, [D] int64, into run.tensors as draft.tokens. Returns the distributions that drafts
        verified by rejection were drawn from; None: they were not drawn, or there are none."""
        return None

    def after_model(self, run: StepRun) -> None: ...

    def taken(self, run: StepRun, accepted: Tensor | None) -> None:
        """Called when the step's tokens are known. accepted [R]: see `DraftPart`; None: no row has drafts."""

    def ended(self, run: StepRun) -> None: ...


class DraftsTrees(Protocol):
    """What a `StepSource` whose drafts are trees has besides."""

    def trees(self, run: StepRun, drafted: Sequence[StepRow]) -> Sequence[Tree]:
        """A tree for each of the R rows with drafts, in the order of the batch, with as many nodes as the row has
        drafts. drafted [R]: these rows, with their starts as the host knows them."""
        ...

    def tree_arrays(
        self, run: StepRun, step_rows: Sequence[StepRow], drafted: Sequence[StepRow], rows: Rows, places: Places
    ) -> Arrays:
        """The arrays that drafting a tree needs. step_rows: see `DraftPart.rows`; drafted: see `trees`."""
        ...

    def path_kept(self, run: StepRun, kept_row: Tensor, node: Tensor, num: Tensor) -> None:
        """Called before the slots' lengths change. node: the node that is kept, for each level of each row (kept_row);
        num: how many levels are."""
        ...


class Source:
    """Makes the drafts of a worker's steps. keeps_up: whether it is needed in steps without drafts, too; is_model:
    whether its own scores can be masked; most_nodes: the most drafts that a row may have as a tree."""

    keeps_up = is_model = makes_trees = False
    most_nodes = 0
    draft: Draft | None = None  # the model or the heads, if these draft
    graphs: PassGraphs | None = None  # of their passes, where they are replayed

    def of(self, run: StepRun) -> StepSource:
        """The source for this step."""
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


class Proposed(Source):
    """Drafts by a proposer: see `interfaces.Proposer`."""

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
            from reference_impl.features.speculative.drafts import propose

            k, longest = max(batch.drafts), max(batch.context_lens)
            t["draft.tokens"] = propose(self.proposer, w.slots, t, k, w.model.config.vocab_size, longest)
        return None
