"""Preemption by swapping: the blocks of a preempted request move to host memory and come back when it is admitted
again, so that nothing is computed twice (vLLM's first versions, Kwon et al. 2023). Where the host is full, the request
computes its tokens again.

Extends `Scheduler._give_up_blocks`.
"""

from __future__ import annotations

from reference_impl.core.scheduler import Scheduler
from reference_impl.interfaces import Request, SwapsOut


class Swapping(Scheduler):
    def _give_up_blocks(self, request: Request) -> None:
        if not (isinstance(self.kv, SwapsOut) and self.kv.swap_out(request)):
            super()._give_up_blocks(request)
