"""Requests whose prefix a page store has (LMCache, Mooncake): they are set aside until its pages are loaded, and then
admitted like any other, with their prefix in the cache.

They do not count as running while they wait. Loads take blocks, so no more requests load than may run, and loads are
cancelled before a running request is preempted because blocks have run out.
"""

from __future__ import annotations

from reference_impl.core.scheduler import Scheduler, SchedulerFeature
from reference_impl.interfaces import FetchesPages, Request, RequestState


class LoadsPages(SchedulerFeature):
    """Sets requests aside while their pages load. TypeError unless the scheduler's KV manager `FetchesPages`."""

    def __init__(self, scheduler: Scheduler):
        kv = scheduler.kv
        if not isinstance(kv, FetchesPages):
            raise TypeError(f"expected a KV manager that loads pages (FetchesPages), got a {type(kv).__name__}")
        self.scheduler, self._pages, self._now = scheduler, kv, 0.0
        self.loading: list[Request] = []  # beside the queue

    def begin(self, now: float) -> None:
        self._now = now
        for request in [request for request in self.loading if not self._pages.is_fetching(request)]:
            self.loading.remove(request)  # its pages have come, or will not come
            request.state = RequestState.WAITING
            self.scheduler.waiting.push(request, self.scheduler.ranks[request.id])

    def sets_aside(self, request: Request) -> bool:
        if len(self.loading) >= self.scheduler.max_num_seqs or not self._pages.fetch(request, self._now):
            return False
        self.loading.append(request)
        request.state = RequestState.LOADING
        return True

    def may_preempt(self, step_id: int) -> bool:
        self._pages.cancel_loads()
        return True

    def withdraws(self, request: Request) -> bool:
        if request.state is not RequestState.LOADING:
            return False
        self.loading.remove(request)
        self.scheduler.num_waiting -= 1
        return True
