"""A feature head drafts a tree (EAGLE, Li et al. 2024, with a tree of fixed shape).

    level 0         children of the root, from what is in `ahead` (feature_head.py)
    level 1 ...     the head runs over the tree's inner nodes so far, each with the hidden state of its parent in place
                    of the target's; children of those on the last level are drafted

The head's cache has the entries of inner nodes behind the context's, in their order: there each sees its ancestors.
After the step the head computes the kept path, and what is left of other nodes is overwritten.

Children of a node for a request without a seed are drawn from q one after another, each without those before. For other
requests the first is what the position's own number draws (or the likeliest), followed by the likeliest of the rest.
With Gumbel noise they are those of the largest log q + noise, among which the target's token is most often.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from reference_impl.core.batch import HostBatch, lay_out
from reference_impl.core.philox import uniform
from reference_impl.core.sampler import TorchSampler
from reference_impl.core.slots import Slots
from reference_impl.core.staging import Arrays
from reference_impl.features.gumbel.sampler import GumbelSampler
from reference_impl.features.speculative.candidates import drawn_without_replacement
from reference_impl.features.speculative.draft_model import PREFIX, ReplayNodes, by_pass
from reference_impl.features.speculative.draft_scores import DraftScores
from reference_impl.features.speculative.feature_head import FeatureDraft
from reference_impl.features.speculative.rejection import DRAFT, filtered
from reference_impl.features.speculative.tree import ROOT, Tree
from reference_impl.features.speculative.tree_layout import Rows, padded
from reference_impl.interfaces import StepRow


@dataclass(frozen=True)
class Level:
    """A pass: P nodes whose children are drafted. batch: what the head computes for it; None at the root. parents [P]:
    (which of the R rows, node)."""

    batch: HostBatch | None
    parents: Sequence[tuple[int, int]]
    arrays: Arrays


def lay_out_levels(step_rows: Sequence[StepRow], rows: Rows, tree: Tree, slots: Slots) -> list[Level]:
    """The passes that draft trees of this shape. step_rows [R]: the rows with drafts, in the order of `rows`; each has
    one known token."""
    size = len(tree.parents) + 1  # of a row in what the head gave: the root, then all nodes
    parents = [(number, ROOT) for number in range(len(step_rows))]
    root: Arrays = {"parent_slots": np.array([row.slot for row in step_rows])}
    levels = [Level(None, parents, root | _children(parents, rows, size) | _path(parents, rows, 0))]
    for depth in range(tree.num_levels - 1):
        having = [n for n, t in enumerate(rows.trees) if any(t.depths[node] == depth for node in t.inner)]
        if not having:
            break
        levels.append(_lay_out_level(depth, having, step_rows, rows, size, slots))
    return levels


def _lay_out_level(
    depth: int, having: Sequence[int], step_rows: Sequence[StepRow], rows: Rows, size: int, slots: Slots
) -> Level:
    """The pass over inner nodes of depths 0 to `depth`, for the rows that have one at `depth`."""
    computed = {n: [node for node in rows.trees[n].inner if rows.trees[n].depths[node] <= depth] for n in having}
    batch = lay_out([StepRow(step_rows[n].slot, step_rows[n].start, len(computed[n]), True) for n in having], slots)
    order = [having[at] for at in batch.order]
    nodes = [(n, node) for n in order for node in computed[n]]
    depths = np.array([rows.trees[n].depths[node] for n, node in nodes])
    parents = [(n, node) for (n, node), its in zip(nodes, depths, strict=True) if its == depth]
    arrays = batch.arrays | {
        "logits_indices": np.flatnonzero(depths == depth),
        "lag": batch.arrays["offset"] - depths,
        "ancestors": np.concatenate([_among(rows.trees[n], computed[n]) for n in order]),
        "draft": np.array([rows.base[n] + node for n, node in nodes]),
        "before": np.array([n * size + 1 + rows.trees[n].parents[node] for n, node in nodes]),
        "parent_slots": np.array([step_rows[n].slot for n, _ in parents]),
    }
    arrays |= _children(parents, rows, size) | _path(parents, rows, depth + 1)
    return Level(replace(batch, arrays=arrays), parents, arrays)


def _among(tree: Tree, nodes: Sequence[int]) -> np.ndarray:
    """Which of these nodes each of them sees, as bits. nodes: those of the first levels that have children."""
    number = {ROOT: ROOT} | {node: at for at, node in enumerate(nodes)}
    return Tree(tuple(number[tree.parents[node]] for node in nodes)).sees(0)


def _children(parents: Sequence[tuple[int, int]], rows: Rows, size: int) -> Arrays:
    """The arrays of a pass for children. child [P, most children]: which of the D drafts, -1 behind them. node [P]:
    where the head's hidden state of the parent goes."""
    mine = [[rows.base[n] + child for child in rows.trees[n].children[node]] for n, node in parents]
    return {"child": padded(mine), "node": np.array([n * size + 1 + node for n, node in parents])}


def _path(parents: Sequence[tuple[int, int]], rows: Rows, length: int) -> Arrays:
    """The array path [P, length]: which of the D drafts are on the path to each parent, itself included."""
    found = [rows.base[n] + rows.trees[n].lineage[node][:length] for n, node in parents if length]
    return {"path": np.array(found, np.int64).reshape(len(parents), length)}


def level_arrays(
    levels: Sequence[Level], step_rows: Sequence[StepRow], slots: Slots, sampler: TorchSampler,
    places: Mapping[tuple[int, int], int],
) -> Arrays:  # fmt: skip
    """The arrays by which `propose_tree` looks up and draws. places: see `verdict_arrays`; with some, also unseeded,
    place, numbers: which of the P, which of the N, and u of `drawn_without_replacement`."""
    found: Arrays = {}
    for number, level in enumerate(levels):
        settings = slots.settings[[step_rows[n].slot for n, _ in level.parents]]
        lengths = np.array([step_rows[n].start + 1 + number for n, _ in level.parents])
        arrays = level.arrays | sampler.columns(settings, lengths)
        if unseeded := [at for at, parent in enumerate(level.parents) if parent in places]:
            s, siblings = settings[unseeded], np.arange(level.arrays["child"].shape[1])[:, None]
            arrays["unseeded"] = np.array(unseeded)
            arrays["place"] = np.array([places[level.parents[at]] for at in unseeded])
            arrays["numbers"] = uniform(
                s["seed"].view(np.uint64), s["sample_index"] + DRAFT, lengths[unseeded], siblings
            )
        found |= {f"{PREFIX}{number}.{name}": array for name, array in arrays.items()}
    return found


def propose_tree(
    draft: FeatureDraft, levels: Sequence[Level], t: Mapping[str, Tensor], slots: Slots, sampler: TorchSampler,
    scores: DraftScores, replay: ReplayNodes | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The D drafts, [D] int64; and the distributions that those of the N nodes were drawn from, [N, vocab_size], None
    without any. t: with the `level_arrays`, on the device. replay: computes passes by CUDA graphs, where it can."""
    num_rows, num_drafts = len(levels[0].parents), len(t["draft.row"])
    passes = by_pass(t, len(levels))
    size = 1 + max(int(level.arrays["node"].max()) for level in levels)
    hidden_of = draft.ahead.new_zeros(max(size, num_rows), draft.ahead.shape[1])
    tokens = t["draft.row"].new_zeros(num_drafts + 1)  # the last one is that of children that there are not
    q = None
    for number, (level, mine) in enumerate(zip(levels, passes, strict=True)):
        if level.batch is None:
            hidden = draft.ahead.index_select(0, mine["parent_slots"])
            logits = draft.model.logits(hidden).to(draft.logits_dtype)
        else:
            logits, hidden = of_nodes(
                draft, level.batch, mine, slots, tokens[mine["draft"]], hidden_of[mine["before"]], replay
            )
        hidden_of.index_copy_(0, mine["node"], hidden)
        mine["sample_positions"] = slots.computed.index_select(0, mine["parent_slots"]) + 1 + number
        moved = scores(logits, level.arrays["parent_slots"].tolist(), mine["sample_positions"], tokens[mine["path"]])
        tokens[mine["child"]], probs = _drawn(moved, mine, sampler)
        if probs is not None:
            q = probs.new_zeros(len(t["draft.tree.at"]), probs.shape[1]) if q is None else q
            q.index_copy_(0, mine["place"], probs)
    return tokens[:num_drafts], q


def of_nodes(
    draft: FeatureDraft, batch: HostBatch, t: dict[str, Tensor], slots: Slots, tokens: Tensor, before: Tensor,
    replay: ReplayNodes | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The logits of a pass over inner nodes, and the hidden states there. t: the batch's arrays, on the device."""
    found = None if replay is None else replay(batch, tokens, before, t["ancestors"])
    if found is not None:
        logits, hidden = found
        return logits[t["logits_indices"]], hidden[t["logits_indices"]]
    hidden = draft.run_nodes(batch, t, slots, tokens, before)
    return draft.model.logits(hidden).to(draft.logits_dtype), hidden


def _drawn(logits: Tensor, t: Mapping[str, Tensor], sampler: TorchSampler) -> tuple[Tensor, Tensor | None]:
    """The children, [P, most children] int64; and the distributions of those that were drawn without replacement; None
    if none were. logits [P, vocab_size]."""
    width = t["child"].shape[1]
    if isinstance(sampler, GumbelSampler):
        tokens = sampler.ranked(logits, t, width)
    else:
        first = sampler.choose(logits, t)[:, None]
        tokens = torch.cat((first, logits.scatter(1, first, -torch.inf).topk(width - 1).indices), 1)
    if "unseeded" not in t:
        return tokens, None
    q = filtered(logits, t, t["unseeded"])
    return tokens.index_copy(0, t["unseeded"], drawn_without_replacement(q, t["numbers"])), q
