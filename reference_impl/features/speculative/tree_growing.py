"""A feature head grows a draft tree (EAGLE-2, Li et al. 2024): where it is sure the tree is deep, where it is not
the tree is wide.

    score      of a node: the product of the head's probabilities along its path, which estimates how likely it is kept
    expand     level by level: of a level's nodes the best `width` get their `width` likeliest children
    rerank     of all nodes that were grown the best `num_nodes` are verified

No node scores more than its parent, and among equals the parent comes first: so the best nodes are a tree.

The tree is known only when it is grown, so a step is laid out after that: its submission waits for the device. Nodes
are the likeliest, and not drawn: for a request without a seed each is kept with the target's own probability
(`candidates.py`). A request with a seed is drawn by numbers that are known already. With Gumbel noise, q / E in place
of q says which tokens these favour: a node's children are those of the largest q / E, and its score their share of the
sum. Without a seed that would not be right: the positions' own numbers, which draw where there are no children, must
have no influence on which nodes there are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from reference_impl.core.batch import HostBatch, lay_out
from reference_impl.core.sampler import TorchSampler
from reference_impl.core.slots import Slots
from reference_impl.core.staging import to_device
from reference_impl.features.gumbel.sampler import GumbelSampler
from reference_impl.features.speculative.draft_model import ReplayNodes
from reference_impl.features.speculative.draft_scores import DraftScores
from reference_impl.features.speculative.feature_head import FeatureDraft
from reference_impl.features.speculative.growth import Growth
from reference_impl.features.speculative.tree import ROOT, Tree
from reference_impl.features.speculative.tree_head import of_nodes
from reference_impl.interfaces import StepRow


@dataclass
class Grown:
    """The C nodes that were grown for each of R rows. tokens [R, C]; scores [R, C], logarithms; parents [R, C]: which
    of the C, or ROOT."""

    tokens: Tensor
    scores: Tensor
    parents: Tensor

    def best(self, nums: Sequence[int]) -> tuple[list[Tree], list[Tensor]]:
        """The trees of the best nodes, so many for each row, and their tokens."""
        order = self.scores.sort(dim=1, descending=True, stable=True).indices
        chosen = [order[row, :num].sort().values for row, num in enumerate(nums)]
        above = [self.parents[row, mine] for row, mine in enumerate(chosen)]
        tokens = [self.tokens[row, mine] for row, mine in enumerate(chosen)]
        trees = []
        for mine, parents in zip(chosen, above, strict=True):
            number = {ROOT: ROOT} | {node: at for at, node in enumerate(mine.tolist())}
            trees.append(Tree(tuple(number[parent] for parent in parents.tolist())))
        return trees, tokens


@dataclass
class Noise:
    """The tokens that the positions' random numbers favour. t: the sampler's columns, [R] each; seeded [R]: which rows'
    numbers count."""

    sampler: GumbelSampler
    t: Mapping[str, Tensor]
    seeded: Tensor

    @staticmethod
    def of(rows: Sequence[StepRow], slots: Slots, sampler: TorchSampler) -> Noise | None:
        """The noise of these rows; None: their drafts depend on no random number."""
        asked = [slots.host[row.slot].sampling for row in rows]
        seeded = np.array([sampling.seed is not None and sampling.temperature > 0 for sampling in asked])
        if not isinstance(sampler, GumbelSampler) or not seeded.any():
            return None
        columns = sampler.columns(slots.settings[[row.slot for row in rows]], np.zeros(len(rows), np.int64))
        t = to_device({**columns, "seeded": seeded}, slots.device)
        return Noise(sampler, t, t["seeded"])

    def over(self, logprobs: Tensor, logits: Tensor, positions: Tensor) -> Tensor:
        """The numbers by which children are chosen: logprobs, in rows with a seed the logarithms of shares. All
        [R x nodes, ...]."""
        each = len(positions) // len(self.seeded)
        t = {name: column.repeat_interleave(each) for name, column in self.t.items()}
        shares = self.sampler.shares(logits, {**t, "sample_positions": positions})
        return torch.where(t["seeded"][:, None], shares.log(), logprobs)


def grow_trees(
    draft: FeatureDraft, rows: Sequence[StepRow], slots: Slots, growth: Growth, scores: DraftScores,
    sampler: TorchSampler, replay: ReplayNodes | None = None,
) -> tuple[list[Tree], Tensor]:  # fmt: skip
    """The tree of each of the rows [R] with drafts, and the D drafts, [D] int64, row by row. replay: see
    `propose_tree`."""
    trees: dict[int, Tree] = {}
    tokens: dict[int, Tensor] = {}
    levels = [growth.levels_of(row.num_drafts) for row in rows]
    for num in sorted(set(levels)):
        mine = [at for at, its in enumerate(levels) if its == num]
        grown = grow(draft, [rows[at] for at in mine], slots, growth.width, num, scores, sampler, replay)
        for at, tree, of_tree in zip(mine, *grown.best([rows[at].num_drafts for at in mine]), strict=True):
            trees[at], tokens[at] = tree, of_tree
    return [trees[at] for at in range(len(rows))], torch.cat([tokens[at] for at in range(len(rows))])


def grow(
    draft: FeatureDraft, rows: Sequence[StepRow], slots: Slots, width: int, num_levels: int, scores_of: DraftScores,
    sampler: TorchSampler, replay: ReplayNodes | None = None,
) -> Grown:  # fmt: skip
    """Grows num_levels levels for the rows [R], which have room for width x (num_levels - 1) nodes."""
    k, num_rows = width, len(rows)
    slot = to_device({"slots": np.array([row.slot for row in rows])}, slots.device)["slots"]
    ahead = draft.ahead.index_select(0, slot)[:, None]  # [R, nodes, hidden_size]: what the children of nodes come of
    path = slot.new_empty(num_rows, 1, 0)  # [R, nodes, depth]: the tokens down to each
    move = partial(_moved, rows, slots.computed.index_select(0, slot) + 1, scores_of, Noise.of(rows, slots, sampler))
    logits = draft.model.logits(ahead.flatten(0, 1)).to(draft.logits_dtype)
    tokens, scores = _children(logits, ahead.new_zeros(num_rows, 1, dtype=torch.float64), k, move, path)
    found = Grown(tokens, scores, torch.full_like(tokens, ROOT))
    # For the expanded nodes, E so far: which of the C, what they see of each other as bits, and the `ahead` of their
    # parents.
    inner, sees = tokens[:, :0], tokens[:, :0]
    before = ahead[:, :0]
    for depth in range(1, num_levels):
        level = found.scores[:, -tokens.shape[1] :].sort(dim=1, descending=True, stable=True).indices[:, :k]
        level = level.sort(1).values + found.tokens.shape[1] - tokens.shape[1]
        parents = found.parents.gather(1, level)
        where = (inner[:, None] == parents[:, :, None]).long()  # [R, k, E]: one-hot, of those below level 0
        own = 1 << torch.arange(inner.shape[1], inner.shape[1] + k, device=slots.device)
        sees = torch.cat((sees, (where * sees[:, None]).sum(2) + own), 1)
        at = where.argmax(2) if depth > 1 else torch.zeros_like(level)
        before = torch.cat((before, _of_parents(ahead, at, depth, k)), 1)
        path = torch.cat((_of_parents(path, at, depth, k), found.tokens.gather(1, level)[:, :, None]), 2)
        inner = torch.cat((inner, level), 1)
        logits, ahead = _run(draft, rows, depth, k, slots, found.tokens.gather(1, inner), sees, before, replay)
        tokens, scores = _children(logits, found.scores.gather(1, level), k, move, path)
        found = Grown(
            torch.cat((found.tokens, tokens), 1), torch.cat((found.scores, scores), 1),
            torch.cat((found.parents, level.repeat_interleave(k, 1)), 1),
        )  # fmt: skip
    return found


def _of_parents(ahead: Tensor, at: Tensor, depth: int, k: int) -> Tensor:
    """The rows of `ahead` for the parents, [R, k, size]. ahead: that of the root, or of the k nodes that were expanded
    last. at [R, k]: which of the E."""
    nth = at if depth == 1 else at - (depth - 2) * k
    return ahead.gather(1, nth[:, :, None].expand(-1, -1, ahead.shape[2]))


def _moved(
    rows: Sequence[StepRow], first: Tensor, scores: DraftScores, noise: Noise | None, logits: Tensor, path: Tensor
) -> Tensor:
    """The logarithms by which children are chosen. path [R, nodes, depth]. first [R]: the position of level 0."""
    num_nodes, depth = path.shape[1:]
    slots = [row.slot for row in rows for _ in range(num_nodes)]
    positions = (first + depth).repeat_interleave(num_nodes)
    moved = scores(logits, slots, positions, path.flatten(0, 1))
    logprobs = moved.double().log_softmax(-1)
    return logprobs if noise is None else noise.over(logprobs, moved, positions)


def _children(
    logits: Tensor, scores: Tensor, k: int, move: Callable[[Tensor, Tensor], Tensor], path: Tensor
) -> tuple[Tensor, Tensor]:
    """The k likeliest children of nodes with these logits [R x nodes, vocab_size] and scores [R, nodes], node by node:
    tokens and scores, [R, nodes x k]."""
    found = move(logits, path)
    logprobs, tokens = found.nan_to_num(nan=-torch.inf).topk(k)
    shape = len(scores), -1
    return tokens.view(shape), (scores[:, :, None] + logprobs.view(*scores.shape, k)).view(shape)


def _run(
    draft: FeatureDraft, rows: Sequence[StepRow], depth: int, k: int, slots: Slots, tokens: Tensor, sees: Tensor,
    before: Tensor, replay: ReplayNodes | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Runs the head over the nodes expanded so far, E for each row; returns logits [R x k, vocab_size] and hidden
    states [R, k, hidden_size] of the last k of each."""
    batch = lay_out_expanded(rows, depth, k, slots)
    t = to_device(batch.arrays, slots.device)
    order = t["order"]
    t["ancestors"] = sees[order].flatten()
    found = of_nodes(draft, batch, t, slots, tokens[order].flatten(), before[order].flatten(0, 1), replay)
    logits, hidden = (each.view(len(rows), k, -1) for each in found)
    logits, hidden = (torch.empty_like(each).index_copy_(0, order, each) for each in (logits, hidden))
    return logits.flatten(0, 1), hidden


def lay_out_expanded(rows: Sequence[StepRow], depth: int, k: int, slots: Slots) -> HostBatch:
    """The batch of the k nodes of each level before `depth`, for each row, behind what is computed in its slot."""
    batch = lay_out([StepRow(row.slot, row.start, k * depth, True) for row in rows], slots)
    offset = batch.arrays["offset"]
    arrays = batch.arrays | {
        "logits_indices": np.flatnonzero(offset // k == depth - 1),
        "lag": offset - offset // k,
        "ancestors": np.zeros(len(offset), np.int64),
        "order": np.array(batch.order),
    }
    return replace(batch, arrays=arrays)
