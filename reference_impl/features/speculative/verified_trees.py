"""The drafts of a row in a tree.

    drafts      lie behind a row's known tokens, node i at place i behind them, and so do their keys and values
    the model   computes them with positions by depth, and attention in which a node sees its ancestors
    kept        the path down the tree whose nodes are each what was chosen at their parent
    then        tokens, keys and values of this path move to where its positions belong

The source says which tree each row has, and what its nodes are: a feature head (`head_source.py`), or the model itself
(`lookahead_source.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from reference_impl.core.staging import to_device
from reference_impl.core.worker import StepRun
from reference_impl.features.speculative.candidates import NONE, Paths, first_of_equal, verified_children
from reference_impl.features.speculative.drafts import Verified, draft_arrays
from reference_impl.features.speculative.rejection import filtered, is_exact
from reference_impl.features.speculative.tree import Tree
from reference_impl.features.speculative.tree_cache import move_tokens
from reference_impl.features.speculative.tree_layout import (
    Ints,
    Places,
    in_trees,
    paths_to,
    rows_with,
    tree_arrays,
    verdict_arrays,
)


class VerifiedTrees:
    """How drafts in trees are laid out, chosen and verified. part: the step's `DraftPart`. trees: those of the R rows
    with drafts. paths [logits, num_levels]: which of the D drafts are on the path to each of the logits, -1 behind
    them."""

    trees: Sequence[Tree]
    paths: Ints

    def lay_out(self, run: StepRun, part: Any) -> None:
        """Replaces the batch, and adds the arrays by which drafts are looked up. ValueError for a step that names
        drafts, or a row that does not fit a tree."""
        if not run.batch.drafts:
            return
        self._check(run, part)
        w, batch = run.worker, run.batch
        mine = [part.rows[batch.order[row]] for row, num in enumerate(batch.drafts) if num]
        trees = part.source.trees(run, mine)
        rows, self.trees = rows_with(batch, trees), trees
        self.paths = paths_to(rows, len(batch.sampling))
        arrays = draft_arrays(batch, run.step) | tree_arrays(rows)
        places: Places = {}
        if is_exact(w.sampler):
            verdicts, places = verdict_arrays(batch, rows, w.slots.host, run.step.step_id)
            arrays |= verdicts
        arrays |= part.source.tree_arrays(run, part.rows, mine, rows, places)
        run.batch = in_trees(batch, rows)
        run.batch.arrays.update(arrays)

    def _check(self, run: StepRun, part: Any) -> None:
        number, most = run.step.step_id, part.drafting.source.most_nodes
        for row in part.rows:
            if not row.num_drafts:
                continue
            if row.drafts:
                raise ValueError(f"step {number} names drafts, and this worker makes trees of them itself")
            if row.num_tokens != 1 or row.num_drafts > most:
                raise ValueError(
                    f"step {number}: a row has {row.num_tokens} known tokens and {row.num_drafts} drafts: expected 1, "
                    f"and at most the {most} of the tree"
                )

    def parents(self, run: StepRun) -> Sequence[Sequence[int]]:
        return [tree.parents for tree in self.trees]

    def own_logits(self, run: StepRun) -> Ints:
        return run.batch.arrays["draft.tree.own"]

    def before(self, run: StepRun, rows: Ints) -> tuple[Tensor, Tensor] | None:
        """The drafts before the positions of some logits, rows [P]: those on the path to a node. (which of the P,
        token); None: there are none."""
        which, level = (self.paths[rows] >= 0).nonzero()
        if not len(which):
            return None
        t = to_device({"which": which, "draft": self.paths[rows][which, level]}, run.worker.slots.device)
        return t["which"], run.tensors["draft.tokens"][t["draft"]]

    def chosen(self, run: StepRun, part: Any, tokens: Tensor) -> Tensor:
        t = run.tensors
        if "draft.tree.at" not in t:
            return tokens
        child, at = t["draft.tree.children"], t["draft.tree.at"]
        drafts = torch.where(child < 0, NONE, t["draft.tokens"][child.clamp(min=0)])
        p = filtered(run.scores, t, at)
        return tokens.index_copy(0, at, verified_children(p, part.q, drafts, t["draft.tree.verdicts"]))

    def verify(self, run: StepRun, part: Any, tokens: Tensor, cut: Tensor | None) -> Verified:
        """Keeps the right path: its tokens, keys and values move behind the known ones. cut: see `Chain.verify`."""
        w, t = run.worker, run.tensors
        drafts, row, nth = t["draft.tokens"], t["draft.row"], t["draft.nth"]
        right = (tokens[t["draft.at"]] == drafts) & first_of_equal(drafts, t["draft.tree.earlier"])
        if cut is not None:
            right &= ~cut
        paths = Paths(*(t[f"draft.tree.{name}"] for name in ("above", "depths", "lineage")))
        of_row = torch.zeros_like(paths.above, dtype=torch.bool)
        num, path = paths.deepest(of_row.index_put((row, nth), right))
        kept = torch.ones_like(tokens, dtype=torch.bool)
        kept[t["draft.tree.own"]] = (path[row] == nth[:, None]).any(1)

        kept_row, level = t["draft.tree.kept_row"], t["draft.tree.kept_level"]
        node = path[kept_row, level]
        node = torch.where(node < 0, level, node)  # behind the path's end all stays as it is
        slots, first = t["draft.slots"], t["draft.tree.first"]
        begin = w.slots.computed.index_select(0, slots) + t["draft.known"]  # where the first draft lies
        slot, start = slots[kept_row], begin[kept_row]
        move_keys_and_values(run, slot, start + node, start + level)
        w.slots.tokens.index_put_((slots, begin), tokens[first].int())
        w.slots.tokens.index_put_((slot, start + level + 1), tokens[first[kept_row] + 1 + node].int())
        part.source.path_kept(run, kept_row, node, num)
        return Verified(num, kept)


def move_keys_and_values(run: StepRun, slot: Tensor, *places: Tensor) -> None:
    """Moves keys and values of requests in these slots from places to others, [tokens] each."""
    w: Any = run.worker  # its cache is a PagedKVCache
    for spec, table in zip(w.kv_specs, w.slots.tables, strict=True):
        size = spec.block_size
        sources, targets = (table[slot, at // size].long() * size + at % size for at in places)
        move_tokens(w.kv_cache, sources, targets)
