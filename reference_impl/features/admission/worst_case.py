"""Admission that promises completion: a request is admitted when all that it may ever have fits, so that none is
preempted, unless windows come and go, and fewer run (TensorRT-LLM's GUARANTEED_NO_EVICT).

Extends `Scheduler._num_tokens_to_hold`.
"""

from __future__ import annotations

from reference_impl.core.scheduler import Scheduler
from reference_impl.interfaces import Request


class WorstCaseAdmission(Scheduler):
    def _num_tokens_to_hold(self, request: Request) -> int:
        """All but its last token, which is never read."""
        return max(super()._num_tokens_to_hold(request), request.max_total_tokens - 1)
