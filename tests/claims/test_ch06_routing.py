"""E06.4 over replicas that serve: the engine's scheduler and prefix cache behind a router, on the agents trace."""

from collections.abc import Callable
from zlib import crc32

import numpy as np
import pytest

from reference_impl.simulation import Result, simulate_replicas
from reference_impl.simulation.workloads import WorkloadRequest, workload
from reference_impl.theory.deployment import Deployment
from reference_impl.theory.hardware import device
from reference_impl.theory.model_shapes import model

H100 = Deployment(model("llama-3-8b"), device("H100"), mfu=0.5, mbu=0.8)
REPLICAS = 4


def by_session(replicas: int) -> Callable[[WorkloadRequest], int]:
    return lambda request: crc32(request.session.encode()) % replicas


def served(num: int, router: str | Callable[[int], Callable[[WorkloadRequest], int]]) -> tuple[Result, float]:
    """All replicas as one; p99 of the time to first token."""
    calls = workload("agents", seed=1, rate=16, num_requests=num)
    results = simulate_replicas(calls, REPLICAS, H100, router=router)
    together = Result.fold(results)
    assert together.num_requests == num
    return together, float(np.percentile(together.ttft, 99))


@pytest.mark.parametrize(
    ("num", "shares"), [(250, (0.31, 0.544, 0.591)), pytest.param(500, (0.41, 0.69, 0.72), marks=pytest.mark.slow)]
)
def test_e06_04_a_router_that_knows_finds_more_and_what_it_knows_of_load_decides_who_waits(
    num: int, shares: tuple[float, ...]
) -> None:
    """Runs of agents on four replicas. Of 500 calls in turn 41 % of the prompt tokens are found, by session 69, by
    prefix 72.

    The slowest in a hundred wait 2.5 s in turn, longer if a session's replica is drawn by lot, and 1.6 s if the router
    looks at the prefix and at the load. One cache that forgets nothing would find more than all of them.
    """
    (turn, turn_p99), (session, session_p99), (prefix, prefix_p99) = (
        served(num, router) for router in ("round_robin", by_session, "prefix")
    )
    assert turn.prompt_tokens == session.prompt_tokens == prefix.prompt_tokens
    assert (turn.hit_rate, session.hit_rate, prefix.hit_rate) == pytest.approx(shares, abs=0.005)
    assert prefix_p99 < 0.75 * turn_p99
    assert session_p99 > turn_p99, "the hits alone do not shorten the tail"
    assert session.ttft.mean() < turn.ttft.mean()
    calls = list(workload("agents", seed=1, rate=16, num_requests=num))
    seen: set[int] = set()
    known = 0
    for request in calls:
        known += sum(page in seen for page in request.pages)
        seen.update(request.pages)
    assert prefix.hit_rate < 64 * known / turn.prompt_tokens, "nothing evicted, nobody apart"
