"""The layout of draft trees in a step: arrays by which the device looks up, verifies and keeps drafts.

R is the number of rows with drafts, each with a tree of its own, and D the number of drafts in all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from reference_impl.core.batch import HostBatch, ragged
from reference_impl.core.philox import uniform
from reference_impl.core.slots import Slots
from reference_impl.core.staging import Arrays
from reference_impl.features.speculative.candidates import path_arrays
from reference_impl.features.speculative.rejection import VERDICT
from reference_impl.features.speculative.tree import Tree
from reference_impl.interfaces import Opened, StepRow

Ints = NDArray[np.int64]
Places = Mapping[tuple[int, int], int]  # see `verdict_arrays`


@dataclass(frozen=True)
class Rows:
    """The rows with drafts, in the order of the batch. row [R]: the row of the batch; first [R]: the logits behind its
    last known token; base [R]: which of the D is its first draft token."""

    trees: tuple[Tree, ...]
    row: Ints
    known: Ints
    first: Ints
    base: Ints

    def inner(self) -> Iterator[tuple[int, int, list[int]]]:
        """Yields (which of the R, node, its children) for each node with children, the root first."""
        for number, tree in enumerate(self.trees):
            for node, children in tree.children.items():
                yield number, node, children


def rows_with(batch: HostBatch, trees: Sequence[Tree]) -> Rows:
    """The `Rows` of a batch. trees [R]: each has as many nodes as its row has drafts."""
    row = np.flatnonzero(batch.drafts)
    num = np.array(batch.drafts)[row]
    return Rows(
        tuple(trees), row, np.array(batch.query_lens)[row] - num,
        np.searchsorted(batch.sampling, row), np.cumsum(num) - num,
    )  # fmt: skip


def in_trees(batch: HostBatch, rows: Rows) -> HostBatch:
    """The batch with positions by depth, and with the tokens that each token sees."""
    start = batch.arrays["query_start_loc"]
    lag, sees = (np.zeros(start[-1], np.int64) for _ in range(2))
    for row, known, tree in zip(rows.row, rows.known, rows.trees, strict=True):
        first, end = start[row], start[row + 1]
        sees[first:end] = tree.sees(int(known))
        lag[first + known : end] = np.arange(len(tree.parents)) - tree.depths
    at_logits = lag[batch.arrays["logits_indices"]]
    lens = batch.arrays["sampling_lens"] - at_logits
    arrays = batch.arrays | {"lag": lag, "ancestors": sees, "sampling_lens": lens}
    return replace(batch, arrays=arrays, lengths=batch.lengths - at_logits)


def tree_arrays(rows: Rows) -> Arrays:
    """The arrays by which drafts are kept, beside the `draft_arrays`, whose at [D] is replaced by the logits of a
    draft's parent.

    The `Paths` of the R trees are among them. own [D]: a draft's own logits. earlier [D, width - 1]: its siblings
    before it, of the D, -1 behind them. first [R]: see `Rows`. kept_row, kept_level [T]: for each level of each of the
    R, T in all.
    """
    above = np.concatenate([np.array(tree.parents) for tree in rows.trees])
    num, levels = ([of(tree) for tree in rows.trees] for of in (lambda t: len(t.parents), lambda t: t.num_levels))
    first, nth = np.repeat(rows.first, num), np.concatenate([np.arange(n) for n in num])
    earlier = np.full((sum(num), max(tree.width for tree in rows.trees) - 1), -1, np.int64)
    for base, tree in zip(rows.base, rows.trees, strict=True):
        found = np.where(tree.earlier < 0, -1, tree.earlier + base)
        earlier[base : base + len(found), : found.shape[1]] = found
    paths = {f"draft.tree.{name}": array for name, array in path_arrays(rows.trees).items()}
    return paths | {
        "draft.at": first + 1 + above,
        "draft.tree.own": first + 1 + nth,
        "draft.tree.earlier": earlier,
        "draft.tree.first": rows.first,
        "draft.tree.kept_row": np.repeat(np.arange(len(levels)), levels),
        "draft.tree.kept_level": np.concatenate([np.arange(n) for n in levels]),
    }


def paths_to(rows: Rows, num_logits: int) -> Ints:
    """Which of the D drafts are on the path to each of a step's logits, [num_logits, num_levels], -1 behind them."""
    found = np.full((num_logits, max(tree.num_levels for tree in rows.trees)), -1, np.int64)
    for first, base, tree in zip(rows.first, rows.base, rows.trees, strict=True):
        nodes = found[first + 1 : first + 1 + tree.num_nodes, : tree.num_levels]
        nodes[:] = np.where(tree.lineage < 0, -1, tree.lineage + base)
    return found


def verdict_arrays(
    batch: HostBatch, rows: Rows, requests: Mapping[int, Opened], step_id: int
) -> tuple[Arrays, dict[tuple[int, int], int]]:
    """The arrays that `verified_children` needs, none if all requests with drafts have a seed or are greedy; and the
    places, {(which of the R, node): which of the N nodes that it is called for}.

    at [N]: the node's logits. children [N, m]: which of the D, -1 behind them. verdicts [m + 1, N]: its u. A number is
    used once: it depends on the step and the node, as in `rejection.py`.
    """
    drawn = [requests[batch.slots[row]].sampling for row in rows.row]
    free = [sampling.seed is None and sampling.temperature > 0 for sampling in drawn]
    nodes = [(number, node, children) for number, node, children in rows.inner() if free[number]]
    if not nodes:
        return {}, {}
    at = np.array([rows.first[number] + 1 + node for number, node, _ in nodes])
    children = padded([[rows.base[number] + child for child in mine] for number, _, mine in nodes])
    s = batch.settings[at]
    which = np.array([node + 1 for _, node, _ in nodes])
    draws = which * (children.shape[1] + 1) + np.arange(children.shape[1] + 1)[:, None]
    u = uniform(s["seed"].view(np.uint64), s["sample_index"] + VERDICT, step_id, draws)
    arrays = {"draft.tree.at": at, "draft.tree.children": children, "draft.tree.verdicts": u}
    return arrays, {(number, node): which for which, (number, node, _) in enumerate(nodes)}


def padded(lists: Sequence[Sequence[int]]) -> Ints:
    """The lists as one array [len(lists), the longest], -1 behind the shorter ones."""
    found = np.full((len(lists), max(map(len, lists))), -1, np.int64)
    for row, values in enumerate(lists):
        found[row, : len(values)] = values
    return found


def without_branches(step_rows: Sequence[StepRow], batch: HostBatch, rows: Rows, slots: Slots) -> HostBatch:
    """The batch of a step's rows when only one path of each tree is left, with as many drafts as a path has at most. In
    the order of the step's batch."""
    kept = list(step_rows)
    for row, tree in zip(rows.row.tolist(), rows.trees, strict=True):
        at = batch.order[row]
        kept[at] = kept[at]._replace(num_drafts=tree.num_levels)
    return ragged(kept, slots, np.array(batch.order))


def kept_arrays(batch: HostBatch, after: HostBatch, rows: Rows) -> Arrays:
    """The arrays that lead from the step's tokens to those of `without_branches`. source [tokens of after]: which of
    the step's tokens, right except for drafts; target [T]: those of drafts, level by level; begin [R]: the row's first
    draft, among the step's tokens; row [R]: the row of after."""
    start, new = (b.arrays["query_start_loc"].astype(np.int64) for b in (batch, after))
    row = np.repeat(np.arange(len(after.slots)), after.query_lens)
    offset = np.arange(len(row)) - new[row]
    levels = [tree.num_levels for tree in rows.trees]
    begin = np.repeat(new[rows.row] + rows.known, levels)
    return {
        "draft.tree.source": start[row] + offset,
        "draft.tree.target": begin + np.concatenate([np.arange(n) for n in levels]),
        "draft.tree.begin": start[rows.row] + rows.known,
        "draft.tree.row": rows.row,
        "draft.tree.levels": np.array(levels),
    }
