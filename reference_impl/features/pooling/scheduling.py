"""Requests for a prompt's hidden states instead of tokens: none of their rows samples, and they end when their prompt
is computed."""

from __future__ import annotations

from reference_impl.core.scheduler import Scheduler, SchedulerFeature
from reference_impl.interfaces import Request, StepOutput


class PoolsPrompts(SchedulerFeature):
    def __init__(self, scheduler: Scheduler):
        self.scheduler = scheduler

    def enrolled(self, request: Request) -> None:
        if request.pooling is not None:
            self.scheduler.outcomes[request.id] = Pooled()


class Pooled:
    """The `Outcome` of a request with pooling: it ends when its prompt is computed."""

    def samples(self, request: Request) -> bool:
        return False

    def advanced(self, request: Request, samples: bool) -> bool:
        return not request.num_missing_tokens

    def collected(self, request: Request, output: StepOutput) -> str | None:
        return "stop"
