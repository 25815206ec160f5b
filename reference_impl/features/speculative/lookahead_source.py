"""Drafts from a lookahead window and from n-grams of its iterations: the window's newest level is read off the logits
that verify the drafts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from reference_impl.core.slots import Slots
from reference_impl.core.staging import Arrays
from reference_impl.core.worker import StepRun
from reference_impl.features.speculative.lookahead import Shape
from reference_impl.features.speculative.lookahead_pool import Lookahead
from reference_impl.features.speculative.sources import Source
from reference_impl.features.speculative.step_source import StepSource
from reference_impl.features.speculative.tree import Tree
from reference_impl.features.speculative.tree_layout import Places, Rows
from reference_impl.interfaces import Opened, Step, StepRow


class LookaheadSource(Source):
    makes_trees = True

    def __init__(self, shape: Shape, slots: Slots):
        self.lookahead = Lookahead(shape, slots.num_slots, slots.device)
        self.most_nodes = len(shape.nodes)

    def of(self, run: StepRun) -> StepSource:
        return LookaheadStep(self.lookahead, self.most_nodes)

    def follow(self, step: Step, opened: Sequence[Opened]) -> None:
        self.lookahead.follow(step, opened)


class LookaheadStep(StepSource):
    def __init__(self, lookahead: Lookahead, most_nodes: int):
        self.lookahead, self.most_nodes = lookahead, most_nodes

    def trees(self, run: StepRun, drafted: Sequence[StepRow]) -> Sequence[Tree]:
        return [self.lookahead.shape.tree.first(row.num_drafts) for row in drafted]

    def tree_arrays(
        self, run: StepRun, step_rows: Sequence[StepRow], drafted: Sequence[StepRow], rows: Rows, places: Places
    ) -> Arrays:
        """The arrays that the iteration needs. whole: which of the R rows have the whole window, and so an iteration;
        newest [whole, columns]: the logits of its newest level."""
        (whole,) = np.array([row.num_drafts == self.most_nodes for row in drafted]).nonzero()
        newest = rows.first[whole, None] + 1 + np.array(self.lookahead.shape.newest)
        return {"draft.window.whole": whole, "draft.window.newest": newest}

    def draft(self, run: StepRun) -> Tensor | None:
        slots, t = run.worker.slots, run.tensors
        if run.batch.drafts:
            rows = t["draft.slots"]
            last = slots.tokens[rows, slots.computed[rows] + t["draft.known"] - 1].long()
            t["draft.tokens"] = self.lookahead.propose(rows, last)[t["draft.row"], t["draft.nth"]]
        return None

    def path_kept(self, run: StepRun, kept_row: Tensor, node: Tensor, num: Tensor) -> None:
        t, whole = run.tensors, run.tensors["draft.window.whole"]
        newest = run.logits[t["draft.window.newest"]].argmax(-1)
        self.lookahead.iterate(t["draft.slots"][whole], newest, num[whole])
