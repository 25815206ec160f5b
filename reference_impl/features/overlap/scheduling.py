"""Waits for blocks that are about to become free rather than preempt one more request.

While the next step is planned, the one before may still run and use blocks that were given up meanwhile (vLLM's
asynchronous scheduling). They are free when that step is collected, so a request that lacks blocks is better off
without tokens in this step than at the cost of another.
"""

from __future__ import annotations

from reference_impl.core.scheduler import Scheduler, SchedulerFeature
from reference_impl.interfaces import DefersReuse


class WaitsForBlocks(SchedulerFeature):
    """Waits for blocks, but not forever: where windows give up some with every step, some are always about to become
    free. The blocks that were when a wait began are free when the step planned then is collected. TypeError unless the
    scheduler's KV manager `DefersReuse`."""

    def __init__(self, scheduler: Scheduler):
        kv = scheduler.kv
        if not isinstance(kv, DefersReuse):
            raise TypeError(
                f"expected a KV manager that keeps freed blocks back (DefersReuse), got {type(kv).__name__}"
            )
        self.scheduler, self._reuse = scheduler, kv
        self._wait_began = self._waited_in = -1  # steps

    def may_preempt(self, step_id: int) -> bool:
        if not self._reuse.num_releasing:
            return True
        if self._waited_in < step_id - 1:  # the step before did not wait: this is another wait
            self._wait_began = step_id
        oldest = next(iter(self.scheduler.in_flight), step_id)  # of the steps in flight
        waits = oldest <= self._wait_began
        self._waited_in = step_id if waits else -1
        return not waits
