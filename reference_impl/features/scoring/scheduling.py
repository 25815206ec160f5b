"""Chunks of a prompt whose log-probabilities are requested: each of its tokens needs its logits, so a step computes as
many of them as there is room for.

Extends `Scheduler._chunk`.
"""

from __future__ import annotations

from reference_impl.core.scheduler import Scheduler
from reference_impl.interfaces import Request

SCORED_AT_ONCE = 128  # prompt tokens in a step that need logits; with a vocabulary of 150,000, 77 MB in float32


class ScoresPrompts(Scheduler):
    def _chunk(self, request: Request, left: int) -> int:
        return super()._chunk(request, min(left, SCORED_AT_ONCE) if request.scores_prompt else left)
