"""Preemption by rank, for policies that are preemptive: a waiting request takes the seat and the blocks of running
requests that rank after it.

Extends `Scheduler._shares`: before the budget is shared, the first of the queue is admitted at the cost of those that
rank last. It gets its tokens as any request that runs.
"""

from __future__ import annotations

from collections.abc import Sequence

from reference_impl.core.scheduler import OpenPlan, Scheduler, Shares
from reference_impl.interfaces import Request


class Overtaking(Scheduler):
    def _shares(self, requests: Sequence[Request], plan: OpenPlan) -> Shares:
        if self.num_waiting:
            self._overtake(plan)
        return super()._shares(requests, plan)

    def _overtake(self, plan: OpenPlan) -> None:
        while self.running and (first := self._first()) is not None:
            if self._ranks[self.running[-1].id] < self._ranks[first.id]:
                return
            if self._enter(first, plan):
                self.waiting.pop()
            elif not self._preempt(plan):
                return
