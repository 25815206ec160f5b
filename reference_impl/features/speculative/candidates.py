"""Lossless verification of several drafts for one position (SpecInfer, Miao et al. 2024; recursive rejection sampling
without replacement, Jeon et al. 2024, Yang et al. 2024), for requests without a seed of their own.

    the candidates x1, x2, ... are drawn from q one after another, each without those before it
    p1 = p, q1 = q.  Try x1, x2, ... in this order:
        keep xj with probability min(1, pj(xj) / qj(xj)), and be done
        otherwise p(j+1) = max(pj - qj, 0) / sum,   q(j+1) = qj without xj / sum
    if none is kept, draw from what p has become

Why the token that comes out is distributed as p, whatever the number m of candidates:
    1. Without candidates it is drawn from p. So let it be right for m - 1 of them, whatever their q and their target.
    2. x1 is drawn from q1, so y is tried first and kept with probability min(p1(y), q1(y)), as in `rejection.py`, and
       x1 is rejected with probability sum max(p1 - q1, 0).
    3. Then m - 1 candidates are left, drawn from q2, q3, ...: that they depend on x1 does not matter, for by 1 the
       token is distributed as their target p2 = max(p1 - q1, 0) / sum for each x1 that was rejected.
    4. Both together: min(p1, q1) + max(p1 - q1, 0) = p1 = p.
Step 3 needs that xj comes from the qj which it is tried with. So candidates are tried in the order in which they were
drawn, and in no other; q(j+1) leaves out what was drawn before, and sums to 1.

A candidate x that was not drawn (of the k likeliest, or where a draft's numbers are no numbers) has q = 1 at x: it is
kept with probability p(x), and p goes on without x. That is right for any x that does not depend on the random numbers
here, so both kinds may be mixed. Across levels: which node is reached does not depend on what its children were drawn
with, so behind it the same holds, for p behind the kept text.

`typical` is the lossy alternative (Medusa, Cai et al. 2024): it keeps more, and its texts are not distributed as p.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from reference_impl.core.sampler import draw
from reference_impl.core.staging import Arrays
from reference_impl.features.speculative.tree import MOST_TOKENS, Tree

NONE = -1  # among the children of a node that has fewer than others


def drawn_without_replacement(q: Tensor, u: Tensor) -> Tensor:
    """The candidates, [rows, m] int64, in the order in which they are drawn. q [rows, vocab_size]; u [m, rows], uniform
    in (0, 1). Where q has fewer than m tokens, arbitrary ones follow: `verified_children` takes them as not drawn."""
    found = []
    for each in u:
        found.append(draw(q, each))
        q = q.scatter(1, found[-1][:, None], 0)  # `draw` divides by the sum
    return torch.stack(found, 1)


def verified_children(p: Tensor, q: Tensor | None, children: Tensor, u: Tensor) -> Tensor:
    """The token behind each node, [nodes] int64: one of its children where that is kept.

    p, q [nodes, vocab_size]: rows sum to 1; None: children that were not drawn. children [nodes, m] int64, tokens in
    the order in which they were drawn, NONE behind them. u [m + 1, nodes]: uniform in (0, 1), independent of each other
    and of the children.
    """
    found = torch.full_like(children[:, 0], NONE)
    for number, token in enumerate(children.unbind(1)):
        there = token != NONE
        x = token.clamp(min=0)[:, None]
        one_hot = torch.zeros_like(p).scatter_(1, x, 1)
        # Where a draft model's logits are not numbers q has NaN: its token is then taken as one that was not drawn.
        drawn = one_hot if q is None else torch.where((q.gather(1, x) > 0) & (q.sum(-1, keepdim=True) > 0), q, one_hot)
        kept = u[number] * drawn.gather(1, x)[:, 0] < p.gather(1, x)[:, 0]  # u < p(x) / q(x)
        found = torch.where((found == NONE) & there & kept, token, found)
        p = torch.where(there[:, None], _divided((p - drawn).clamp(min=0), p), p)
        if q is not None:
            q = _divided(q.scatter(1, x, 0), q)
    return torch.where(found == NONE, draw(p, u[-1]), found)


def _divided(rest: Tensor, before: Tensor) -> Tensor:
    """The rest scaled to sum 1; where rounding has left nothing, what was there before."""
    total = rest.sum(-1, keepdim=True)
    return torch.where(total > 0, rest / total, before)


def first_of_equal(tokens: Tensor, siblings: Tensor) -> Tensor:
    """Whether no earlier sibling of a draft is the same token, [drafts] bool: only such a draft may be on a path, or
    two paths would have one text. tokens [drafts]; siblings [drafts, m], indices of the earlier ones, NONE behind."""
    same = tokens[siblings.clamp(min=0)] == tokens[:, None]
    return ~(same & (siblings != NONE)).any(1)


@dataclass(frozen=True)
class Paths:
    """Trees on the device, one for each row. above [rows, nodes]: 1 + the parent; depths [rows, nodes]; lineage
    [rows, nodes, num_levels], see `Tree`. Behind the nodes of a row's tree are 0, 0 and -1."""

    above: Tensor
    depths: Tensor
    lineage: Tensor

    def deepest(self, right: Tensor) -> tuple[Tensor, Tensor]:
        """The longest path from the root whose nodes are all right; among equals the one to the first node.

        right [rows, nodes] bool, false behind the nodes of a row's tree. Returns how many nodes it has, [rows], and
        which, [rows, num_levels], -1 behind its end; both int64.
        """
        on_path = right
        for _ in range(self.lineage.shape[2] - 1):
            with_root = torch.cat((torch.ones_like(right[:, :1]), on_path), 1)
            on_path = right & with_root.gather(1, self.above)
        order = torch.arange(right.shape[1], device=right.device)
        rank, node = torch.where(on_path, MOST_TOKENS * (self.depths + 1) - order, 0).max(1)
        none, node = rank == 0, node[:, None]
        depth = self.depths.gather(1, node)[:, 0]
        lineage = self.lineage.take_along_dim(node[:, :, None], 1)[:, 0]
        return torch.where(none, 0, depth + 1), torch.where(none[:, None], -1, lineage)


def path_arrays(trees: Sequence[Tree]) -> Arrays:
    """The fields of `Paths`, on the host."""
    shape = len(trees), max(len(tree.parents) for tree in trees)
    above, depths = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    lineage = np.full((*shape, max(tree.num_levels for tree in trees)), -1, np.int64)
    for row, tree in enumerate(trees):
        num = len(tree.parents)
        above[row, :num], depths[row, :num] = np.array(tree.parents) + 1, tree.depths
        lineage[row, :num, : tree.num_levels] = tree.lineage
    return {"above": above, "depths": depths, "lineage": lineage}


def typical(p: Tensor, tokens: Tensor, epsilon: float = 0.09, delta: float = 0.3) -> Tensor:
    """Which drafts typical acceptance keeps, [drafts] bool (Medusa, Cai et al. 2024, section 2.3.1): those with
    p(x) > min(epsilon, delta exp(-entropy of p)). It is lossy: texts are no longer distributed as p, nor those of plain
    decoding. p [drafts, vocab_size], that of the node before each; tokens [drafts]."""
    entropy = torch.special.entr(p).sum(-1)
    return p.gather(1, tokens[:, None])[:, 0] > torch.clamp(delta * torch.exp(-entropy), max=epsilon)
