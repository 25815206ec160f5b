"""A worker whose trees of guesses come of a feature head: behind a step the head computes the path that was kept.

Extends `TreeRun` and `FeatureRun._keep_up`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from reference_impl.core.batch import HostBatch
from reference_impl.core.staging import Arrays
from reference_impl.features.speculative.feature_head import FeatureDraft
from reference_impl.features.speculative.feature_worker import FeatureRun, FeatureWorker
from reference_impl.features.speculative.growth import Growth
from reference_impl.features.speculative.tree import Tree
from reference_impl.features.speculative.tree_growing import grow_trees
from reference_impl.features.speculative.tree_head import Level, guess_tree, lay_out_levels, level_arrays
from reference_impl.features.speculative.tree_layout import Rows, kept_arrays, without_branches
from reference_impl.features.speculative.tree_worker import Places, TreeRun, TreeWorker
from reference_impl.interfaces import StepRow

AFTER = "draft.after."  # before the names of arrays of `without_branches`


class TreeHeadWorker(TreeWorker, FeatureWorker):
    """tree: of which a row's guesses are the first nodes; or how a tree is grown."""

    draft: FeatureDraft

    def __init__(self, *args: Any, tree: Tree | Growth, **options: Any):
        super().__init__(*args, **options)
        self.tree, self.most_nodes, self.most_inner = tree, tree.num_nodes, tree.num_inner


class TreeHeadRun(TreeRun, FeatureRun):
    worker: TreeHeadWorker
    levels: list[Level]
    after: HostBatch | None = None  # the rows when only one path of each tree is left; None: no row has guesses

    grown: Tensor | None = None  # the D guesses, if their tree was grown

    def trees(self, step_rows: Sequence[StepRow]) -> Sequence[Tree]:
        w, nums = self.worker, [row.num_drafts for row in step_rows]
        if isinstance(w.tree, Tree):
            return [w.tree.first(num) for num in nums]
        with self.watched():
            trees, self.grown = grow_trees(
                w.draft, step_rows, w.slots, w.tree, self.guess_scores, w.draws, w.replay_of_nodes()
            )
        return trees

    def guessing_arrays(self, step_rows: Sequence[StepRow], rows: Rows, places: Places) -> Arrays:
        w = self.worker
        if not isinstance(w.tree, Tree):
            return self.after_arrays(rows)
        self.levels = lay_out_levels(step_rows, rows, w.tree, w.slots)
        return level_arrays(self.levels, step_rows, w.slots, w.draws, places) | self.after_arrays(rows)

    def after_arrays(self, rows: Rows) -> Arrays:
        """What the head computes behind the step by."""
        self.after = without_branches(self.rows, self.batch, rows, self.worker.slots)
        arrays = {f"{AFTER}{name}": array for name, array in self.after.arrays.items()}
        return arrays | kept_arrays(self.batch, self.after, rows)

    def guesses(self) -> tuple[Tensor, Tensor | None]:
        w = self.worker
        if self.grown is not None:
            return self.grown, None
        return guess_tree(w.draft, self.levels, self.tensors, w.slots, w.draws, self.guess_scores, w.replay_of_nodes())

    def path_kept(self, kept_row: Tensor, node: Tensor, num: Tensor) -> None:
        """What the head computes: while the slots' lengths are still those before the step."""
        w, t = self.worker, self.tensors
        assert self.after is not None
        mine = {name.removeprefix(AFTER): found for name, found in t.items() if name.startswith(AFTER)}
        self.kept_tensors = mine | w.slots.look_up(mine, max(self.after.context_lens))
        nodes = t["draft.tree.begin"][kept_row] + node
        self.source = t["draft.tree.source"].index_put((t["draft.tree.target"],), nodes)
        beyond = num.new_zeros(len(self.after.slots))
        self.beyond = beyond.index_put((t["draft.tree.row"],), t["draft.tree.levels"] - num)

    def _keep_up(self, wrong: Tensor | None) -> None:
        if self.after is None:
            return super()._keep_up(wrong)
        w = self.worker
        w.draft.keep_up(self.after, self.kept_tensors, w.slots, w.tap.features[self.source], self.beyond)
