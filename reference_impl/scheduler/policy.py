"""Whose turn it is. A policy gives a request its rank once, when it arrives; the smaller rank goes first.

Nothing is ranked again while it waits, and no queue sorted again. That is enough even for aging: if every second
of waiting is to be worth `aging`, the urgency base - aging * (now - arrival) has the same `now` for all requests, so
it orders requests as base + aging * arrival does, which never changes.

Each docstring says how far a request can be overtaken. Equal ranks go in order of arrival.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping
from itertools import count

from reference_impl.interfaces import Request, RequestState

Estimate = Callable[[Request], float]


def most_tokens(request: Request) -> int:
    """The most tokens a request can compute: the rest of its prompt, and all the output it may have.

    A poor guess of the output, but a safe one; a better one can be passed to each policy that guesses.
    A further sample of the same prompt (n > 1) computes only the prompt's last token again.
    """
    prompt = request.num_missing_tokens if request.parent_id is None else 1
    return prompt + request.sampling.max_tokens


class FirstCome:
    """In order of arrival: a request that arrives later goes later. A long request holds up all behind it."""

    preemptive = False

    def rank(self, request: Request) -> float:
        return request.arrival

    def finished(self, request: Request) -> None:
        pass


class ShortestFirst:
    """Short requests first, which makes the mean wait short; a second of waiting counts as `aging` tokens fewer.

    A request of estimate c goes before everything that arrives more than c / aging seconds after it, however
    short; what arrives earlier than that overtakes it only by being shorter. With aging 0 a long request starves
    for as long as shorter ones keep coming.
    """

    preemptive = False

    def __init__(self, estimate: Estimate = most_tokens, aging: float = 100.0):
        self.estimate, self.aging = estimate, _at_least_0("aging (tokens per second)", aging)

    def rank(self, request: Request) -> float:
        return _cost(self.estimate, request) + self.aging * request.arrival

    def finished(self, request: Request) -> None:
        pass


class ByPriority:
    """The smaller Request.priority first; a second of waiting is worth `aging` levels.

    A request of priority p goes before one of priority q < p that arrives more than (p - q) / aging seconds after
    it. With aging 0 the less urgent starve while more urgent ones keep coming. Preemptive: the more urgent take the
    place of running requests, within the same bound.
    """

    def __init__(self, aging: float = 0.1, preemptive: bool = True):
        self.aging, self.preemptive = _at_least_0("aging (levels per second)", aging), preemptive

    def rank(self, request: Request) -> float:
        return request.priority + self.aging * request.arrival

    def finished(self, request: Request) -> None:
        pass


class EarliestDeadline:
    """Least slack first: by the latest moment at which a request must start, deadline - seconds_per_token * estimate.

    (Slack at time t is that moment - t, so the moments order requests as their slacks do; with seconds_per_token 0
    this is earliest deadline first.) A request without a deadline gets arrival + default_slo.

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
        self.default_slo = _at_least_0("default_slo (seconds)", default_slo)
        self.seconds_per_token = _at_least_0("seconds_per_token", seconds_per_token)
        self.estimate, self.preemptive = estimate, preemptive

    def rank(self, request: Request) -> float:
        deadline = request.arrival + self.default_slo if request.deadline is None else request.deadline
        if not math.isfinite(deadline):
            raise ValueError(f"request {request.id!r}: expected a finite deadline in seconds, got {deadline!r}")
        return max(request.arrival, deadline - self.seconds_per_token * _cost(self.estimate, request))

    def finished(self, request: Request) -> None:
        pass


class FairShare:
    """Tenants share the tokens in proportion to their weights (1 unless given): start-time fair queueing.

    Source: Goyal, Vin, Cheng, SIGCOMM 1996. A tenant's virtual time is its tokens so far / its weight; the engine's
    is the start of the request let in last. A request's rank is the virtual time at which its tenant's turn comes:

        start = max(virtual time of the engine, end of the tenant's request before)
        end   = start + estimate / weight, corrected when the request has finished and what it took is known

    So a tenant that comes back from a pause starts where the others are: it has saved up nothing. A tenant's own
    requests keep their order, even if a correction makes up for estimates that were too high.

    While two tenants a and b both wait, tokens_a / w_a and tokens_b / w_b let in differ by at most
    cost_a / w_a + cost_b / w_b (the largest of each), so each is within one request of its ideal share. Until a
    request is let in, another tenant g gets at most (start - virtual time at arrival) * w_g tokens and one request
    more: none starves, however much a tenant sends. (Tenants without number, each with one request, can starve
    others: limit which clients may invent one.) Both bounds hold for right estimates; others are made good with delay.
    """

    preemptive = False

    def __init__(self, weights: Mapping[str, float] | None = None, estimate: Estimate = most_tokens):
        for tenant, weight in (weights or {}).items():
            if not 0 < weight < math.inf:
                raise ValueError(f"weight of tenant {tenant!r}: expected a finite number above 0, got {weight!r}")
        self.weights, self.estimate = dict(weights or {}), estimate
        self.virtual_time = 0.0  # tokens per unit of weight
        self._last_start: dict[str, float] = {}  # of each tenant
        self._end: dict[str, float] = {}  # of each tenant's requests so far
        self._estimates: dict[str, float] = {}  # of each unfinished request
        self._starts: list[tuple[float, int, Request]] = []  # a heap of those that may not have been let in yet
        self._arrivals = count()

    def rank(self, request: Request) -> float:
        self._advance()
        tenant, cost = request.tenant, _cost(self.estimate, request)
        begin = max(self.virtual_time, self._end.get(tenant, 0.0))
        start = self._last_start[tenant] = max(begin, self._last_start.get(tenant, 0.0))
        self._end[tenant] = begin + cost / self.weight(tenant)
        self._estimates[request.id] = cost
        heapq.heappush(self._starts, (start, next(self._arrivals), request))
        return start

    def finished(self, request: Request) -> None:
        error = _tokens_taken(request) - self._estimates.pop(request.id, 0)
        if request.tenant in self._end:
            self._end[request.tenant] += error / self.weight(request.tenant)
        self._advance()  # and keep no request that has ended

    def weight(self, tenant: str) -> float:
        return self.weights.get(tenant, 1.0)

    def _advance(self) -> None:
        """To the start of the last request let in; when nothing is left to do, all tenants are even again."""
        while self._starts and self._starts[0][2].state is not RequestState.WAITING:
            self.virtual_time = max(self.virtual_time, heapq.heappop(self._starts)[0])
        if not self._estimates:
            self.virtual_time = max(self.virtual_time, *self._end.values(), *self._last_start.values(), 0.0)
            self._end.clear()
            self._last_start.clear()


def _tokens_taken(request: Request) -> int:
    """What was computed. Tokens found in the prefix cache count: a share must not depend on what filled the cache."""
    is_sample = request.parent_id is not None  # the shared prompt is charged to its parent
    if request.num_tokens == request.num_prompt_tokens:  # ended before its first token
        return 0 if is_sample else request.num_computed_tokens
    return (1 if is_sample else request.num_prompt_tokens) + len(request.output_tokens)


def _cost(estimate: Estimate, request: Request) -> float:
    return _at_least_0(f"estimate of request {request.id!r} (tokens)", estimate(request))


def _at_least_0(name: str, value: float) -> float:
    if not 0 <= value < math.inf:
        raise ValueError(f"{name}: expected a finite number, at least 0, got {value!r}")
    return value
