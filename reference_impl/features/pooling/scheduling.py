"""Requests for a prompt's hidden states, instead of tokens: no row of theirs samples, and they end when their prompt is
computed.

Extends `Scheduler._enroll`.
"""

from __future__ import annotations

from reference_impl.core.scheduler import Scheduler
from reference_impl.interfaces import Request, StepOutput


class PoolsPrompts(Scheduler):
    def _enroll(self, request: Request) -> None:
        super()._enroll(request)
        if request.pooling is not None:
            self._outcomes[request.id] = Pooled()


class Pooled:
    """The `Outcome` of such a request."""

    def samples(self, request: Request) -> bool:
        return False

    def advanced(self, request: Request, samples: bool) -> bool:
        return not request.num_missing_tokens

    def collected(self, request: Request, output: StepOutput) -> str | None:
        return "stop"
