"""Fair shares: who gets how many tokens while others wait too, with right estimates and wrong ones."""

from __future__ import annotations

from collections import defaultdict
from itertools import combinations
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from reference_impl.core.ranking import RankedQueue
from reference_impl.features.policies import FairShare, most_tokens
from reference_impl.interfaces import Request, RequestState, SamplingParams
from tests.examples import examples as part

examples = settings(max_examples=part(150), deadline=None, derandomize=True, database=None)


def make_request(name: str, num_prompt: int = 1, max_tokens: int = 1, **fields: Any) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens)
    return Request(name, [1] * num_prompt, num_prompt, sampling, seed=0, **{"arrival": 0.0, **fields})


class Line:
    """One server that lets in one request after the other, whole, as the scheduler does: rank once, push, pop."""

    def __init__(self, policy: FairShare):
        self.policy, self.queue, self.num_ranked = policy, RankedQueue(), 0

    def add(self, request: Request) -> None:
        self.num_ranked += 1
        self.queue.push(request, (self.policy.rank(request), self.num_ranked))

    def next(self) -> Request:
        request = self.queue.pop()
        request.state = RequestState.RUNNING
        return request

    def finish(self, request: Request, num_output: int | None = None) -> None:
        num_output = request.sampling.max_tokens if num_output is None else num_output
        request.tokens += [1] * num_output
        request.num_computed_tokens = len(request.tokens) - 1
        request.state = RequestState.FINISHED
        self.policy.finished(request)

    def order(self) -> list[str]:
        return [self.next().id for _ in range(len(self.queue))]


WEIGHTS = {"x": 1.0, "y": 3.0, "z": 0.5}


arrivals = st.lists(
    st.lists(st.tuples(st.sampled_from("xyz"), st.integers(1, 60), st.integers(1, 40)), max_size=4),
    min_size=1,
    max_size=30,
)


class Served:
    """What a line let in, service by service, and which tenants waited just before."""

    def __init__(self, rounds: list[list[tuple[str, int, int]]], finish_at_once: bool):
        self.line = Line(FairShare({"y": 3.0, "z": 0.5}))
        self.requests: list[Request] = []
        self.ahead: dict[str, tuple[float, dict[str, list[int]]]] = {}  # those let in while a request waited
        self.log: list[tuple[str, int, set[str]]] = []
        self.order: list[str] = []
        running: list[Request] = []
        for arriving in [*rounds, *[[]] * sum(map(len, rounds))]:
            for tenant, prompt, output in arriving:
                self.arrive(make_request(str(len(self.requests)), prompt, output, tenant=tenant))
            if self.line.queue:
                waiting = {request.tenant for request in self.line.queue}
                request = self.line.next()
                self.log.append((request.tenant, most_tokens(request), waiting))
                self.order.append(request.id)
                for other in self.line.queue:
                    self.ahead[other.id][1][request.tenant].append(most_tokens(request))
                running.append(request)
            while running and (finish_at_once or len(running) > 3):
                self.line.finish(running.pop(0))

    def arrive(self, request: Request) -> None:
        self.requests.append(request)
        self.line.add(request)
        policy = self.line.policy
        ((_, start),) = [(n, s) for s, n, r in policy._starts if r is request]
        self.ahead[request.id] = (start - policy.virtual_time, defaultdict(list))


@examples
@given(rounds=arrivals, finish_at_once=st.booleans())
def test_while_two_tenants_wait_each_is_within_one_request_of_its_share(rounds: Any, finish_at_once: bool) -> None:
    log = Served(rounds, finish_at_once).log
    largest = {t: max((cost for tenant, cost, _ in log if tenant == t), default=0) for t in WEIGHTS}
    for a, b in combinations(WEIGHTS, 2):
        bound = largest[a] / WEIGHTS[a] + largest[b] / WEIGHTS[b]
        for begin in range(len(log)):
            got = {a: 0, b: 0}
            for tenant, cost, waiting in log[begin:]:
                if not {a, b} <= waiting:
                    break
                if tenant in got:
                    got[tenant] += cost
                assert abs(got[a] / WEIGHTS[a] - got[b] / WEIGHTS[b]) <= bound + 1e-9
                ideal = sum(got.values()) * WEIGHTS[a] / (WEIGHTS[a] + WEIGHTS[b])
                assert abs(got[a] - ideal) <= max(largest[a], largest[b]) + 1e-9


@examples
@given(rounds=arrivals, finish_at_once=st.booleans())
def test_another_tenant_gets_ahead_by_no_more_than_the_bound(rounds: Any, finish_at_once: bool) -> None:
    served = Served(rounds, finish_at_once)
    for request in served.requests:
        until_start, ahead = served.ahead[request.id]
        for tenant, costs in ahead.items():
            if tenant != request.tenant:
                assert sum(costs[:-1]) <= until_start * WEIGHTS[tenant] + 1e-9


@examples
@given(rounds=arrivals, finish_at_once=st.booleans())
def test_requests_of_one_tenant_keep_their_order(rounds: Any, finish_at_once: bool) -> None:
    served = Served(rounds, finish_at_once)
    for tenant in WEIGHTS:
        mine = [request.id for request in served.requests if request.tenant == tenant]
        assert [name for name in served.order if served.requests[int(name)].tenant == tenant] == mine


def test_a_flood_from_one_tenant_does_not_hold_up_another() -> None:
    line = Line(FairShare())
    for i in range(100):
        line.add(make_request(f"flood {i}", 10, 10, tenant="loud"))
    line.next()
    line.add(make_request("quiet", 10, 10, tenant="quiet"))
    assert line.order().index("quiet") <= 1


def test_weights_are_shares_of_tokens_not_of_requests() -> None:
    line = Line(FairShare({"gold": 3}))
    for i in range(60):
        line.add(make_request(f"gold {i}", 5, 5, tenant="gold"))
        line.add(make_request(f"free {i}", 15, 5, tenant="free"))
    tokens = {"gold": 0, "free": 0}
    for _ in range(42):
        request = line.next()
        tokens[request.tenant] += most_tokens(request)
    assert tokens == {"gold": 360, "free": 120}


def test_a_tenant_that_pauses_saves_nothing_up() -> None:
    line = Line(FairShare())
    for i in range(40):
        line.add(make_request(f"busy {i}", 5, 5, tenant="busy"))
    for _ in range(30):
        line.finish(line.next())
    for i in range(10):
        line.add(make_request(f"idle {i}", 5, 5, tenant="idle"))
    names = [name.split()[0] for name in line.order()]
    for n in range(2, 21, 2):
        assert abs(names[:n].count("idle") - n / 2) <= 1


def test_after_everybody_has_finished_all_are_even_again() -> None:
    line = Line(FairShare())
    for i in range(3):
        line.add(make_request(f"a {i}", 500, 500, tenant="a"))
    for _ in range(3):
        line.finish(line.next())
    a, b = make_request("a", tenant="a"), make_request("b", tenant="b")
    assert line.policy.rank(a) == line.policy.rank(b)


def test_what_was_really_used_counts_in_the_end() -> None:
    """Both tenants ask for 100 tokens; one takes 10 of output, the other all 90. Each always has two waiting."""
    line, taken = Line(FairShare()), {"brief": 0, "wordy": 0}
    for number, tenant in enumerate([*taken] * 2):
        line.add(make_request(f"first {number}", 10, 90, tenant=tenant))
    for number in range(600):
        request = line.next()
        line.finish(request, 10 if request.tenant == "brief" else 90)
        taken[request.tenant] += request.num_tokens
        line.add(make_request(str(number), 10, 90, tenant=request.tenant))
        assert abs(taken["brief"] - taken["wordy"]) <= 400, "two estimates of each tenant, however long it lasts"
    assert min(taken.values()) > 5000


def test_an_estimate_that_is_always_too_low_does_not_buy_a_larger_share() -> None:
    line, taken = Line(FairShare(estimate=lambda r: 1 if r.tenant == "liar" else most_tokens(r))), {"liar": 0, "b": 0}
    for tenant in taken:
        line.add(make_request(tenant, 10, 90, tenant=tenant))
    for number in range(200):
        request = line.next()
        line.finish(request)
        taken[request.tenant] += request.num_tokens
        line.add(make_request(str(number), 10, 90, tenant=request.tenant))
        assert abs(taken["liar"] - taken["b"]) <= 200


def test_who_is_aborted_before_anything_was_computed_has_used_nothing() -> None:
    policy = FairShare()
    first, other, second = (make_request(name, 10, 90, tenant="a") for name in ("first", "other", "second"))
    policy.rank(make_request("keeps the engine busy", tenant="b"))
    policy.rank(first)
    assert policy.rank(other) == 100
    policy.finished(other)
    policy.finished(first)
    assert policy.rank(second) == 100, "after `other` was to start: a tenant's requests keep their order"
    assert policy.rank(make_request("third", tenant="a")) == 100


def test_a_sample_that_is_aborted_before_its_first_token_costs_nothing() -> None:
    """It shares the prompt, for which its parent pays."""
    policy = FairShare()
    parent = make_request("a", 50, 10, tenant="a")
    assert policy.rank(parent) == 0
    sample = make_request("a/1", 50, 10, tenant="a", parent_id="a", sample_index=1)
    assert policy.rank(sample) == 60
    sample.num_computed_tokens = 49
    policy.finished(sample)
    assert policy.rank(make_request("b", 5, 5, tenant="a")) == 60


def test_a_share_does_not_depend_on_who_filled_the_cache() -> None:
    """Tokens that were found in the prefix cache count like any others."""
    policy = FairShare()
    for tenant, num_cached in (("a", 0), ("b", 48)):
        policy.rank(make_request(f"keeps {tenant}", tenant=tenant))
        request = make_request(tenant, 50, 10, tenant=tenant)
        policy.rank(request)
        request.tokens += [1] * 4
        request.num_computed_tokens, request.num_cached_tokens = 53, num_cached
        policy.finished(request)
    ranks = [policy.rank(make_request(f"next of {tenant}", 5, 5, tenant=tenant)) for tenant in "ab"]
    assert ranks == [2 + 54] * 2


def test_a_correction_is_worth_as_much_as_the_tokens_it_corrects() -> None:
    """A tenant of weight 4 asks for 100 tokens and takes 20: its next turn comes at 20 / 4."""
    policy = FairShare({"gold": 4.0})
    policy.rank(make_request("keeps the engine busy", tenant="b"))
    request = make_request("a", 10, 90, tenant="gold")
    policy.rank(request)
    assert policy.rank(make_request("b", 10, 90, tenant="gold")) == 25
    request.tokens += [1] * 10
    policy.finished(request)
    assert policy.rank(make_request("c", 10, 90, tenant="gold")) == 25 + 100 / 4 - 80 / 4


def test_tenants_who_are_gone_are_forgotten() -> None:
    line = Line(FairShare())
    for number in range(50):
        line.add(make_request(str(number), 5, 5, tenant=str(number)))
    while len(line.queue):
        line.finish(line.next())
    policy = line.policy
    for kept in (policy._end, policy._last_start, policy._estimates, policy._starts):
        assert not kept
