"""Blocks that are about to come free: wait for them rather than preempt one more request.

While the next step is planned, the one before may still run and use blocks that were given up meanwhile (vLLM's
asynchronous scheduling). They are free when that step is collected, so a request that lacks blocks is better off
without tokens in this step than at the cost of another.

Extends `Scheduler._preempt`, for a KV manager that `DefersReuse`.
"""

from __future__ import annotations

from typing import Any

from reference_impl.core.scheduler import OpenPlan, Scheduler
from reference_impl.interfaces import DefersReuse, KVManager


class WaitsForBlocks(Scheduler):
    """Not for ever: where windows give up some blocks with every step, and as many steps are in flight, some are always
    coming. The blocks that were coming when a wait began are there when the step planned then is collected. TypeError
    unless kv `DefersReuse`."""

    def __init__(self, kv: KVManager, *core: Any, **options: Any):
        super().__init__(kv, *core, **options)
        if not isinstance(kv, DefersReuse):
            raise TypeError(
                f"expected a KV manager that keeps freed blocks back (DefersReuse), got {type(kv).__name__}"
            )
        self._reuse: DefersReuse = kv
        self._wait_began = self._waited_in = -1  # steps

    def _preempt(self, plan: OpenPlan) -> bool:
        """False also while it waits."""
        return not self._blocks_are_coming() and super()._preempt(plan)

    def _blocks_are_coming(self) -> bool:
        if not self._reuse.num_releasing:
            return False
        planned = self._step_id + 1
        if self._waited_in < planned - 1:  # the step before did not wait: this is another wait
            self._wait_began = planned
        oldest = next(iter(self._in_flight), planned)  # of the steps in flight
        waits = oldest <= self._wait_began
        self._waited_in = planned if waits else -1
        return waits
