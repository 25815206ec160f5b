"""A worker that verifies trees of guesses, which a feature head makes.

    guesses     lie behind a row's known tokens, node i at the place behind them i: so do their keys and values
    the model   computes them with positions by depth, and attention in which a node sees its ancestors
    kept        the path down the tree whose nodes are each what was chosen at their parent
    then        tokens, keys and values of this path move to where its positions belong, and the head computes it

Extends `DraftRun.add_arrays`, `compute`, `choose` and `verify`, and `FeatureRun._keep_up`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from reference_impl.annexes.penalties.counts import has_penalties
from reference_impl.annexes.speculative.candidates import NONE, Paths, first_of_equal, verified_children
from reference_impl.annexes.speculative.drafts import Verified, draft_arrays, put_drafts
from reference_impl.annexes.speculative.feature_head import FeatureDraft
from reference_impl.annexes.speculative.feature_worker import FeatureRun, FeatureWorker
from reference_impl.annexes.speculative.rejection import filtered, is_exact
from reference_impl.annexes.speculative.tree import Tree
from reference_impl.annexes.speculative.tree_cache import move_tokens
from reference_impl.annexes.speculative.tree_head import Level, guess_tree, lay_out_levels, level_arrays
from reference_impl.annexes.speculative.tree_layout import (
    in_trees,
    kept_arrays,
    rows_with,
    tree_arrays,
    verdict_arrays,
    without_branches,
)
from reference_impl.core.batch import HostBatch
from reference_impl.core.kv_cache import PagedKVCache

AFTER = "draft.after."  # before the names of arrays of `without_branches`


class TreeWorker(FeatureWorker):
    """tree: of which a row's guesses are the first nodes."""

    kv_cache: PagedKVCache
    draft: FeatureDraft

    def __init__(self, *args: Any, tree: Tree, **options: Any):
        super().__init__(*args, **options)
        self.tree, self.paths = tree, Paths.of(tree, self.slots.device)


class TreeRun(FeatureRun):
    worker: TreeWorker
    levels: list[Level]
    after: HostBatch | None = None  # the rows when only one path of each tree is left; None: no row has guesses

    def add_arrays(self) -> None:
        if not self.batch.drafts:
            return
        self._check()
        w = self.worker
        rows = rows_with(self.batch, w.tree)
        mine = [self.rows[self.batch.order[row]] for row in rows.row]  # as they begin on the host
        self.levels = lay_out_levels(mine, rows, w.tree, w.slots)
        self.after = without_branches(self.rows, self.batch, w.tree, w.slots)
        arrays = draft_arrays(self.batch, self.step) | tree_arrays(rows) | kept_arrays(self.batch, self.after, rows)
        places: dict[tuple[int, int], int] = {}
        if is_exact(w.sampler):
            verdicts, places = verdict_arrays(self.batch, rows, w.slots.host, self.step.step_id)
            arrays |= verdicts
        arrays |= level_arrays(self.levels, mine, w.slots, w.draws, places)
        arrays |= {f"{AFTER}{name}": array for name, array in self.after.arrays.items()}
        self.batch = in_trees(self.batch, rows)
        self.batch.arrays.update(arrays)

    def _check(self) -> None:
        super()._check()
        number = self.step.step_id
        for row in self.rows:
            if not row.num_drafts:
                continue
            if row.drafts:
                raise ValueError(f"step {number} names drafts, and this worker's feature head makes them")
            if row.num_tokens != 1 or row.num_drafts > len(self.worker.tree.parents):
                raise ValueError(
                    f"step {number}: a row has {row.num_tokens} known tokens and {row.num_drafts} guesses: expected 1, "
                    f"and at most the {len(self.worker.tree.parents)} of the tree"
                )
            if has_penalties(self.worker.slots.host[row.slot].sampling):
                raise ValueError(
                    f"step {number}: request {self.worker.slots.host[row.slot].request_id!r} has penalties, which "
                    "count the tokens before a position: of a tree there are several, so it is to have no guesses"
                )

    def compute(self) -> None:
        w, t = self.worker, self.tensors
        if self.after is not None:
            t["draft.tokens"], self.q = guess_tree(w.draft, self.levels, t, w.slots, w.draws)
            put_drafts(w.slots, t)
        super().compute()

    def choose(self) -> Tensor:
        tokens, t = super().choose(), self.tensors
        if "draft.tree.at" not in t:
            return tokens
        child, at = t["draft.tree.children"], t["draft.tree.at"]
        guesses = torch.where(child < 0, NONE, t["draft.tokens"][child.clamp(min=0)])
        p = filtered(self.scores, t, at)
        return tokens.index_copy(0, at, verified_children(p, self.q, guesses, t["draft.tree.verdicts"]))

    def verify(self, tokens: Tensor) -> Verified:
        """Keeps the right path: its tokens, keys and values move behind the known ones."""
        w, t = self.worker, self.tensors
        guesses, row, nth = t["draft.tokens"], t["draft.row"], t["draft.nth"]
        right = (tokens[t["draft.at"]] == guesses) & first_of_equal(guesses, t["draft.tree.earlier"])
        of_row = right.new_zeros(len(t["draft.num"]), len(w.paths.above))
        num, path = w.paths.deepest(of_row.index_put((row, nth), right))
        kept = torch.ones_like(tokens, dtype=torch.bool)
        kept[t["draft.tree.own"]] = (path[row] == nth[:, None]).any(1)

        kept_row, level = t["draft.tree.kept_row"], t["draft.tree.kept_level"]
        node = path[kept_row, level]
        node = torch.where(node < 0, level, node)  # behind the path's end all stays as it is
        slots, first = t["draft.slots"], t["draft.tree.first"]
        begin = w.slots.computed.index_select(0, slots) + t["draft.known"]  # where the first guess lies
        slot, start = slots[kept_row], begin[kept_row]
        for spec, table in zip(w.kv_specs, w.slots.tables, strict=True):
            size, places = spec.block_size, (start + node, start + level)
            sources, targets = (table[slot, at // size].long() * size + at % size for at in places)
            move_tokens(w.kv_cache, sources, targets)
        w.slots.tokens.index_put_((slots, begin), tokens[first].int())
        w.slots.tokens.index_put_((slot, start + level + 1), tokens[first[kept_row] + 1 + node].int())
        self._lay_out_kept(kept_row, node, num)
        return Verified(num, kept)

    def _lay_out_kept(self, kept_row: Tensor, node: Tensor, num: Tensor) -> None:
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
