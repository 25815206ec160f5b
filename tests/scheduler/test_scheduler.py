"""What the scheduler plans, case by case; `test_serving_model.py` holds it against every order of events."""

from __future__ import annotations

import math

import pytest

from reference_impl.annexes.prefix.hash_index import HashIndex
from reference_impl.assembly.kv import kv_manager
from reference_impl.interfaces import Request, RequestState, SamplingParams, StepOutput, StepPlan
from reference_impl.kv.block_pool import BlockPool
from reference_impl.scheduler.policy import ByPriority, FirstCome
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
    return StepOutput({row.request_id: (token,) for row in plan.rows if row.samples}, {}, 0.0, 0.0)


def serve(num_blocks: int, block_size: int, seqs: int, budget: int, *requests: Request) -> Scheduler:
    scheduler = Scheduler(kv_manager(BlockPool(num_blocks), block_size), seqs, budget)
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


def test_an_end_token_in_the_prompt_ends_nothing() -> None:
    request = make_request("a", 3, 2)
    request.tokens[1] = END
    scheduler = serve(4, 4, 1, 10, request)
    for finished in ([], [request]):
        plan = scheduler.schedule(0.0)
        assert scheduler.update(plan, output_of(plan)) == finished
    assert request.finish_reason == "length"


@pytest.mark.parametrize("admission", ["fill", "worst_case"])
def test_worst_case_admission_reserves_all_but_the_last_token_which_is_never_read(admission) -> None:
    """5 tokens of prompt and 17 of output: 21 slots in blocks of 4."""
    requests = [make_request(name, 5, 17) for name in "ab"]
    scheduler = Scheduler(kv_manager(BlockPool(11), 4), 2, 100, admission=admission)
    for request in requests:
        scheduler.add(request)
    plan = scheduler.schedule(0.0)
    assert [len(request.block_table) for request in requests] == ([2, 2] if admission == "fill" else [6, 0])
    scheduler.update(plan, output_of(plan))
    preempted = []
    while scheduler.has_work():
        plan = scheduler.schedule(0.0)
        preempted += plan.preempted
        scheduler.update(plan, output_of(plan))
    assert bool(preempted) == (admission == "fill")


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
    scheduler = Scheduler(kv_manager(pool, 4), max_num_seqs=4, max_num_batched_tokens=4)
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

    scheduler = Scheduler(kv_manager(BlockPool(4), 4), 2, 8, Confused())
    with pytest.raises(ValueError, match="request 'a': "):
        scheduler.add(make_request("a", 3, 2))
    assert not scheduler.has_work()
    with pytest.raises(KeyError):
        scheduler.abort("a")
    scheduler.policy = FirstCome()
    scheduler.add(make_request("a", 3, 1))
    plan = scheduler.schedule(0.0)
    assert [request.id for request in scheduler.update(plan, output_of(plan))] == ["a"]


def swapping(num_blocks: int, block_size: int, *requests: Request, windows=(None,), budget=8) -> Scheduler:
    kv = kv_manager(BlockPool(num_blocks), block_size, windows, host_pool=BlockPool(20))
    scheduler = Scheduler(kv, 4, budget, preemption="swap")
    for request in requests:
        request.block_tables = [[] for _ in windows]
        scheduler.add(request)
    return scheduler


def test_a_held_request_that_was_swapped_out_with_nothing_to_compute_computes_its_last_token_again() -> None:
    """A row of no tokens is none. What followed was told, and is not told again."""
    grows, held = make_request("grows", 3, 9), make_request("held", 4, 9)
    held.holds = True
    scheduler = swapping(6, 2, grows, held)
    swapped = False
    while grows.state is not RequestState.FINISHED or held.state is RequestState.WAITING:
        plan = scheduler.schedule(0.0)
        swapped |= plan.preempted == ("held",)
        assert all(row.num_tokens >= 1 for row in plan.rows)
        scheduler.update(plan, output_of(plan))
    assert swapped
    assert shape(plan) == [("held", 3, 1, False)]
    assert (held.num_computed_tokens, held.tokens) == (4, [1] * 4)


def test_what_a_window_has_left_behind_is_not_brought_back() -> None:
    """A window of 2, steps of 8 tokens, blocks of 2: the long prompt alone is read in the 6 blocks that there are. With
    all that its last step wrote it would need more when it is back, and wait for ever."""
    first, long = make_request("first", 3, 6), make_request("long", 30, 2)
    scheduler = swapping(6, 2, first, long, windows=(2,))
    preempted = []
    while scheduler.has_work():
        plan = scheduler.schedule(0.0)
        assert plan.rows or plan.preempted, "work waits and nothing is planned"
        preempted += plan.preempted
        scheduler.update(plan, output_of(plan))
    assert "long" in preempted
    assert first.finish_reason == long.finish_reason == "length"


def test_who_comes_back_from_the_host_is_safe_from_who_goes_there_in_the_same_step() -> None:
    """What goes out is moved before what comes in, so it must not be given host blocks that are still to be read."""
    device, host = BlockPool(4), BlockPool(2)
    kv = kv_manager(device, 2, host_pool=host)
    back, out = make_request("back", 4, 4), make_request("out", 4, 4)
    assert kv.admit(back, 4, 8)
    back.num_computed_tokens = 3
    assert kv.swap_out(back)
    there = [pair.dst for pair in kv.take_transfers().swap_out]
    assert kv.admit(out, 4, 8)
    out.num_computed_tokens = 2
    assert kv.admit(back, 4, 8)
    assert not kv.swap_out(out), "the host is full until the step has begun"
    assert [pair.src for pair in kv.take_transfers().swap_in] == there
    assert kv.swap_out(out)
    kv.take_transfers()
    for request in (back, out):
        kv.free(request)
    assert (device.num_free, host.num_free) == (4, 2)


@pytest.mark.parametrize("ends", [False, True])
def test_who_comes_back_from_the_host_and_leaves_in_the_same_step_has_moved_nothing(ends: bool) -> None:
    """Its blocks on the device hold nothing yet: they must be neither read nor found by others."""
    device, host = BlockPool(4), BlockPool(4)
    kv = kv_manager(device, 2, index=HashIndex(2), host_pool=host)
    request = make_request("a", 5, 4)
    assert kv.admit(request, 5, 8)
    request.num_computed_tokens = 4
    assert kv.swap_out(request)
    assert [pair.dst for pair in kv.take_transfers().swap_out] == [1, 0]
    assert kv.pin([9, 9], b"") == []
    others = make_request("others", 8, 1)
    others.tokens = [9] * 8
    assert kv.admit(others, 8, 8), "what the index held of the first is evicted"
    kv.free(others)
    kv.take_transfers()
    assert kv.admit(request, 5, 8)
    if ends:
        kv.free(request)
    else:
        assert kv.swap_out(request)
    transfers = kv.take_transfers()
    assert transfers.swap_in == transfers.swap_out == ()
    assert kv.pin(request.tokens, b"") == []
    assert (device.num_free, host.num_free) == (4, 4 if ends else 2)
    if not ends:
        assert kv.admit(request, 5, 8)
        assert [pair.src for pair in kv.take_transfers().swap_in] == [1, 0]


def test_held_requests_that_wait_for_each_other_do_not_wait_behind_others() -> None:
    """The first beam holds its blocks until the second has been sampled; between them stands one that fits only when
    both are gone."""
    first, between, second = make_request("first", 8, 2), make_request("between", 20, 2), make_request("second", 4, 2)
    first.holds = second.holds = True
    scheduler = serve(6, 4, 4, 100, first, between, make_request("small", 1, 1), second)
    plan = scheduler.schedule(0.0)
    assert [row.request_id for row in plan.rows] == ["first"], "as long as somebody computes, nobody overtakes"
    scheduler.update(plan, output_of(plan))
    plan = scheduler.schedule(0.0)
    assert shape(plan) == [("second", 0, 4, True)]
    scheduler.update(plan, output_of(plan))
    assert not any(request.num_missing_tokens for request in scheduler.running)
    for name in ("first", "second"):
        scheduler.abort(name)
    assert shape(scheduler.schedule(0.0)) == [("between", 0, 20, True), ("small", 0, 1, True)]


def test_the_more_urgent_take_seats_from_who_ranks_last_and_no_more_than_they_need() -> None:
    scheduler = Scheduler(kv_manager(BlockPool(30), 4), 3, 100, ByPriority(aging=0))

    def add(name: str, priority: int) -> None:
        request = make_request(name, 4, 9)
        request.priority = priority
        scheduler.add(request)

    for name in "abc":
        add(name, 2)
    plan = scheduler.schedule(0.0)
    scheduler.update(plan, output_of(plan))
    add("equal", 2)
    assert scheduler.schedule(1.0).preempted == (), "who is as urgent and came later has to wait"
    for name in ("urgent", "too"):
        add(name, 0)
    plan = scheduler.schedule(2.0)
    assert plan.preempted == ("c", "b")
    assert shape(plan) == [("urgent", 0, 4, True), ("too", 0, 4, True), ("a", 4, 1, True)]
    assert [request.id for request in scheduler.running] == ["urgent", "too", "a"]
    assert [request.id for request in scheduler.waiting] == ["b", "c", "equal"]


def test_a_policy_that_is_not_preemptive_ranks_only_who_waits() -> None:
    policy = ByPriority(aging=0, preemptive=False)
    scheduler = Scheduler(kv_manager(BlockPool(30), 4), 1, 100, policy)
    for name, priority in (("low", 2), ("middle", 1), ("urgent", 0)):
        request = make_request(name, 4, 2)
        request.priority = priority
        scheduler.add(request)
        if name == "low":
            plan = scheduler.schedule(0.0)
            scheduler.update(plan, output_of(plan))
    order = []
    while scheduler.has_work():
        plan = scheduler.schedule(1.0)
        assert plan.preempted == ()
        order += [row.request_id for row in plan.rows]
        scheduler.update(plan, output_of(plan))
    assert order == ["low", "urgent", "urgent", "middle", "middle"]


def test_a_prompt_is_shared_as_soon_as_it_is_computed_and_an_answer_when_it_is_finished() -> None:
    scheduler = Scheduler(kv_manager(BlockPool(30), 2, index=HashIndex(2)), 4, 100)

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


def test_samples_of_one_token_share_their_prompt_too() -> None:
    """The parent ends with the token that its prompt gives; its blocks must be shared before they are free."""
    parent = make_request("a", 9, 1)
    parent.children = [make_request(f"a/{i}", 9, 1) for i in (1, 2)]
    for child in parent.children:
        child.parent_id = "a"
    scheduler = serve(20, 4, 4, 100, parent)
    rows = []
    while scheduler.has_work():
        plan = scheduler.schedule(0.0)
        rows.append(shape(plan))
        scheduler.update(plan, output_of(plan))
    assert rows == [[("a", 0, 9, True)], [("a/1", 8, 1, True), ("a/2", 8, 1, True)]]
    assert scheduler.kv.num_available == 20


def test_the_policy_hears_of_everybody_who_goes_also_of_those_who_are_aborted() -> None:
    class Listening(FirstCome):
        def __init__(self) -> None:
            self.gone: list[str] = []

        def finished(self, request: Request) -> None:
            self.gone.append(request.id)

    policy = Listening()
    scheduler = Scheduler(kv_manager(BlockPool(4), 4), 2, 100, policy)
    for name in ("ends", "runs", "waits"):
        scheduler.add(make_request(name, 4, 1 if name == "ends" else 9))
    plan = scheduler.schedule(0.0)
    scheduler.abort("waits")
    assert policy.gone == ["waits"]
    scheduler.update(plan, output_of(plan))
    assert policy.gone == ["waits", "ends"]
    scheduler.abort("runs")
    assert policy.gone == ["waits", "ends", "runs"]


def test_a_prompt_whose_turn_it_is_gets_its_blocks_before_those_that_decode_and_rank_after_it() -> None:
    """A window's blocks come with each chunk. Those that decode are first at the budget: were they first at the blocks,
    too, the one that ranks first would find nobody to throw out but itself, be let in again, and so on."""
    scheduler = Scheduler(kv_manager(BlockPool(25), 1, (6,)), 9, 12, ByPriority(aging=0))
    for name, priority, num_prompt in (("long0", 1, 5), ("long1", 1, 5), ("long2", 1, 5), ("urgent", 0, 19)):
        request = make_request(name, num_prompt, 40)
        request.priority = priority
        scheduler.add(request)
        for _ in range(5):
            plan = scheduler.schedule(0.0)
            assert "urgent" not in plan.preempted
            scheduler.update(plan, output_of(plan))
    assert len(request.output_tokens) >= 2, "19 tokens of prompt take two steps"


def test_a_chunk_of_a_prompt_leaves_their_token_to_those_that_decode_also_if_they_rank_after_it() -> None:
    scheduler = Scheduler(kv_manager(BlockPool(30), 4), 4, 8, ByPriority(aging=0))
    for name, priority, num_prompt in (("a", 1, 3), ("b", 1, 3), ("urgent", 0, 30)):
        request = make_request(name, num_prompt, 9)
        request.priority = priority
        scheduler.add(request)
        plan = scheduler.schedule(0.0)
        scheduler.update(plan, output_of(plan))
    assert shape(plan) == [("urgent", 0, 6, False), ("a", 4, 1, True), ("b", 3, 1, True)]
    assert shape(scheduler.schedule(0.0)) == [("urgent", 6, 6, False), ("a", 5, 1, True), ("b", 4, 1, True)]
