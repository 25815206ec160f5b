"""A worker that verifies trees of guesses.

    guesses     lie behind a row's known tokens, node i at the place behind them i: so do their keys and values
    the model   computes them with positions by depth, and attention in which a node sees its ancestors
    kept        the path down the tree whose nodes are each what was chosen at their parent
    then        tokens, keys and values of this path move to where its positions belong

Who guesses says which tree each row has, and what its nodes are: a feature head (`tree_head_worker.py`), or the model
itself (`lookahead_worker.py`). Extends `DraftRun.add_arrays`, `compute`, `choose` and `verify`, and
`PenaltyRun.guessed`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from reference_impl.core.kv_cache import PagedKVCache
from reference_impl.core.staging import Arrays, to_device
from reference_impl.features.penalties.worker import PenaltyRun, PenaltyWorker
from reference_impl.features.speculative.candidates import NONE, Paths, first_of_equal, verified_children
from reference_impl.features.speculative.drafts import Verified, draft_arrays, put_drafts
from reference_impl.features.speculative.rejection import filtered, is_exact
from reference_impl.features.speculative.tree import Tree
from reference_impl.features.speculative.tree_cache import move_tokens
from reference_impl.features.speculative.tree_layout import (
    Ints,
    Rows,
    in_trees,
    paths_to,
    rows_with,
    tree_arrays,
    verdict_arrays,
)
from reference_impl.features.speculative.worker import DraftRun, DraftWorker
from reference_impl.interfaces import StepRow

Places = Mapping[tuple[int, int], int]  # as of `verdict_arrays`


class TreeWorker(DraftWorker, PenaltyWorker):
    """most_nodes: guesses that a row may have."""

    kv_cache: PagedKVCache
    most_nodes: int
    makes_trees = True

    @property
    def makes_drafts(self) -> bool:
        return True


class TreeRun(DraftRun, PenaltyRun, ABC):
    worker: TreeWorker
    step_trees: Sequence[Tree]  # of the R rows with guesses
    paths: Ints  # [logits, num_levels]: of the D, the guesses on the path to each of the logits, -1 behind them

    @abstractmethod
    def trees(self, step_rows: Sequence[StepRow]) -> Sequence[Tree]:
        """Of each of the R rows with guesses, in the order of the batch, a tree of as many nodes as these are.
        step_rows [R]: they, as they begin on the host."""

    @abstractmethod
    def guessing_arrays(self, step_rows: Sequence[StepRow], rows: Rows, places: Places) -> Arrays:
        """What `guesses` looks up by."""

    @abstractmethod
    def guesses(self) -> tuple[Tensor, Tensor | None]:
        """The D guesses, [D] int64, and what those of the N nodes of `verdict_arrays` were drawn from, [N, vocab_size];
        None: guesses that were not drawn."""

    def path_kept(self, kept_row: Tensor, node: Tensor, num: Tensor) -> None:
        """Of each level of each row the node that is kept, and how many levels, before the slots' lengths change."""

    def add_arrays(self) -> None:
        if not self.batch.drafts:
            return
        self._check()
        w = self.worker
        # As they begin on the host.
        mine = [self.rows[self.batch.order[row]] for row, num in enumerate(self.batch.drafts) if num]
        trees = self.trees(mine)
        rows, self.step_trees = rows_with(self.batch, trees), trees
        self.paths = paths_to(rows, len(self.batch.sampling))
        arrays = draft_arrays(self.batch, self.step) | tree_arrays(rows)
        places: Places = {}
        if is_exact(w.sampler):
            verdicts, places = verdict_arrays(self.batch, rows, w.slots.host, self.step.step_id)
            arrays |= verdicts
        arrays |= self.guessing_arrays(mine, rows, places)
        self.batch = in_trees(self.batch, rows)
        self.batch.arrays.update(arrays)

    def _check(self) -> None:
        super()._check()
        number = self.step.step_id
        for row in self.rows:
            if not row.num_drafts:
                continue
            if row.drafts:
                raise ValueError(f"step {number} names drafts, and this worker makes trees of them itself")
            if row.num_tokens != 1 or row.num_drafts > self.worker.most_nodes:
                raise ValueError(
                    f"step {number}: a row has {row.num_tokens} known tokens and {row.num_drafts} guesses: expected 1, "
                    f"and at most the {self.worker.most_nodes} of the tree"
                )

    def compute(self) -> None:
        if self.batch.drafts:
            self.tensors["draft.tokens"], self.q = self.guesses()
            put_drafts(self.worker.slots, self.tensors)
        super().compute()

    def parents(self) -> Sequence[Sequence[int]]:
        return [tree.parents for tree in self.step_trees]

    def own_logits(self) -> Ints:
        return self.batch.arrays["draft.tree.own"]

    def guessed(self, rows: Ints) -> tuple[Tensor, Tensor] | None:
        """Those on the path to a node: each has another text before it."""
        which, level = (self.paths[rows] >= 0).nonzero()
        if not len(which):
            return None
        t = to_device({"which": which, "guess": self.paths[rows][which, level]}, self.worker.slots.device)
        return t["which"], self.tensors["draft.tokens"][t["guess"]]

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
        if "draft.cut" in t:  # as of `masked.py`
            right &= ~t["draft.cut"]
        paths = Paths(*(t[f"draft.tree.{name}"] for name in ("above", "depths", "lineage")))
        of_row = torch.zeros_like(paths.above, dtype=torch.bool)
        num, path = paths.deepest(of_row.index_put((row, nth), right))
        kept = torch.ones_like(tokens, dtype=torch.bool)
        kept[t["draft.tree.own"]] = (path[row] == nth[:, None]).any(1)

        kept_row, level = t["draft.tree.kept_row"], t["draft.tree.kept_level"]
        node = path[kept_row, level]
        node = torch.where(node < 0, level, node)  # behind the path's end all stays as it is
        slots, first = t["draft.slots"], t["draft.tree.first"]
        begin = w.slots.computed.index_select(0, slots) + t["draft.known"]  # where the first guess lies
        slot, start = slots[kept_row], begin[kept_row]
        self._move(slot, start + node, start + level)
        w.slots.tokens.index_put_((slots, begin), tokens[first].int())
        w.slots.tokens.index_put_((slot, start + level + 1), tokens[first[kept_row] + 1 + node].int())
        self.path_kept(kept_row, node, num)
        return Verified(num, kept)

    def _move(self, slot: Tensor, *places: Tensor) -> None:
        """Keys and values of requests, from places to others, [tokens] each."""
        w = self.worker
        for spec, table in zip(w.kv_specs, w.slots.tables, strict=True):
            size = spec.block_size
            sources, targets = (table[slot, at // size].long() * size + at % size for at in places)
            move_tokens(w.kv_cache, sources, targets)
