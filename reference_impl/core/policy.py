"""Whose turn it is. A policy gives a request its rank once, when it arrives; the smaller rank goes first.

Nothing is ranked again while it waits, and no queue sorted again. That is enough even for aging: if every second
of waiting is to be worth `aging`, the urgency base - aging * (now - arrival) has the same `now` for all requests, so
it orders requests as base + aging * arrival does, which never changes. Equal ranks go in order of arrival.
"""

from __future__ import annotations

from reference_impl.interfaces import Request


class FirstCome:
    """In order of arrival: a request that arrives later goes later. A long request holds up all behind it."""

    preemptive = False

    def rank(self, request: Request) -> float:
        return request.arrival

    def finished(self, request: Request) -> None:
        pass
