"""Preemption by swapping: the blocks of a preempted request move to host memory and come back when it is admitted
again, so that nothing is computed twice (vLLM's first versions, Kwon et al. 2023). If the host is full, the request
computes its tokens again.
"""

from __future__ import annotations

from reference_impl.core.scheduler import Scheduler, SchedulerFeature
from reference_impl.interfaces import Request, SwapsOut


class Swapping(SchedulerFeature):
    def __init__(self, scheduler: Scheduler):
        self.kv = scheduler.kv

    def gives_up(self, request: Request) -> bool:
        return isinstance(self.kv, SwapsOut) and self.kv.swap_out(request)
