"""When to send. An open workload says when, and its requests are sent then, whatever comes back; in a closed one each
request follows another, and a waiting user sends nothing: a slow server gets fewer requests, and few of them fall into
its worst moments.

Times are those of the event loop's clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Protocol

from reference_impl.bench.load.client import Outcome
from reference_impl.simulation.workloads import WorkloadRequest

# How many requests are read ahead of the ones they come after. Users are not equally fast, and a closed workload lists
# all of them in turn; one further ahead of the slowest than this has to wait, which counts as the client's delay.
MAX_HELD = 1000


class Sender(Protocol):
    def body(self, request: WorkloadRequest) -> bytes: ...
    async def send(self, request: WorkloadRequest, body: bytes, planned: float) -> Outcome: ...


async def send_all(
    requests: Iterable[WorkloadRequest],
    num_requests: int,
    sender: Sender,
    note: Callable[[Outcome], None],
    max_in_flight: int | None = None,
    under_way: dict[str, float] | None = None,
) -> None:
    """Sends the first num_requests whose time comes; `note` is called with each outcome when it is there.

    Planned is `arrival` seconds after the start, and not before the request it comes after has ended, however it ended,
    and the user has thought; a refused user waits as long as the server asked for, if that is longer. A workload
    without end is read only as far as it is needed.
    max_in_flight: further requests wait in the client, first come first served. Their planned time stays as it was, so
    that this wait counts.
    under_way: holds at every moment the requests whose time has come and that have not ended, with that time. After a
    cancellation the unfinished ones are left in it, and `note` is not called for them.
    ValueError where an id comes twice, or a request comes after one that is not before it.
    """
    await _Loop(num_requests, sender, note, max_in_flight, {} if under_way is None else under_way).run(requests)


class _Loop:
    def __init__(
        self,
        num_requests: int,
        sender: Sender,
        note: Callable[[Outcome], None],
        max_in_flight: int | None,
        under_way: dict[str, float],
    ):
        self.num_left, self.sender, self.note, self.under_way = num_requests, sender, note, under_way
        self.start = asyncio.get_running_loop().time()
        self.seats = nullcontext() if max_in_flight is None else asyncio.Semaphore(max_in_flight)
        self.room = asyncio.Semaphore(MAX_HELD)
        self.tasks = asyncio.TaskGroup()
        self.known: set[str] = set()
        self.ends: dict[str, tuple[float, float]] = {}  # when, and how long the server asked to wait
        self.held: dict[str, list[WorkloadRequest]] = {}  # by the request they come after

    async def run(self, requests: Iterable[WorkloadRequest]) -> None:
        async with self.tasks:
            for request in requests:
                if not self.num_left:
                    return
                if request.id in self.known:
                    raise ValueError(f"request {request.id!r} comes twice in the workload")
                self.known.add(request.id)
                if request.after is None:
                    body = self.sender.body(request)  # made before its moment comes
                    await _sleep_until(self.start + request.arrival)
                    self._begin(request, 0.0, body)
                elif request.after not in self.known:
                    raise ValueError(f"request {request.id!r} comes after {request.after!r}, which is not before it")
                else:
                    await self.room.acquire()
                    self.held.setdefault(request.after, []).append(request)
                    self._release(request.after)
                    await asyncio.sleep(0)  # a long stretch of requests to hold must not hold up those that run

    def _release(self, request_id: str) -> None:
        """Begins the requests that come after this one, if it has ended."""
        if request_id in self.ends:
            for request in self.held.pop(request_id, ()):
                self.room.release()
                ended, retry_after = self.ends[request_id]
                self._begin(request, ended + max(request.think, retry_after))

    def _begin(self, request: WorkloadRequest, not_before: float, body: bytes | None = None) -> None:
        if self.num_left:
            self.num_left -= 1
            self.tasks.create_task(self._one(request, max(self.start + request.arrival, not_before), body))

    async def _one(self, request: WorkloadRequest, planned: float, body: bytes | None) -> None:
        body = self.sender.body(request) if body is None else body
        await _sleep_until(planned)
        self.under_way[request.id] = planned
        async with self.seats:
            outcome = await self.sender.send(request, body, planned)
        del self.under_way[request.id]
        self.ends[request.id] = (outcome.ended, outcome.retry_after)
        self.note(outcome)
        self._release(request.id)


async def _sleep_until(moment: float) -> None:
    await asyncio.sleep(max(0.0, moment - asyncio.get_running_loop().time()))
