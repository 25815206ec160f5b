"""What each policy promises: a total order, and a bound on how far a request can be overtaken."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference_impl.assembly.scheduler import continuous_batching
from reference_impl.core.block_pool import BlockPool
from reference_impl.core.kv_manager import KVManager
from reference_impl.core.ranking import FirstCome, RankedQueue
from reference_impl.features.policies import (
    ByPriority,
    EarliestDeadline,
    FairShare,
    ShortestFirst,
    most_tokens,
)
from reference_impl.interfaces import Policy, Request, SamplingParams, StepOutput
from tests.examples import examples as part

examples = settings(max_examples=part(150), deadline=None, derandomize=True, database=None)


def make_request(name: str, num_prompt: int = 1, max_tokens: int = 1, **fields: Any) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens)
    return Request(name, [1] * num_prompt, num_prompt, sampling, seed=0, **{"arrival": 0.0, **fields})


def order(policy: Policy, *requests: Request) -> list[str]:
    queue = RankedQueue()
    for number, request in enumerate(requests):
        queue.push(request, (policy.rank(request), number))
    return [request.id for request in queue]


# --- every policy ---------------------------------------------------------------------------------------------------

POLICIES: dict[str, Callable[[], Policy]] = {
    "first come": FirstCome,
    "shortest first": ShortestFirst,
    "shortest first, no aging": lambda: ShortestFirst(aging=0),
    "priority": ByPriority,
    "deadline": EarliestDeadline,
    "slack": lambda: EarliestDeadline(seconds_per_token=0.01),
    "fair": lambda: FairShare({"x": 3.0, "y": 0.5}),
}

any_request = st.builds(
    lambda prompt, output, gap, priority, tenant, slo: (prompt, output, gap, priority, tenant, slo),
    st.integers(1, 50),
    st.integers(1, 50),
    st.integers(0, 3),
    st.integers(-2, 2),
    st.sampled_from("xyz"),
    st.none() | st.integers(-5, 50),
)


def build(drawn: list[tuple[int, int, int, int, str, int | None]]) -> list[Request]:
    """Requests in order of arrival, from (prompt, output, seconds since the one before, priority, tenant, slo)."""
    requests, now = [], 0
    for number, (prompt, output, gap, priority, tenant, slo) in enumerate(drawn):
        now += gap
        deadline = None if slo is None else float(now + slo)
        requests.append(
            make_request(
                str(number), prompt, output,
                arrival=float(now), priority=priority, tenant=tenant, deadline=deadline,
            )
        )  # fmt: skip
    return requests


@pytest.mark.parametrize("name", POLICIES)
@examples
@given(drawn=st.lists(any_request, max_size=12), seed=st.integers(0, 99))
def test_ranks_are_a_total_order_and_the_line_serves_everybody_once(name: str, drawn: Any, seed: int) -> None:
    policy, requests = POLICIES[name](), build(drawn)
    ranks = [policy.rank(request) for request in requests]
    assert all(math.isfinite(rank) for rank in ranks)
    expected = [request.id for _, _, request in sorted(zip(ranks, range(99), requests, strict=False))]
    queue, entries = RankedQueue(), list(zip(requests, zip(ranks, range(99), strict=False), strict=False))
    random.Random(seed).shuffle(entries)  # the order of pushing must not matter: preempted requests come back
    for request, rank in entries:
        queue.push(request, rank)
    assert [request.id for request in queue] == expected


@examples
@given(drawn=st.lists(any_request, max_size=12))
def test_first_come_is_first_served(drawn: Any) -> None:
    assert order(FirstCome(), *build(drawn)) == [str(i) for i in range(len(drawn))]


# --- shortest first -------------------------------------------------------------------------------------------------


@examples
@given(drawn=st.lists(any_request, min_size=2, max_size=12), aging=st.integers(1, 40))
def test_shortest_first_is_overtaken_only_by_the_shorter_and_only_for_a_time(drawn: Any, aging: int) -> None:
    policy, requests = ShortestFirst(aging=aging), build(drawn)
    ranks = [policy.rank(request) for request in requests]
    for i, j in combinations(range(len(requests)), 2):
        later, shorter = requests[j].arrival - requests[i].arrival, most_tokens(requests[i]) - most_tokens(requests[j])
        assert (ranks[j] < ranks[i]) == (aging * later < shorter)
        assert ranks[i] < ranks[j] or later <= most_tokens(requests[i]) / aging


@pytest.mark.parametrize(("aging", "served_after"), [(0, None), (1, 99), (9, 11)])
def test_a_long_request_starves_only_without_aging(aging: int, served_after: int | None) -> None:
    """A request of 100 tokens, and every second one of 1 token, which takes a second: there is always a shorter one."""
    policy, queue, served = ShortestFirst(aging=aging), RankedQueue(), []
    long = make_request("long", 50, 50, arrival=0.0)
    queue.push(long, policy.rank(long))
    for second in range(300):
        short = make_request(str(second), 0, 1, arrival=float(second))
        queue.push(short, policy.rank(short))
        served.append(queue.pop().id)
    assert (served.index("long") if "long" in served else None) == served_after


def test_shortest_first_believes_the_estimate_it_is_given() -> None:
    a, b = make_request("a", 10, 100), make_request("b", 20, 20)
    assert order(ShortestFirst(), a, b) == ["b", "a"]
    assert order(ShortestFirst(estimate=lambda request: request.num_prompt_tokens), a, b) == ["a", "b"]


def test_the_default_estimate_is_the_most_a_request_can_take() -> None:
    request = make_request("a", 10, 7)
    assert most_tokens(request) == 17
    request.num_computed_tokens = 4
    assert most_tokens(request) == 13
    child = make_request("a.1", 10, 7, parent_id="a", sample_index=1)
    assert most_tokens(child) == 8, "it shares the prompt, of which it computes the last token again"


# --- priority -------------------------------------------------------------------------------------------------------


@examples
@given(drawn=st.lists(any_request, min_size=2, max_size=12), aging=st.integers(1, 4))
def test_priority_is_overtaken_only_by_the_more_urgent_and_only_for_a_time(drawn: Any, aging: int) -> None:
    policy, requests = ByPriority(aging=aging), build(drawn)
    ranks = [policy.rank(request) for request in requests]
    for i, j in combinations(range(len(requests)), 2):
        later, more_urgent = requests[j].arrival - requests[i].arrival, requests[i].priority - requests[j].priority
        assert (ranks[j] < ranks[i]) == (aging * later < more_urgent)


@examples
@given(drawn=st.lists(any_request, max_size=12))
def test_without_aging_priority_is_strict_and_in_order_of_arrival_among_equals(drawn: Any) -> None:
    requests = build(drawn)
    expected = sorted(requests, key=lambda request: request.priority)
    assert order(ByPriority(aging=0), *requests) == [request.id for request in expected]


def test_priority_may_preempt_unless_told_not_to() -> None:
    assert ByPriority().preemptive
    assert not ByPriority(preemptive=False).preemptive
    assert not any(policy().preemptive for name, policy in POLICIES.items() if name != "priority")


# --- deadlines ------------------------------------------------------------------------------------------------------


@examples
@given(drawn=st.lists(any_request, min_size=2, max_size=12), per_token=st.sampled_from([0.0, 0.125, 0.5]))
def test_nobody_who_arrives_after_the_latest_start_of_a_request_goes_before_it(drawn: Any, per_token: float) -> None:
    policy, requests = EarliestDeadline(8.0, per_token), build(drawn)
    ranks = [policy.rank(request) for request in requests]
    for i, j in combinations(range(len(requests)), 2):
        request = requests[i]
        deadline = request.arrival + 8.0 if request.deadline is None else request.deadline
        latest_start = max(request.arrival, deadline - per_token * most_tokens(request))
        assert ranks[i] <= ranks[j] or requests[j].arrival < latest_start


@examples
@given(drawn=st.lists(any_request, min_size=2, max_size=12), moment=st.integers(0, 100))
def test_at_every_moment_the_static_rank_orders_by_slack(drawn: Any, moment: int) -> None:
    """Slack: the time left to the deadline minus the time the request still needs. Here everybody has some left."""
    requests, per_token = build(drawn), 0.25
    for request in requests:
        request.deadline = request.arrival + 25 + (request.deadline or 0) % 30
    policy = EarliestDeadline(seconds_per_token=per_token)
    slack = [request.deadline - moment - per_token * most_tokens(request) for request in requests]
    expected = sorted(range(len(requests)), key=slack.__getitem__)
    assert order(policy, *requests) == [str(i) for i in expected]


def test_by_deadline_all_are_in_time_where_first_come_is_late() -> None:
    """Three requests of 10 s each on one server, with 30, 20 and 10 s of time."""
    requests = [make_request(str(slo), deadline=float(slo)) for slo in (30, 20, 10)]

    def late(policy: Policy) -> list[str]:
        return [name for end, name in zip((10, 20, 30), order(policy, *requests), strict=True) if end > int(name)]

    assert late(FirstCome()) == ["10"]
    assert late(EarliestDeadline()) == []


def test_a_request_that_needs_longer_must_start_earlier() -> None:
    long, short = make_request("long", 10, 90, deadline=12.0), make_request("short", 5, 5, deadline=11.0)
    assert order(EarliestDeadline(), long, short) == ["short", "long"]
    assert order(EarliestDeadline(seconds_per_token=0.1), long, short) == ["long", "short"]


def test_who_names_no_deadline_gets_the_default_counted_from_its_arrival() -> None:
    policy = EarliestDeadline(default_slo=10.0, seconds_per_token=0.5)
    assert policy.rank(make_request("a", 3, 5, arrival=100.0)) == 100 + 10 - 4
    assert policy.rank(make_request("b", 3, 5, arrival=100.0, deadline=107.0)) == 107 - 4


def test_a_deadline_that_has_passed_does_not_overtake_those_who_came_earlier() -> None:
    early = make_request("early", arrival=1.0, deadline=1.5)
    hopeless = make_request("hopeless", arrival=2.0, deadline=-100.0)
    assert order(EarliestDeadline(), early, hopeless) == ["early", "hopeless"]


@pytest.mark.parametrize("deadline", [math.nan, math.inf, -math.inf])
def test_a_deadline_must_be_a_moment(deadline: float) -> None:
    with pytest.raises(ValueError, match=r"request 'a': expected a finite deadline in seconds, got -?(nan|inf)"):
        EarliestDeadline().rank(make_request("a", deadline=deadline))


# --- in the scheduler -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", POLICIES)
@settings(examples, max_examples=part(40))
@given(drawn=st.lists(any_request, min_size=1, max_size=12), seqs=st.integers(1, 4), num_blocks=st.integers(25, 40))
def test_requests_are_let_in_by_rank_and_all_finish(name: str, drawn: Any, seqs: int, num_blocks: int) -> None:
    """One second a step, with so few blocks that requests are preempted."""
    policy, requests = POLICIES[name](), build(drawn)
    ranks: dict[str, Any] = {}
    finished: list[str] = []

    class Watched:
        preemptive = policy.preemptive

        def rank(self, request: Request) -> Any:
            assert request.id not in ranks, "asked once"
            ranks[request.id] = policy.rank(request)
            return ranks[request.id]

        def finished(self, request: Request) -> None:
            finished.append(request.id)
            policy.finished(request)

    scheduler = continuous_batching(KVManager(BlockPool(num_blocks), 4), seqs, 16, Watched())
    coming = list(requests)
    for now in range(sum(most_tokens(request) for request in requests) * 2 + 100):
        while coming and coming[0].arrival <= now:
            request = coming.pop(0)
            request.max_total_tokens = most_tokens(request)
            scheduler.add(request)
        plan = scheduler.schedule(float(now))
        for let_in, _ in plan.admitted:
            for waiting in scheduler.waiting:
                assert (ranks[let_in], int(let_in)) < (ranks[waiting.id], int(waiting.id))
        scheduler.update(plan, StepOutput({r.request_id: (1,) for r in plan.rows if r.samples}, {}, now, now))
        if not coming and not scheduler.has_work():
            break
    assert all(request.finish_reason == "length" for request in requests)
    assert sorted(finished) == sorted(ranks) == sorted(request.id for request in requests)
    assert scheduler.kv.num_available == num_blocks


# --- bad arguments --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [-1, math.inf, math.nan])
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda v: ShortestFirst(aging=v), "aging"),
        (lambda v: ByPriority(aging=v), "aging"),
        (lambda v: EarliestDeadline(default_slo=v), "default_slo"),
        (lambda v: EarliestDeadline(seconds_per_token=v), "seconds_per_token"),
        (lambda v: ShortestFirst(estimate=lambda _: v).rank(make_request("a")), "estimate of request 'a'"),
        (lambda v: FairShare(estimate=lambda _: v).rank(make_request("a")), "estimate of request 'a'"),
    ],
)
def test_numbers_must_be_finite_and_not_negative(make: Callable[[float], Any], name: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"{name}.*: expected a finite number, at least 0, got {value}"):
        make(value)


@pytest.mark.parametrize("weight", [0, -1, math.inf, math.nan])
def test_a_weight_must_be_above_0(weight: float) -> None:
    with pytest.raises(ValueError, match=f"weight of tenant 'x': expected a finite number above 0, got {weight}"):
        FairShare({"x": weight})
