"""Many replicas behind a router, in this process.

The router reads the stream once, as it is served, and sends each request to one replica: nothing holds the stream.

Closed loops: a request that follows another goes to the same replica, when that one has ended and its pause is over.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from reference_impl.assembly.config import EngineConfig
from reference_impl.interfaces import Policy
from reference_impl.simulation.cost import Roofline
from reference_impl.simulation.executor import StepCost
from reference_impl.simulation.ledger import Result
from reference_impl.simulation.replica import Replica
from reference_impl.simulation.routers import ROUTERS, Router
from reference_impl.simulation.workloads.recent import Recent
from reference_impl.simulation.workloads.request import WorkloadRequest
from reference_impl.theory.deployment import Deployment

HELD = 20_000  # of a closed loop: requests that wait for another, before replicas move on
READ_ON = 10  # times HELD: how far is read on for the follower of a request that has ended
HOMES = 200_000  # the last requests whose replica the router remembers, for their followers


@dataclass(frozen=True)
class Setup:
    """What every replica is made of. policy: makes one."""

    cost: StepCost
    config: EngineConfig | None = None
    policy: Callable[[], Policy] | None = None
    host_seconds: float = 0.0


def simulate_replicas(
    requests: Iterable[WorkloadRequest],
    replicas: int,
    cost: StepCost | Deployment,
    router: str | Callable[[int], Router] = "round_robin",
    config: EngineConfig | None = None,
    policy: Callable[[], Policy] | None = None,
    host_seconds: float = 0.0,
) -> list[Result]:
    """Serves the stream to its end; one result per replica (`Result.fold` makes them one).

    requests: in order of arrival; one that follows another comes after it, and before the time at which it is sent.
    router: of ROUTERS, or makes one for a number of replicas.
    """
    if replicas < 1:
        raise ValueError(f"expected at least one replica, got {replicas}")
    if isinstance(router, str):
        if router not in ROUTERS:
            raise ValueError(f"router: expected one of {', '.join(ROUTERS)}, got {router!r}")
        router = ROUTERS[router]
    setup = Setup(Roofline(cost) if isinstance(cost, Deployment) else cost, config, policy, host_seconds)
    return list(_Fleet(setup, replicas, _routed(requests, router(replicas), replicas)).run())


def simulate(
    requests: Iterable[WorkloadRequest],
    cost: StepCost | Deployment,
    config: EngineConfig | None = None,
    policy: Callable[[], Policy] | None = None,
    host_seconds: float = 0.0,
) -> Result:
    """The result of one replica."""
    [result] = simulate_replicas(requests, 1, cost, "round_robin", config, policy, host_seconds)
    return result


def _routed(
    requests: Iterable[WorkloadRequest], choose: Router, replicas: int
) -> Iterator[tuple[int, WorkloadRequest]]:
    homes: Recent[int] = Recent(HOMES)
    for request in requests:
        if request.after is None:
            replica = choose(request)
            if not 0 <= replica < replicas:
                raise ValueError(f"the router chose replica {replica} of {replicas} for request {request.id!r}")
        elif request.after in homes.values:
            replica = homes.values[request.after]
        else:
            raise ValueError(f"request {request.id!r} follows {request.after!r}, none of the last {HOMES:,} before it")
        homes.put(request.id, replica)
        yield replica, request


class _Fleet:
    """The replicas, and their requests in the order of the stream.

    A replica runs up to an arrival when it gets it, and until the end when the stream has ended. In a closed loop the
    stream does not say when to run: it is read on until many requests wait for others, and then the replica runs that
    is furthest behind. When a request ends whose follower has not been read, the stream is read on.
    """

    def __init__(self, setup: Setup, replicas: int, stream: Iterator[tuple[int, WorkloadRequest]]):
        self.stream = stream
        self.replicas = {name: self._replica(setup, name) for name in range(replicas)}
        self.followers: dict[str, list[WorkloadRequest]] = {}  # by id, the requests that wait for it
        self.num_held = 0
        self.ended: Recent[float] = Recent(HOMES)  # the last without a follower as far as was read, and when
        self.closed = self.at_end = self.inside = False

    def _replica(self, setup: Setup, name: int) -> Replica:
        policy = setup.policy() if setup.policy else None

        def ended(request_id: str, second: float) -> None:
            self._ended(name, request_id, second)

        return Replica(setup.cost, setup.config, policy, setup.host_seconds, ended)

    def run(self) -> Iterator[Result]:
        """Yields the replicas' results one after another, when all have ended."""
        while self._read():
            while self.num_held >= HELD and not self.at_end:
                self._advance()
        for replica in self.replicas.values():
            self._run(replica, math.inf)
        if self.followers:
            raise ValueError(f"requests follow others that never come: {', '.join(sorted(self.followers)[:5])} ...")
        while self.replicas:  # drop those whose result is out
            yield self.replicas.pop(next(iter(self.replicas))).result()

    def _advance(self) -> None:
        """Runs the replica that is furthest behind for a second, so that fewer requests have to be held."""
        behind = min(self.replicas.values(), key=lambda replica: replica.next_time)
        if behind.next_time == math.inf:
            raise ValueError(f"{self.num_held:,} requests wait for others, and none of those is under way")
        self._run(behind, behind.next_time + 1.0)

    def _run(self, replica: Replica, until: float) -> None:
        self.inside = True
        replica.run(until)
        self.inside = False

    def _read(self) -> bool:
        """Gives the next request to its replica; False at the end of the stream."""
        item = next(self.stream, None)
        if item is None:
            self.at_end = True
            return False
        name, request = item
        replica = self.replicas[name]
        if request.after is None:
            if not self.inside:  # a replica in the middle of a run reads arrivals itself
                self._run(replica, request.arrival)
            replica.offer(request, request.arrival)
        else:
            self.closed = True
            if request.after in self.ended.values:
                replica.offer(request, self.ended.values[request.after] + request.think)
            else:
                self.followers.setdefault(request.after, []).append(request)
                self.num_held += 1
        return True

    def _ended(self, name: int, request_id: str, second: float) -> None:
        if self.closed:
            while request_id not in self.followers and self.num_held < READ_ON * HELD and self._read():
                pass
        if request_id not in self.followers:
            self.ended.put(request_id, second)
            return
        for request in self.followers.pop(request_id):
            self.num_held -= 1
            self.replicas[name].offer(request, second + request.think)
