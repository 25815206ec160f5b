"""More urgent requests first, with aging."""

from __future__ import annotations

from reference_impl.features.policies.estimates import at_least_0
from reference_impl.interfaces import Request


class ByPriority:
    """The smallest Request.priority first; a second of waiting is worth `aging` levels.

    A request of priority p goes before one of priority q < p that arrives more than (p - q) / aging seconds after
    it. With aging 0 the less urgent starve while more urgent ones keep coming. Preemptive: the more urgent take the
    place of running requests, within the same bound.
    """

    def __init__(self, aging: float = 0.1, preemptive: bool = True):
        self.aging, self.preemptive = at_least_0("aging (levels per second)", aging), preemptive

    def rank(self, request: Request) -> float:
        return request.priority + self.aging * request.arrival

    def finished(self, request: Request) -> None:
        pass
