"""Which replica serves a request: what a gateway can decide from what it has sent, and when.

The router reads the stream ahead of the replicas and gets nothing from them: it has arrivals, prompts and its own
choices, not how long answers get and not when they end. A request that follows another is not routed: it goes to the
same replica.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from itertools import count

from reference_impl.simulation.workloads.request import PAGE_TOKENS, WorkloadRequest

Router = Callable[[WorkloadRequest], int]
RECENT = 30.0  # seconds that count as a replica's load
COMPUTED = 5  # weight of a prompt token that must be computed; a cached one takes room and weighs 1
BOUND = 1.25  # times the mean load: above it a replica gets no request for the sake of a prefix
PAGES = 1 << 18  # that the prefix router remembers, and at most twice as many: 16.8 million tokens


def round_robin(replicas: int) -> Router:
    """Routes to the replicas in turn."""
    numbers = count()
    return lambda request: next(numbers) % replicas


def least_tokens(replicas: int) -> Router:
    """Routes to the replica that got the fewest prompt tokens in the last RECENT seconds."""
    load = _Load(replicas)

    def choose(request: WorkloadRequest) -> int:
        load.forget(request.arrival)
        replica = load.least()
        load.add(replica, request.arrival, request.num_prompt_tokens)
        return replica

    return choose


def prefix(replicas: int) -> Router:
    """Routes to where the longest beginning of the prompt was sent last, or else to the least load.

    Load: prompt tokens of the last RECENT seconds; those that had to be computed, as far as the router knows, count
    COMPUTED times. (If cached ones weighed nothing, one replica would get ever more of them and evict.) A replica that
    would come above BOUND times the mean is passed over, as in consistent hashing with bounded loads (Mirrokni, Thorup
    and Zadimoghaddam, SODA 2018): a popular prefix then gets a second home.
    """
    load = _Load(replicas)
    homes: dict[int, int] = {}  # page -> replica; a page stands for everything before it
    older: dict[int, int] = {}

    def known(page: int) -> bool:
        return page in homes or page in older

    def choose(request: WorkloadRequest) -> int:
        nonlocal homes, older
        load.forget(request.arrival)
        pages, work = request.pages, COMPUTED * request.num_prompt_tokens
        # A replica sent a page was sent all before it, and they are forgotten together: known pages come first.
        matched = bisect_left(pages, True, key=lambda page: not known(page))
        replica = -1
        if matched:
            page = pages[matched - 1]
            replica = homes[page] if page in homes else older[page]
            work -= (COMPUTED - 1) * PAGE_TOKENS * matched
        if replica < 0 or load.of[replica] + work > BOUND * (load.total + work) / replicas:
            replica, work = load.least(), COMPUTED * request.num_prompt_tokens
        load.add(replica, request.arrival, work)
        homes.update(dict.fromkeys(pages, replica))
        if len(homes) >= PAGES:
            homes, older = {}, homes
        return replica

    return choose


class _Load:
    """What was sent lately. of: tokens that were sent to each replica in the last RECENT seconds."""

    def __init__(self, replicas: int):
        self.of, self.total = [0] * replicas, 0
        self._sent: deque[tuple[float, int, int]] = deque()

    def forget(self, now: float) -> None:
        while self._sent and self._sent[0][0] <= now - RECENT:
            _, replica, tokens = self._sent.popleft()
            self.of[replica] -= tokens
            self.total -= tokens

    def add(self, replica: int, now: float, tokens: int) -> None:
        self._sent.append((now, replica, tokens))
        self.of[replica] += tokens
        self.total += tokens

    def least(self) -> int:
        return self.of.index(min(self.of))


ROUTERS: dict[str, Callable[[int], Router]] = {
    "round_robin": round_robin,
    "least_tokens": least_tokens,
    "prefix": prefix,
}
