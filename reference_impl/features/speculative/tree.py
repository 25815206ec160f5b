"""A draft tree: several candidates for a position, each with drafts of its own behind it (SpecInfer, Miao et al.
2024; Medusa, Cai et al. 2024; EAGLE, Li et al. 2024).

Node i is a draft of the token behind its parent, parents[i]; -1 is the row's last known token, the root. Nodes lie
level by level behind the known tokens of their row, so that the first n nodes of a tree are a tree, too.

    index in the row     known tokens, then node i at known + i
    position             start + known + depth of node i: siblings share one
    sees                 the context, the known tokens, the node's ancestors, itself
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a scheduler plans with trees, and has no arrays
    import numpy as np
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

ROOT = -1
MOST_TOKENS = 64  # of a row with a tree: what a token sees of them are the bits of an int64


@dataclass(frozen=True)
class Tree:
    """A draft tree. parents: that of each node. ValueError unless nodes lie level by level and there are 1 to 63."""

    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        if not 0 < len(self.parents) < MOST_TOKENS:
            raise ValueError(f"a draft tree: expected 1 to {MOST_TOKENS - 1} nodes, got {len(self.parents)}")
        for node, parent in enumerate(self.parents):
            if not ROOT <= parent < node:
                raise ValueError(f"a draft tree: node {node} has parent {parent}, expected -1 to {node - 1}")
        if list(self.levels) != sorted(self.levels):
            raise ValueError(f"a draft tree: expected nodes level by level, got depths {list(self.levels)}")

    @staticmethod
    def of(spec: Sequence[int] | Sequence[Sequence[int]]) -> Tree:
        """The tree that spec describes: how many children each node of a level has, from the root's on, such as
        (4, 2, 2); or the tree's paths, such as ((0,), (1,), (0, 0), (0, 1)), which say from the root on which child of
        its parent each node is. ValueError for anything else."""
        given: list[Any] = list(spec) if isinstance(spec, Sequence) else []
        if given and all(_is_count(width) and width > 0 for width in given):
            return _by_width(given)
        if given and all(isinstance(path, Sequence) and len(path) and all(map(_is_count, path)) for path in given):
            paths = [tuple(path) for path in given]
            for path in paths:
                if paths.count(path) > 1:
                    raise ValueError(f"a draft tree: expected each path once, got {path} {paths.count(path)} times")
            return _of_paths(set(paths))
        raise ValueError(
            "a draft tree: expected how many children a node has on each level, such as (4, 2, 2), or paths such "
            f"as ((0,), (1,), (0, 0)), got {spec!r}"
        )

    @cached_property
    def levels(self) -> tuple[int, ...]:
        """The depth of each node, 0 for children of the root."""
        found: list[int] = []
        for parent in self.parents:
            found.append(0 if parent == ROOT else found[parent] + 1)
        return tuple(found)

    @cached_property
    def depths(self) -> Ints:
        """The `levels` as an array, [nodes]."""
        import numpy as np

        return np.array(self.levels, np.int64)

    @property
    def num_nodes(self) -> int:
        return len(self.parents)

    @property
    def num_levels(self) -> int:
        return self.levels[-1] + 1

    @cached_property
    def children(self) -> dict[int, list[int]]:
        """The children of each node that has any, the root included: {node: children, in order}."""
        found: dict[int, list[int]] = {}
        for node, parent in enumerate(self.parents):
            found.setdefault(parent, []).append(node)
        return found

    @property
    def width(self) -> int:
        """The most children that a node has."""
        return max(map(len, self.children.values()))

    @cached_property
    def lineage(self) -> Ints:
        """The ancestor of each node on each level, [nodes, num_levels]: itself on its own level, -1 on those below."""
        import numpy as np

        found = np.full((len(self.parents), self.num_levels), -1, np.int64)
        for node, (parent, depth) in enumerate(zip(self.parents, self.depths, strict=True)):
            if parent != ROOT:
                found[node] = found[parent]
            found[node, depth] = node
        return found

    @cached_property
    def earlier(self) -> Ints:
        """The siblings before each node, [nodes, width - 1], -1 behind them."""
        import numpy as np

        found = np.full((len(self.parents), self.width - 1), -1, np.int64)
        for siblings in self.children.values():
            for number, node in enumerate(siblings):
                found[node, :number] = siblings[:number]
        return found

    @cached_property
    def inner(self) -> list[int]:
        """The nodes that have children, without the root."""
        return [node for node in self.children if node != ROOT]

    @property
    def num_inner(self) -> int:
        return len(self.inner)

    def sees(self, num_known: int = 1) -> Ints:
        """Which of a row's own tokens each of them sees, as bits: [num_known + nodes] int64. Known tokens are causal.
        ValueError if there are more than 64."""
        if num_known + len(self.parents) > MOST_TOKENS:
            raise ValueError(
                f"a row of {num_known} known tokens and {len(self.parents)} drafts in a tree: expected at most "
                f"{MOST_TOKENS} together"
            )
        found = [(1 << i + 1) - 1 for i in range(num_known)]
        for node, parent in enumerate(self.parents):
            found.append(found[num_known + parent] if parent != ROOT else (1 << num_known) - 1)
            found[-1] |= 1 << num_known + node
        import numpy as np

        return np.array(found, np.uint64).view(np.int64)

    def first(self, num_nodes: int) -> Tree:
        """The tree of the first num_nodes nodes."""
        return _first(self, num_nodes)

    def up_to(self, num_levels: int) -> int:
        """How many nodes the first num_levels levels have."""
        return sum(level < num_levels for level in self.levels)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


@lru_cache(maxsize=256)
def _first(tree: Tree, num_nodes: int) -> Tree:
    return tree if num_nodes == len(tree.parents) else Tree(tree.parents[:num_nodes])


def _by_width(widths: Sequence[int]) -> Tree:
    parents: list[int] = []
    level = [ROOT]
    for width in widths:
        first = len(parents)
        parents += [node for node in level for _ in range(width)]
        if len(parents) >= MOST_TOKENS:  # said here, before there are more than fit into memory
            raise ValueError(f"a draft tree: expected at most {MOST_TOKENS - 1} nodes, {widths} has more")
        level = list(range(first, len(parents)))
    return Tree(tuple(parents))


def _of_paths(paths: set[tuple[int, ...]]) -> Tree:
    ordered = sorted(paths, key=lambda path: (len(path), path))
    number = {(): ROOT} | {path: node for node, path in enumerate(ordered)}
    for path in ordered:
        before = path[:-1] if path[-1] == 0 else (*path[:-1], path[-1] - 1)  # its parent, or the sibling before it
        if before not in number:
            raise ValueError(f"a draft tree: expected path {before} with {path}, whose parent or sibling it is")
    return Tree(tuple(number[path[:-1]] for path in ordered))
