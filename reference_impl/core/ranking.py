"""Whose turn it is. A policy gives a request its rank once, when it arrives; the smaller rank goes first.

Nothing is ranked again while it waits, and no queue sorted again. That is enough even for aging: if every second
of waiting is to be worth `aging`, the urgency base - aging * (now - arrival) has the same `now` for all requests, so
it orders requests as base + aging * arrival does, which never changes. Equal ranks go in order of arrival.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import count
from typing import Any

from reference_impl.interfaces import Request


class FirstCome:
    """The policy that serves requests in order of arrival. A long request holds up all behind it."""

    preemptive = False

    def rank(self, request: Request) -> float:
        return request.arrival

    def finished(self, request: Request) -> None:
        pass


class RankedQueue:
    """Requests, the smallest rank first; equal ranks in the order in which they were pushed.

    A preempted request pushed again with its old rank returns to its old place if no two ranks are equal: the
    scheduler's are (the policy's rank, order of arrival).

    A sorted list: finding a place takes log n comparisons, and moving the pointers behind it is one memmove.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[Any, int, Request]] = []  # (rank, number, request); no two numbers are equal
        self._by_id: dict[str, tuple[Any, int, Request]] = {}
        self._numbers = count()

    def push(self, request: Request, rank: Any) -> None:
        """Queues a request. ValueError if one with this id waits already."""
        if request.id in self._by_id:
            raise ValueError(f"request {request.id!r} waits already")
        entry = self._by_id[request.id] = (rank, next(self._numbers), request)
        insort(self._entries, entry)

    def first(self) -> Request:
        """The request that is next. IndexError if none waits."""
        return self._entries[0][2]

    def pop(self) -> Request:
        """Takes the first out. IndexError if none waits."""
        request = self._entries.pop(0)[2]
        del self._by_id[request.id]
        return request

    def remove(self, request_id: str) -> Request:
        """Takes this request out, wherever it stands. KeyError if it does not wait."""
        entry = self._by_id.pop(request_id)
        del self._entries[bisect_left(self._entries, entry)]
        return entry[2]

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Request]:
        return (request for _, _, request in self._entries)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id
