"""Lookahead decoding: the model drafts for itself by Jacobi iteration, and keeps the n-grams that come up (Fu et al.
2024, "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding"). No weights, no draft model.

    window       N - 1 levels of W columns: what the last N - 1 iterations said of the tokens ahead
    a step       computes, behind the last known token, the window and G candidates of N - 1 tokens each
    iteration    what the newest level's tokens are followed by (the likeliest) is a new level; each column with it is
                 an n-gram of N tokens for the request's pool (lookahead_pool.py); the oldest level is dropped
    candidates   the newest n-grams of the pool that begin with the last known token, without it

All of this is one draft tree (tree.py), so it needs no second path:

    known - w[0,0] - w[0,1] - w[0,2]      level 0 is a chain; w[l, j] is a draft of the token behind w[l - 1, j],
              |        |        |         and sees its column and level 0 up to it: the mask of Fu et al.
            w[1,0]   w[1,1]   w[1,2]
          - c[0,0] - c[0,1]               each candidate is a chain of its own
          - c[1,0] - c[1,1]

Unlike in the paper, the window is verified with the candidates, so that what is right in it is kept, too; and its
columns move by as many tokens as the text does. Like there, an iteration takes the likeliest tokens, however a request
samples, so drafts depend on no random number. The window begins with the text's last tokens, and the pool is empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from reference_impl.features.speculative.tree import MOST_TOKENS, ROOT, Tree

DEFAULT = (3, 3, 3)


@dataclass(frozen=True)
class Shape:
    """The shape of a lookahead step. columns: W; length: N, that of the n-grams; candidates: G. ValueError unless W, G
    >= 1, N >= 2, and all of it is a tree of at most 63 nodes."""

    columns: int
    length: int
    candidates: int

    def __post_init__(self) -> None:
        nodes = (self.length - 1) * (self.columns + self.candidates)
        if min(self.columns, self.candidates) < 1 or self.length < 2 or nodes >= MOST_TOKENS:
            raise ValueError(
                "lookahead: expected (columns, length of n-grams, candidates), at least (1, 2, 1), with (length - 1) x "
                f"(columns + candidates) up to {MOST_TOKENS - 1} drafts, got {self.columns}, {self.length} and "
                f"{self.candidates}: {nodes} drafts"
            )

    @staticmethod
    def of(spec: Sequence[int]) -> Shape:
        """The shape that spec, (W, N, G), describes; () stands for `DEFAULT`. ValueError for anything else."""
        is_some = isinstance(spec, Sequence) and len(spec or DEFAULT) == 3
        if not is_some or any(isinstance(n, bool) or not isinstance(n, int) for n in spec):
            raise ValueError(
                f"lookahead: expected three integers, columns, length of n-grams and candidates, got {spec!r}"
            )
        return Shape(*(spec or DEFAULT))

    @cached_property
    def nodes(self) -> list[tuple[int, bool, int, int]]:
        """The nodes in the order of the tree, candidates before the window: (depth, whether it is in the window, its
        level or the candidate's number, its column or the place in the candidate)."""
        window = [(i + j, True, i, j) for i in range(self.length - 1) for j in range(self.columns)]
        chains = [(i, False, g, i) for g in range(self.candidates) for i in range(self.length - 1)]
        return sorted(window + chains)

    @cached_property
    def tree(self) -> Tree:
        number = {node[1:]: at for at, node in enumerate(self.nodes)}
        parents = []
        for _, of_window, a, b in self.nodes:
            above = (True, a - 1, b) if of_window and a else (of_window, a, b - 1)
            parents.append(number.get(above, ROOT))
        return Tree(tuple(parents))

    @cached_property
    def source(self) -> list[int]:
        """The place of each node's token in the window, level by level, followed by the candidates, one by one."""
        first = (self.length - 1) * self.columns
        return [a * self.columns + b if w else first + a * (self.length - 1) + b for _, w, a, b in self.nodes]

    @cached_property
    def newest(self) -> list[int]:
        """The nodes of the window's newest level, [columns]."""
        return [self.nodes.index((self.length - 2 + j, True, self.length - 2, j)) for j in range(self.columns)]
