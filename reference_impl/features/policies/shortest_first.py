"""Shortest job first, with aging."""

from __future__ import annotations

from reference_impl.features.policies.estimates import Estimate, at_least_0, cost_of, most_tokens
from reference_impl.interfaces import Request


class ShortestFirst:
    """Short requests first, which makes the mean wait short; a second of waiting counts as `aging` tokens fewer.

    A request of estimate c goes before everything that arrives more than c / aging seconds after it, however
    short; what arrives earlier than that overtakes it only by being shorter. With aging 0 a long request starves
    for as long as shorter ones keep coming.
    """

    preemptive = False

    def __init__(self, estimate: Estimate = most_tokens, aging: float = 100.0):
        self.estimate, self.aging = estimate, at_least_0("aging (tokens per second)", aging)

    def rank(self, request: Request) -> float:
        return cost_of(self.estimate, request) + self.aging * request.arrival

    def finished(self, request: Request) -> None:
        pass
