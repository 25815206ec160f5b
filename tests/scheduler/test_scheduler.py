"""Scheduler, KV manager and block pool together, against every promise they make, in any order of events."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from reference_impl.interfaces import Request, RequestState, SamplingParams, StepOutput, StepPlan
from reference_impl.kv.block_pool import BlockPool
from reference_impl.kv.manager import KVManager
from reference_impl.scheduler.scheduler import Scheduler

END = 7  # the end token of these requests


def make_request(name: str, num_prompt: int, max_tokens: int, longest: int = 10**9) -> Request:
    return Request(
        id=name,
        tokens=[1] * num_prompt,
        num_prompt_tokens=num_prompt,
        sampling=SamplingParams(max_tokens=max_tokens),
        seed=0,
        arrival=0.0,
        stop_token_ids=frozenset({END}),
        max_total_tokens=min(num_prompt + max_tokens, longest),
    )


def output_of(plan: StepPlan, token: int = 1) -> StepOutput:
    return StepOutput({row.request_id: token for row in plan.rows if row.samples}, {}, 0.0, 0.0)


class Serving(RuleBasedStateMachine):
    """Adds, steps, aborts (also while a step runs) and, at the end, lets everything finish."""

    @initialize(
        num_blocks=st.integers(1, 12), block_size=st.integers(1, 4), seqs=st.integers(1, 5), budget=st.integers(1, 20)
    )
    def start(self, num_blocks: int, block_size: int, seqs: int, budget: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.kv = KVManager(self.pool, block_size)
        self.scheduler = Scheduler(self.kv, seqs, budget)
        self.num_blocks, self.block_size, self.seqs, self.budget = num_blocks, block_size, seqs, budget
        self.requests: list[Request] = []  # all, in order of arrival
        self.aborted: set[str] = set()
        self.kept: dict[str, list[int]] = {}  # the tokens each request had, which it must never lose

    @rule(num_prompt=st.integers(1, 48), max_tokens=st.integers(1, 10))
    def add(self, num_prompt: int, max_tokens: int) -> None:
        longest = self.num_blocks * self.block_size + 1
        request = make_request(str(len(self.requests)), min(num_prompt, longest - 1), max_tokens, longest)
        self.requests.append(request)
        self.scheduler.add(request)

    def alive(self) -> list[Request]:
        return [r for r in self.requests if r.state is not RequestState.FINISHED]

    @precondition(alive)
    @rule(which=st.integers(0, 9))
    def abort(self, which: int) -> None:
        request = self.alive()[which % len(self.alive())]
        self.scheduler.abort(request.id)
        self.aborted.add(request.id)
        assert request.state is RequestState.FINISHED

    @rule(token=st.sampled_from([1, 2, 3, END]))
    def step(self, token: int) -> None:
        self.run_step(token, None)

    @precondition(alive)
    @rule(which=st.integers(0, 9), token=st.sampled_from([1, 2, END]))
    def abort_while_a_step_runs(self, which: int, token: int) -> None:
        self.run_step(token, which)

    def run_step(self, token: int, abort: int | None) -> None:
        before = {r.id: r.num_computed_tokens for r in self.requests}
        plan = self.scheduler.schedule(0.0)
        self.check_plan(plan, before)
        if abort is not None:
            self.abort(abort)
        finished = self.scheduler.update(plan, output_of(plan, token))
        rows = {row.request_id: row for row in plan.rows}
        for request in self.requests:
            row = rows.get(request.id)
            if row is not None and request.id not in self.aborted:
                assert request.num_computed_tokens == before[request.id] + row.num_tokens
            elif request.id in plan.preempted:
                assert request.num_computed_tokens == 0
            elif request.id not in self.aborted:
                assert request.num_computed_tokens == before[request.id]
            assert request.tokens[: len(self.kept.get(request.id, []))] == self.kept.get(request.id, [])
            self.kept[request.id] = list(request.tokens)
        for request in finished:
            assert request.state is RequestState.FINISHED
            assert request.finish_reason == ("stop" if request.tokens[-1] == END else "length")
            assert request.id not in self.aborted

    def check_plan(self, plan: StepPlan, before: dict[str, int]) -> None:
        assert bool(plan.rows) == bool(self.alive()), "work waits and nothing is planned"
        names = [row.request_id for row in plan.rows]
        assert len(set(names)) == len(names) <= self.seqs
        assert names == sorted(names, key=int), "rows come in order of arrival"
        assert not set(names) & set(plan.preempted)
        assert plan.num_tokens <= self.budget
        for row in plan.rows:
            request = self.requests[int(row.request_id)]
            assert request.state is RequestState.RUNNING
            assert row.num_tokens >= 1
            assert row.start == before[request.id] == request.num_computed_tokens
            assert row.samples == (row.start + row.num_tokens == request.num_tokens)
            assert len(request.block_table) * self.block_size >= row.start + row.num_tokens
        for row in plan.rows[:-1]:  # nobody gets tokens while an earlier one could have had more
            request = self.requests[int(row.request_id)]
            assert row.samples, f"{request.id} was cut short, but a later request got tokens"
        for name in plan.preempted:
            assert self.requests[int(name)].state is RequestState.WAITING
            assert all(int(row.request_id) < int(name) for row in plan.rows), "an earlier request made way for a later"

    @invariant()
    def blocks_are_free_or_owned_by_exactly_one(self) -> None:
        owners = Counter(block for r in self.requests for block in r.block_table)
        free = list(self.pool._free)
        assert len(free) == len(set(free)) == self.pool.num_free == self.kv.num_available
        assert not set(free) & set(owners)
        assert set(free) | set(owners) == set(range(self.num_blocks))
        for block in range(self.num_blocks):
            assert self.pool.ref_count(block) == owners[block] <= 1

    @invariant()
    def a_running_request_owns_blocks_for_what_it_computed_and_none_beyond_its_tokens(self) -> None:
        for request in self.requests:
            if request.state is RequestState.RUNNING:
                owned = len(request.block_table)
                assert -(-request.num_computed_tokens // self.block_size) <= owned
                assert owned <= -(-request.num_tokens // self.block_size)
            else:
                assert request.block_table == []

    @invariant()
    def first_come_is_first_served(self) -> None:
        alive = self.alive()
        states = [r.state for r in alive]
        running = states.count(RequestState.RUNNING)
        assert states == [RequestState.RUNNING] * running + [RequestState.WAITING] * (len(alive) - running)
        assert [r.id for r in (*self.scheduler.running, *self.scheduler.waiting)] == [r.id for r in alive]
        assert running <= self.seqs
        assert self.scheduler.has_work() == bool(alive)

    @invariant()
    def nobody_is_longer_than_agreed(self) -> None:
        for request in self.requests:
            assert request.num_tokens <= request.max_total_tokens
            assert request.num_computed_tokens < request.num_tokens
            ended = END in request.output_tokens[:1] or request.num_tokens == request.max_total_tokens
            assert not ended or request.state is RequestState.FINISHED

    def teardown(self) -> None:
        """Everything finishes: the oldest request gets at least one token a step and is never thrown out."""
        if not hasattr(self, "requests"):
            return
        for _ in range(sum(r.max_total_tokens for r in self.requests)):
            if not self.scheduler.has_work():
                break
            self.run_step(1, None)
            self.blocks_are_free_or_owned_by_exactly_one()
        assert not self.scheduler.has_work()
        assert self.pool.num_free == self.num_blocks
        for request in self.requests:
            assert request.state is RequestState.FINISHED
            if request.finish_reason == "length":
                assert request.num_tokens == request.max_total_tokens


TestServing = Serving.TestCase
TestServing.settings = settings(max_examples=80, stateful_step_count=40, deadline=None, derandomize=True, database=None)


def serve(num_blocks: int, block_size: int, seqs: int, budget: int, *requests: Request) -> Scheduler:
    scheduler = Scheduler(KVManager(BlockPool(num_blocks), block_size), seqs, budget)
    for request in requests:
        scheduler.add(request)
    return scheduler


def shape(plan: StepPlan) -> list[tuple[str, int, int, bool]]:
    return [(row.request_id, row.start, row.num_tokens, row.samples) for row in plan.rows]


def test_a_long_prompt_is_read_in_chunks_of_the_budget_and_samples_once() -> None:
    scheduler = serve(10, 4, 4, 8, make_request("a", 20, 2))
    plans = []
    while scheduler.has_work():
        plan = scheduler.schedule(0.0)
        plans.append(shape(plan))
        scheduler.update(plan, output_of(plan))
    assert plans == [[("a", 0, 8, False)], [("a", 8, 8, False)], [("a", 16, 4, True)], [("a", 20, 1, True)]]


def test_decoding_requests_and_a_chunk_share_one_step() -> None:
    scheduler = serve(20, 4, 4, 8, make_request("a", 3, 9), make_request("b", 30, 1))
    plan = scheduler.schedule(0.0)
    assert shape(plan) == [("a", 0, 3, True), ("b", 0, 5, False)]
    scheduler.update(plan, output_of(plan))
    assert shape(scheduler.schedule(0.0)) == [("a", 3, 1, True), ("b", 5, 7, False)]


def test_a_small_request_does_not_overtake_a_large_one_that_waits_for_blocks() -> None:
    scheduler = serve(4, 4, 4, 100, make_request("a", 9, 4), make_request("large", 8, 4), make_request("small", 1, 1))
    assert [row.request_id for row in scheduler.schedule(0.0).rows] == ["a"]


def test_a_preempted_request_keeps_its_generated_tokens_and_its_place() -> None:
    a, b, c = make_request("a", 4, 9), make_request("b", 4, 9), make_request("c", 4, 9)
    scheduler = serve(4, 4, 2, 100, a, b, c)
    for token in (11, 12, 13, 14):
        plan = scheduler.schedule(0.0)
        scheduler.update(plan, output_of(plan, token))
    assert len(a.block_table) + len(b.block_table) == 4
    for _ in range(9):
        if (plan := scheduler.schedule(0.0)).preempted:
            break
        scheduler.update(plan, output_of(plan, 15))
    assert plan.preempted == ("b",)
    assert b.output_tokens[:4] == [11, 12, 13, 14]
    assert b.num_computed_tokens == 0
    assert [r.id for r in scheduler.waiting] == ["b", "c"]
    had = b.num_tokens
    for _ in range(9):
        if b.state is RequestState.WAITING:
            scheduler.update(plan, output_of(plan, 16))
            plan = scheduler.schedule(0.0)
    (row,) = [row for row in plan.rows if row.request_id == "b"]
    assert (row.start, row.num_tokens, row.samples) == (0, had, True), "prompt and output are computed again together"


def test_the_oldest_request_is_never_preempted() -> None:
    scheduler = serve(3, 2, 3, 100, *(make_request(name, 2, 4) for name in "abc"))
    for _ in range(30):
        plan = scheduler.schedule(0.0)
        assert "a" not in plan.preempted
        scheduler.update(plan, output_of(plan))
    assert not scheduler.has_work()


def test_an_end_token_on_the_last_allowed_place_counts_as_stop() -> None:
    request = make_request("a", 3, 1)
    scheduler = serve(4, 4, 1, 10, request)
    plan = scheduler.schedule(0.0)
    assert scheduler.update(plan, output_of(plan, END)) == [request]
    assert request.finish_reason == "stop"


def test_an_empty_scheduler_plans_nothing() -> None:
    scheduler = serve(1, 1, 1, 1)
    assert not scheduler.has_work()
    assert scheduler.schedule(0.0).rows == ()


@pytest.mark.parametrize("state", ["waiting", "running"])
def test_an_abort_frees_the_request_wherever_it_is(state: str) -> None:
    a, b = make_request("a", 8, 4), make_request("b", 8, 4)
    scheduler = serve(3, 4, 4, 100, a, b)
    plan = scheduler.schedule(0.0)
    victim, other = (a, b) if state == "running" else (b, a)
    assert victim.state.value == state
    scheduler.abort(victim.id)
    assert victim.finish_reason == "abort"
    assert scheduler.update(plan, output_of(plan)) == []
    while scheduler.has_work():
        plan = scheduler.schedule(0.0)
        scheduler.update(plan, output_of(plan))
    assert other.finish_reason == "length"
    assert scheduler.kv.num_available == 3


def test_a_preempted_request_comes_back_only_when_all_its_tokens_fit() -> None:
    """Let in for one chunk, it would be preempted again by its neighbour's next block, over and over."""
    pool = BlockPool(6)
    scheduler = Scheduler(KVManager(pool, 4), max_num_seqs=4, max_num_batched_tokens=4)
    long, late = make_request("0", 4, max_tokens=20), make_request("1", 8, max_tokens=8)
    for request in (long, late):
        scheduler.add(request)
    preempted = 0
    while scheduler.has_work():
        plan = scheduler.schedule(0.0)
        preempted += len(plan.preempted)
        scheduler.update(plan, output_of(plan))
    assert long.finish_reason == late.finish_reason == "length"
    assert preempted == 1
