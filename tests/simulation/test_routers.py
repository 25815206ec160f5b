"""Routers: what they choose, what they know, and what a prefix-aware one gains on which load."""

from __future__ import annotations

from itertools import pairwise

import pytest

from reference_impl.assembly.config import EngineConfig
from reference_impl.simulation import Result, routers, simulate_replicas
from reference_impl.simulation.routers import ROUTERS, least_tokens, prefix
from reference_impl.simulation.workloads import WorkloadRequest, workload
from reference_impl.simulation.workloads.table import measure
from reference_impl.theory.deployment import Deployment
from reference_impl.theory.hardware import device
from reference_impl.theory.model_shapes import model

from .loads import request

H100 = Deployment(model("llama-3-8b"), device("H100"), mfu=0.5, mbu=0.8)


def text(name: str, arrival: float, *pages: int) -> WorkloadRequest:
    """A prompt of these pages. Pages are chained: equal ones must have equal ones before them."""
    return WorkloadRequest(name, arrival, 64 * len(pages), 5, pages)


def test_least_tokens_forgets_what_was_more_than_30_seconds_ago() -> None:
    choose = least_tokens(2)
    assert choose(request("a", 0.0, 1000, 5)) == 0
    assert [choose(request(i, 5.9 * i, 10, 5)) for i in range(1, 6)] == [1] * 5
    assert choose(request("b", 30.1, 10, 5)) == 0, "the thousand are gone, the fifty are not"


def test_the_prefix_router_sends_to_the_longest_match() -> None:
    choose = prefix(3)
    assert choose(text("first", 0.0, 1, 2, 3)) == 0
    assert choose(text("too long for the first", 0.1, 1, 2, *range(100, 200))) == 1, "where 1 and 2 are newest, too"
    assert choose(text("other", 0.2, *range(300, 400))) == 2
    assert choose(text("longest", 0.3, 1, 2, 3, 4)) == 0
    assert choose(text("shorter", 0.4, 1, 2, 5)) == 0, "now they are newest there"
    assert choose(text("new", 0.6, 77)) == 0, "nobody has it: it goes where least was computed"


def test_a_popular_prefix_gets_a_second_home_when_the_first_has_too_much() -> None:
    choose = prefix(4)
    seen = [choose(text(f"r{i}", 0.01 * i, 1, 2, *range(1000 * i + 3, 1000 * i + 13))) for i in range(400)]
    counts = [seen.count(replica) for replica in range(4)]
    assert max(counts) <= 1.3 * 100, "a page of the shared two is a sixth of the prompt"
    assert min(counts) > 0
    assert sum(a == b for a, b in pairwise(seen)) > 100, "stays where it is while it can"


def test_the_prefix_router_remembers_no_more_than_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routers, "PAGES", 10)
    choose = prefix(3)
    for i in range(9):
        choose(text(f"other {i}", 0.2, *range(100 * i, 100 * i + 9)))
    kept = dict(zip(choose.__code__.co_freevars, choose.__closure__, strict=True))  # type: ignore[attr-defined]
    assert len(kept["homes"].cell_contents) + len(kept["older"].cell_contents) <= 2 * (10 + 9)


def serve(name: str, router: str, num: int = 200) -> list[Result]:
    load = workload(name, rate=4.0, num_requests=num, arrivals="poisson")
    config = EngineConfig(num_blocks=4000, max_num_seqs=64)
    return simulate_replicas(load, 4, H100, router, config)


def test_agents_find_their_past_where_they_were_and_not_in_turn() -> None:
    """Claim of chapter 06: behind a round robin each of N caches sees each prefix only every N-th time.

    An agent's prompt is its own past: 1 in 4 calls comes to where the last one was.
    """
    ideal = measure(workload("agents", rate=4.0, num_requests=200, arrivals="poisson")).shared
    by_prefix = serve("agents", "prefix")
    turn, aware = Result.fold(serve("agents", "round_robin")), Result.fold(by_prefix)
    assert 2 * turn.hit_rate < aware.hit_rate < ideal
    assert aware.hit_rate > 0.75 * ideal
    assert aware.percentiles()["ttft"][0] < 0.5 * turn.percentiles()["ttft"][0]
    computed = [r.prompt_tokens - r.cached_tokens for r in by_prefix]
    assert max(computed) < 1.5 * sum(computed) / 4, "the bound holds"


def test_questions_with_new_documents_gain_little() -> None:
    """RAG: everybody's system prompt is everywhere soon, and fresh documents stand before a session's own text."""
    rates = {router: Result.fold(serve("rag", router)).hit_rate for router in ROUTERS}
    assert rates["round_robin"] == pytest.approx(rates["least_tokens"], abs=0.02)
    assert rates["round_robin"] - 0.01 < rates["prefix"] < rates["round_robin"] + 0.1


@pytest.mark.parametrize("router", ROUTERS)
def test_a_router_chooses_the_same_again(router: str) -> None:
    runs = [serve("agents", router, 40) for _ in range(2)]
    for name in ("arrival", "ttft", "latency"):
        for replica in range(4):
            first, *others = (getattr(run[replica], name).tolist() for run in runs)
            assert all(other == first for other in others)


@pytest.mark.parametrize("router", ROUTERS)
def test_with_one_replica_every_router_is_the_same(router: str) -> None:
    choose = ROUTERS[router](1)
    assert {choose(r) for r in workload("agents", num_requests=50)} == {0}
