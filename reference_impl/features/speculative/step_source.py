"""What makes the drafts of one step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from reference_impl.core.staging import Arrays
from reference_impl.core.worker import StepRun
from reference_impl.interfaces import StepRow

if TYPE_CHECKING:
    from reference_impl.features.grammars.drafts import AskMasks
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
