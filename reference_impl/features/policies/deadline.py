"""Earliest deadline first, and least slack first."""

from __future__ import annotations

import math

from reference_impl.features.policies.estimates import Estimate, at_least_0, cost_of, most_tokens
from reference_impl.interfaces import Request


class EarliestDeadline:
    """Least slack first: by the latest moment at which a request must start, deadline - seconds_per_token * estimate.

    (Slack at time t is that moment - t, so these moments give the same order as slacks; with seconds_per_token 0 this
    is earliest deadline first.) A request without a deadline gets arrival + default_slo.

    A rank is never before the arrival: a request with too little time does not go before those that came earlier.
    So once the moment at which a request must start has passed, no request that arrives goes before it. Under overload
    this order is a poor one: it spends time on requests that miss their deadline anyway.
    """

    def __init__(
        self,
        default_slo: float = 10.0,
        seconds_per_token: float = 0.0,
        estimate: Estimate = most_tokens,
        preemptive: bool = False,
    ):
        self.default_slo = at_least_0("default_slo (seconds)", default_slo)
        self.seconds_per_token = at_least_0("seconds_per_token", seconds_per_token)
        self.estimate, self.preemptive = estimate, preemptive

    def rank(self, request: Request) -> float:
        deadline = request.arrival + self.default_slo if request.deadline is None else request.deadline
        if not math.isfinite(deadline):
            raise ValueError(f"request {request.id!r}: expected a finite deadline in seconds, got {deadline!r}")
        return max(request.arrival, deadline - self.seconds_per_token * cost_of(self.estimate, request))

    def finished(self, request: Request) -> None:
        pass
