"""The size of a draft tree that is grown anew in each step (EAGLE-2, Li et al. 2024)."""

from __future__ import annotations

from dataclasses import dataclass

from reference_impl.features.speculative.tree import MOST_TOKENS

DYNAMIC = "dynamic"
WIDTH, DEPTH, NODES = 4, 4, 12  # unless they are given


@dataclass(frozen=True)
class Growth:
    """How a draft tree grows. width: the children of an expanded node, and the expanded nodes of a level. num_levels:
    the most levels of the tree. num_nodes: how many are verified. ValueError if these do not make a tree."""

    width: int
    num_levels: int
    num_nodes: int

    def __post_init__(self) -> None:
        if self.width < 1 or self.num_levels < 1 or self.width * (self.num_levels - 1) > MOST_TOKENS:
            raise ValueError(
                f"draft_tree: a dynamic tree: expected a width and levels of at least 1, of which width x (levels - 1) "
                f"nodes are expanded, up to {MOST_TOKENS}; got width {self.width} and {self.num_levels} levels"
            )
        # The head keeps what it has of expanded nodes where drafts and the known token lie.
        least, most = self._least(), min(MOST_TOKENS - 1, self._grown(self.num_levels))
        if not least <= self.num_nodes <= most:
            raise ValueError(
                f"draft_tree: a dynamic tree: expected {least} to {most} drafts (num_drafts) with width {self.width} "
                f"and {self.num_levels} levels, got {self.num_nodes}"
            )

    @staticmethod
    def of(spec: str, num_nodes: int = 0) -> Growth:
        """The growth that spec describes: "dynamic", or with width and levels, "dynamic,4,4". ValueError for anything
        else."""
        name, *numbers = spec.split(",")
        if name != DYNAMIC or len(numbers) not in (0, 2) or not all(number.strip().isdecimal() for number in numbers):
            raise ValueError(
                f"draft_tree: expected {DYNAMIC!r}, or with width and levels, '{DYNAMIC},{WIDTH},{DEPTH}', got {spec!r}"
            )
        width, levels = map(int, numbers) if numbers else (WIDTH, DEPTH)
        least, most = max(1, width * (levels - 1) - 1), width + max(0, levels - 1) * width**2
        return Growth(width, levels, num_nodes or max(least, min(NODES, most)))

    def _least(self) -> int:
        return max(1, self.width * (self.num_levels - 1) - 1)

    @property
    def num_inner(self) -> int:
        """The number of nodes that are expanded."""
        return self.width * (self.num_levels - 1)

    def levels_of(self, num_nodes: int) -> int:
        """The most levels that a tree of so many nodes may have."""
        return min(self.num_levels, 1 + (1 + num_nodes) // self.width)

    def _grown(self, num_levels: int) -> int:
        """The number of candidates in so many levels."""
        return self.width + (num_levels - 1) * self.width**2 if num_levels > 0 else 0

    def up_to(self, num_levels: int) -> int:
        """The number of drafts of a row that can have so many of them kept."""
        return min(self.num_nodes, self._grown(min(num_levels, self.num_levels)))
