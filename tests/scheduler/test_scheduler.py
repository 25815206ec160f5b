"""What the scheduler plans, case by case; `test_serving_model.py` holds it against every order of events."""

from __future__ import annotations

import math

import pytest

from reference_impl.core.block_pool import BlockPool
from reference_impl.core.kv_manager import KVManager
from reference_impl.core.ranking import FirstCome
from reference_impl.core.scheduler import Scheduler
from reference_impl.features.prefix.hash_index import HashIndex
from reference_impl.interfaces import Request, RequestState
from tests.scheduler.plans import END, make_request, output_of, serve, shape


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


def test_an_end_token_in_the_prompt_ends_nothing() -> None:
    request = make_request("a", 3, 2)
    request.tokens[1] = END
    scheduler = serve(4, 4, 1, 10, request)
    for finished in ([], [request]):
        plan = scheduler.schedule(0.0)
        assert scheduler.update(plan, output_of(plan)) == finished
    assert request.finish_reason == "length"


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


def test_a_name_that_is_given_again_while_its_step_runs_gets_none_of_its_tokens() -> None:
    scheduler = serve(6, 2, 2, 8, make_request("a", 3, 9))
    plan = scheduler.schedule(0.0)
    scheduler.abort("a")
    again = make_request("a", 4, 2)
    scheduler.add(again)
    assert scheduler.update(plan, output_of(plan)) == []
    assert (again.tokens, again.num_computed_tokens, again.state) == ([1] * 4, 0, RequestState.WAITING)
    while scheduler.has_work():
        plan = scheduler.schedule(0.0)
        scheduler.update(plan, output_of(plan))
    assert again.finish_reason == "length"
    assert scheduler.kv.num_available == 6


@pytest.mark.parametrize("rank", [math.nan, None])
def test_a_request_that_the_policy_cannot_rank_leaves_nothing_behind(rank: float | None) -> None:
    """A tuple with NaN in it equals itself, so the queue alone would not notice."""

    class Confused(FirstCome):
        def rank(self, request: Request) -> float:
            if rank is None:
                raise ValueError(f"request {request.id!r}: no rank")
            return rank

    scheduler = Scheduler(KVManager(BlockPool(4), 4), 2, 8, Confused())
    with pytest.raises(ValueError, match="request 'a': "):
        scheduler.add(make_request("a", 3, 2))
    assert not scheduler.has_work()
    with pytest.raises(KeyError):
        scheduler.abort("a")
    scheduler.policy = FirstCome()
    scheduler.add(make_request("a", 3, 1))
    plan = scheduler.schedule(0.0)
    assert [request.id for request in scheduler.update(plan, output_of(plan))] == ["a"]


def test_a_prompt_is_shared_as_soon_as_it_is_computed_and_an_answer_when_it_is_finished() -> None:
    scheduler = Scheduler(KVManager(BlockPool(30), 2, index=HashIndex(2)), 4, 100)

    def cached(name: str, tokens: list[int], max_tokens: int = 1) -> int:
        request = make_request(name, len(tokens), max_tokens)
        request.tokens = list(tokens)
        scheduler.add(request)
        plan = scheduler.schedule(0.0)
        scheduler.update(plan, output_of(plan, token=5))
        return dict(plan.admitted)[name]

    assert cached("first", [1, 2, 3, 4, 6], max_tokens=7) == 0
    assert cached("while it decodes", [1, 2, 3, 4, 9]) == 4
    assert cached("asks for its answer", [1, 2, 3, 4, 6, 5, 5, 5]) == 4
    while scheduler.has_work():
        plan = scheduler.schedule(0.0)
        scheduler.update(plan, output_of(plan, token=5))
    assert cached("asks again", [1, 2, 3, 4, 6, 5, 5, 5, 5, 5, 5]) == 10


def test_the_policy_hears_of_everybody_who_goes_also_of_those_who_are_aborted() -> None:
    class Listening(FirstCome):
        def __init__(self) -> None:
            self.gone: list[str] = []

        def finished(self, request: Request) -> None:
            self.gone.append(request.id)

    policy = Listening()
    scheduler = Scheduler(KVManager(BlockPool(4), 4), 2, 100, policy)
    for name in ("ends", "runs", "waits"):
        scheduler.add(make_request(name, 4, 1 if name == "ends" else 9))
    plan = scheduler.schedule(0.0)
    scheduler.abort("waits")
    assert policy.gone == ["waits"]
    scheduler.update(plan, output_of(plan))
    assert policy.gone == ["waits", "ends"]
    scheduler.abort("runs")
    assert policy.gone == ["waits", "ends", "runs"]
