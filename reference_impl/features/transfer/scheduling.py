"""Requests whose prefix a page store has (LMCache, Mooncake): they are set aside until its pages are loaded, and then
admitted like any other, with their prefix in the cache.

They take no seat while they wait. Blocks are taken for what is loaded, so no more requests load than may run, and
loads are cancelled before a running request is preempted for want of blocks.

Extends `Scheduler.schedule`, `_first`, `_preempt` and `_withdraw`, for a KV manager that `FetchesPages`.
"""

from __future__ import annotations

from typing import Any

from reference_impl.core.scheduler import OpenPlan, Scheduler
from reference_impl.interfaces import FetchesPages, KVManager, Request, RequestState, StepPlan


class LoadsPages(Scheduler):
    """TypeError unless kv `FetchesPages`."""

    def __init__(self, kv: KVManager, *core: Any, **options: Any):
        super().__init__(kv, *core, **options)
        if not isinstance(kv, FetchesPages):
            raise TypeError(f"expected a KV manager that loads pages (FetchesPages), got a {type(kv).__name__}")
        self._pages: FetchesPages = kv
        self._now = 0.0
        self.loading: list[Request] = []  # beside the queue

    def schedule(self, now: float) -> StepPlan:
        self._now = now
        for request in [request for request in self.loading if not self._pages.is_fetching(request)]:
            self.loading.remove(request)  # its pages have come, or will not come
            request.state = RequestState.WAITING
            self.waiting.push(request, self._ranks[request.id])
        return super().schedule(now)

    def _first(self) -> Request | None:
        while (first := super()._first()) is not None:
            if len(self.loading) >= self.max_num_seqs or not self._pages.fetch(first, self._now):
                return first
            self.loading.append(self.waiting.pop())
            first.state = RequestState.LOADING
        return None

    def _preempt(self, plan: OpenPlan) -> bool:
        self._pages.cancel_loads()
        return super()._preempt(plan)

    def _withdraw(self, request: Request) -> None:
        if request.state is RequestState.LOADING:
            self.loading.remove(request)
            self.num_waiting -= 1
        else:
            super()._withdraw(request)
