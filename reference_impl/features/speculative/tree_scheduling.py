"""Rows with draft trees: as many nodes as the levels that can be kept have; where room is short, the first of them.

This extends `Drafting.useful_drafts`.
"""

from __future__ import annotations

from typing import Any

from reference_impl.features.speculative.growth import Growth
from reference_impl.features.speculative.scheduling import Drafting
from reference_impl.features.speculative.tree import Tree
from reference_impl.interfaces import Request


class TreeDrafting(Drafting):
    """A scheduler that plans draft trees. tree: its nodes are the most drafts that a row has; or how one is grown.
    max_len: positions of a request, which drafts behind its tokens must not exceed."""

    def __init__(self, *core: Any, tree: Tree | Growth, max_len: int, **options: Any):
        super().__init__(*core, num_drafts=tree.num_levels, **options)
        self.tree, self.max_len = tree, max_len

    def useful_drafts(self, request: Request) -> int:
        num_levels = super().useful_drafts(request)
        if not num_levels:
            return 0
        return max(0, min(self.tree.up_to(num_levels), self.max_len - request.num_tokens))
