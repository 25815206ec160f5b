"""A worker whose guesses are a lookahead window and n-grams of its iterations. Extends `TreeRun`: the window's newest
level is read off the logits that verify the guesses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from reference_impl.core.staging import Arrays
from reference_impl.features.speculative.lookahead import Shape
from reference_impl.features.speculative.lookahead_pool import Lookahead
from reference_impl.features.speculative.tree import Tree
from reference_impl.features.speculative.tree_layout import Rows
from reference_impl.features.speculative.tree_worker import Places, TreeRun, TreeWorker
from reference_impl.interfaces import StepRow


class LookaheadWorker(TreeWorker):
    def __init__(self, *args: Any, lookahead: Shape, **options: Any):
        super().__init__(*args, **options)
        self.lookahead = Lookahead(lookahead, self.slots.num_slots, self.slots.device)
        self.slots.followers.append(self.lookahead)
        self.most_nodes = len(lookahead.nodes)
        self.has_bounds = self.needs_lengths(self.attention)


class LookaheadRun(TreeRun):
    worker: LookaheadWorker

    def trees(self, step_rows: Sequence[StepRow]) -> Sequence[Tree]:
        return [self.worker.lookahead.shape.tree.first(row.num_drafts) for row in step_rows]

    def guessing_arrays(self, step_rows: Sequence[StepRow], rows: Rows, places: Places) -> Arrays:
        """whole: which of the R rows have the whole window, and so an iteration; newest [whole, columns]: the logits of
        its newest level."""
        (whole,) = np.array([row.num_drafts == self.worker.most_nodes for row in step_rows]).nonzero()
        newest = rows.first[whole, None] + 1 + np.array(self.worker.lookahead.shape.newest)
        return {"draft.window.whole": whole, "draft.window.newest": newest}

    def guesses(self) -> tuple[Tensor, Tensor | None]:
        slots, t = self.worker.slots, self.tensors
        rows = t["draft.slots"]
        last = slots.tokens[rows, slots.computed[rows] + t["draft.known"] - 1].long()
        return self.worker.lookahead.guess(rows, last)[t["draft.row"], t["draft.nth"]], None

    def path_kept(self, kept_row: Tensor, node: Tensor, num: Tensor) -> None:
        t, whole = self.tensors, self.tensors["draft.window.whole"]
        newest = self.logits[t["draft.window.newest"]].argmax(-1)
        self.worker.lookahead.iterate(t["draft.slots"][whole], newest, num[whole])
