"""Drafts from the target's hidden states, by a feature head or Medusa heads: after the model has run they are given
those of the step's tokens. A head's tree is drafted before the model runs; then the head computes the kept path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from reference_impl.core.batch import HostBatch
from reference_impl.core.sampler import TorchSampler
from reference_impl.core.staging import Arrays
from reference_impl.core.worker import StepRun
from reference_impl.features.speculative.feature_head import FeatureDraft, KeepsHidden
from reference_impl.features.speculative.growth import Growth
from reference_impl.features.speculative.medusa import MedusaDraft
from reference_impl.features.speculative.model_source import ModelSource, ModelStep
from reference_impl.features.speculative.step_source import StepSource
from reference_impl.features.speculative.tree import Tree
from reference_impl.features.speculative.tree_growing import grow_trees
from reference_impl.features.speculative.tree_head import Level, lay_out_levels, level_arrays, propose_tree
from reference_impl.features.speculative.tree_layout import Places, Rows, kept_arrays, without_branches
from reference_impl.interfaces import Sampler, StepRow

LOOKED_UP_BY = "slots", "query_lens", "token_slots", "offset", "query_start_loc"
AFTER = "draft.after."  # before the names of arrays of `without_branches`


class HeadSource(ModelSource):
    """Makes drafts by a head or heads. tap: stands for the target in the worker. tree: a row's drafts are its first
    nodes; or how a tree is grown; None: drafts are a chain."""

    draft: FeatureDraft | MedusaDraft

    def __init__(
        self, draft: FeatureDraft | MedusaDraft, sampler: Sampler | TorchSampler, tap: KeepsHidden,
        tree: Tree | Growth | None = None,
    ):  # fmt: skip
        super().__init__(draft, sampler)
        self.tap, self.tree = tap, tree
        if tree is not None:
            self.makes_trees, self.most_nodes, self.most_inner = True, tree.num_nodes, tree.num_inner

    def of(self, run: StepRun) -> StepSource:
        return HeadStep(self) if self.tree is None else TreeHeadStep(self, self.tree)


class HeadStep(ModelStep):
    known: Mapping[str, Tensor]  # of the step's batch, what the draft computes it by; with what was looked up

    def __init__(self, source: HeadSource):
        super().__init__(source)
        self.tap, self.head = source.tap, source.draft

    def after_model(self, run: StepRun) -> None:
        self.known = run.tensors
        if run.replayed:
            # Before lengths change. Rows that pad are left out: keys would be written for them.
            mine = {name: run.tensors[name][: len(run.batch.arrays[name])] for name in LOOKED_UP_BY}
            self.known = mine | run.worker.slots.look_up(mine, max(run.batch.context_lens))
        if not run.batch.sampling:  # chunks of prompts, whose next tokens are known
            self.keep_up(run, None)

    def taken(self, run: StepRun, accepted: Tensor | None) -> None:
        wrong = None
        if accepted is not None:
            t, slots = run.tensors, run.worker.slots
            of_slot = slots.computed.new_zeros(slots.num_slots + 1)
            of_slot.index_copy_(0, t["draft.slots"], t["draft.num"] - accepted)
            wrong = of_slot.index_select(0, self.known["slots"])
        self.keep_up(run, wrong)

    def keep_up(self, run: StepRun, wrong: Tensor | None) -> None:
        """Gives the head the step's hidden states, unless the step says that it need not keep up. wrong [rows]: how
        many of a row's tokens are drafts that were not kept; None: there are none."""
        if run.step.keeps_up:
            assert self.tap.features is not None
            with self.timed(run):
                self.head.keep_up(run.batch, self.known, run.worker.slots, self.tap.features, wrong)


class TreeHeadStep(HeadStep):
    head: FeatureDraft
    levels: Sequence[Level]
    after: HostBatch | None = None  # the rows when only one path of each tree is left; None: no row has drafts
    grown: Tensor | None = None  # the D drafts, if their tree was grown

    def __init__(self, source: HeadSource, tree: Tree | Growth):
        super().__init__(source)
        self.tree = tree

    def trees(self, run: StepRun, drafted: Sequence[StepRow]) -> Sequence[Tree]:
        if isinstance(self.tree, Tree):
            return [self.tree.first(row.num_drafts) for row in drafted]
        source, replay = self.source, None if self.source.graphs is None else self.source.graphs.replay_of_nodes()
        with self.timed(run):
            trees, self.grown = grow_trees(
                self.head, drafted, run.worker.slots, self.tree, self.scores_for(run), source.draws, replay
            )
        return trees

    def tree_arrays(
        self, run: StepRun, step_rows: Sequence[StepRow], drafted: Sequence[StepRow], rows: Rows, places: Places
    ) -> Arrays:
        slots = run.worker.slots
        self.after = without_branches(step_rows, run.batch, rows, slots)
        arrays = {f"{AFTER}{name}": array for name, array in self.after.arrays.items()}
        arrays |= kept_arrays(run.batch, self.after, rows)
        if not isinstance(self.tree, Tree):
            return arrays
        self.levels = lay_out_levels(drafted, rows, self.tree, slots)
        return level_arrays(self.levels, drafted, slots, self.source.draws, places) | arrays

    def draft(self, run: StepRun) -> Tensor | None:
        if not run.batch.drafts:
            return None
        if self.grown is not None:
            run.tensors["draft.tokens"] = self.grown
            return None
        source, replay = self.source, None if self.source.graphs is None else self.source.graphs.replay_of_nodes()
        run.tensors["draft.tokens"], q = propose_tree(
            self.head, self.levels, run.tensors, run.worker.slots, source.draws, self.scores_for(run), replay
        )
        return q

    def path_kept(self, run: StepRun, kept_row: Tensor, node: Tensor, num: Tensor) -> None:
        """Looks up what the head computes, while the slots' lengths are still those before the step."""
        t = run.tensors
        assert self.after is not None
        mine = {name.removeprefix(AFTER): found for name, found in t.items() if name.startswith(AFTER)}
        self.kept_tensors = mine | run.worker.slots.look_up(mine, max(self.after.context_lens))
        nodes = t["draft.tree.begin"][kept_row] + node
        self.kept_tokens = t["draft.tree.source"].index_put((t["draft.tree.target"],), nodes)
        beyond = num.new_zeros(len(self.after.slots))
        self.beyond = beyond.index_put((t["draft.tree.row"],), t["draft.tree.levels"] - num)

    def keep_up(self, run: StepRun, wrong: Tensor | None) -> None:
        if self.after is None:
            return super().keep_up(run, wrong)
        assert self.tap.features is not None
        features = self.tap.features[self.kept_tokens]
        self.head.keep_up(self.after, self.kept_tensors, run.worker.slots, features, self.beyond)
