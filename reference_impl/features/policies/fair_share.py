"""A fair share of the tokens for each tenant."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from itertools import count

from reference_impl.features.policies.estimates import Estimate, cost_of, most_tokens
from reference_impl.interfaces import Request, RequestState


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
        tenant, cost = request.tenant, cost_of(self.estimate, request)
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
        """Moves the virtual time to the start of the last request let in; when nothing is left to do, all tenants are
        even again."""
        while self._starts and self._starts[0][2].state is not RequestState.WAITING:
            self.virtual_time = max(self.virtual_time, heapq.heappop(self._starts)[0])
        if not self._estimates:
            self.virtual_time = max(self.virtual_time, *self._end.values(), *self._last_start.values(), 0.0)
            self._end.clear()
            self._last_start.clear()


def _tokens_taken(request: Request) -> int:
    """The number of tokens that a request took. Tokens found in the prefix cache count, since a share must not depend
    on what filled the cache."""
    is_sample = request.parent_id is not None  # the shared prompt is charged to its parent
    if request.num_tokens == request.num_prompt_tokens:  # ended before its first token
        return 0 if is_sample else request.num_computed_tokens
    return (1 if is_sample else request.num_prompt_tokens) + len(request.output_tokens)
