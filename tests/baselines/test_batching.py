"""Static, dynamic and Orca's batching: who runs when, what is wasted (against examples by hand), no deadlock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference_impl.assembly.kv import kv_manager
from reference_impl.core.block_pool import BlockPool
from reference_impl.core.kv_manager import KVManager
from reference_impl.features.baselines.dynamic_batching import DynamicBatching
from reference_impl.features.baselines.orca_batching import OrcaBatching
from reference_impl.features.baselines.static_batching import StaticBatching
from reference_impl.features.baselines.whole_requests import WholeRequests
from reference_impl.interfaces import ForksRequests, Request, RequestState, SamplingParams, StepOutput, StepPlan

END = 7
examples = settings(max_examples=100, deadline=None, derandomize=True, database=None)


def make_request(name: str, num_prompt: int = 4, max_tokens: int = 4, **fields: Any) -> Request:
    return Request(
        **{
            "id": name,
            "tokens": [1] * num_prompt,
            "num_prompt_tokens": num_prompt,
            "sampling": SamplingParams(max_tokens=max_tokens),
            "seed": 0,
            "arrival": 0.0,
            "stop_token_ids": frozenset({END}),
            "max_total_tokens": num_prompt + max_tokens,
            **fields,
        }
    )


def manager(num_blocks: int = 1000, block_size: int = 4) -> KVManager:
    return kv_manager(BlockPool(num_blocks), block_size)


def output_of(plan: StepPlan, token: int = 1) -> StepOutput:
    return StepOutput({row.request_id: (token,) for row in plan.rows if row.samples}, {}, 0.0, 0.0)


def step(scheduler: WholeRequests, now: float = 0.0, token: int = 1) -> tuple[dict[str, int], list[str]]:
    """(tokens each request computes, who finishes)"""
    plan = scheduler.schedule(now)
    finished = scheduler.update(plan, output_of(plan, token))
    return {row.request_id: row.num_tokens for row in plan.rows}, [request.id for request in finished]


def run(scheduler: WholeRequests, *requests: Request) -> list[tuple[dict[str, int], list[str]]]:
    for request in requests:
        scheduler.add(request)
    steps = []
    while scheduler.has_work():
        steps.append(step(scheduler))
    return steps


# --- static ---------------------------------------------------------------------------------------------------------


def test_four_outputs_of_unequal_length_use_42_percent_of_a_static_batch() -> None:
    """1,000 + 200 + 400 + 100 tokens in a rectangle of 4 x 1,000."""
    scheduler = StaticBatching(manager(2000), 4)
    steps = run(scheduler, *(make_request(str(n), 1, n) for n in (1000, 200, 400, 100)))
    assert len(steps) == 1000
    assert scheduler.row_steps == 4000 == sum(len(rows) for rows, _ in steps)
    assert (scheduler.row_steps - scheduler.wasted_row_steps) / scheduler.row_steps == 0.425


def test_prompts_of_256_tokens_on_average_are_75_percent_padding_where_the_longest_has_1024() -> None:
    scheduler = StaticBatching(manager(2000), 8)
    lengths = [1024, 146, 147, 146, 147, 146, 146, 146]
    assert sum(lengths) / len(lengths) == 256
    run(scheduler, *(make_request(str(i), n, 1) for i, n in enumerate(lengths)))
    assert scheduler.wasted_prompt_tokens / scheduler.prompt_tokens == 0.75


def test_a_row_that_has_ended_goes_on_computing_and_leaves_with_its_batch() -> None:
    kv = manager(6)
    short, long, late = make_request("short", 4, 1), make_request("long", 4, 3), make_request("late", 4, 1)
    scheduler = StaticBatching(kv, 2)
    for request in (short, long, late):
        scheduler.add(request)
    assert step(scheduler) == ({"short": 4, "long": 4}, [])
    plan = scheduler.schedule(0.0)
    padding, alive = plan.rows
    assert (padding.request_id, padding.start, padding.num_tokens, padding.samples) == ("short", 3, 1, False)
    assert (alive.request_id, alive.start, alive.num_tokens, alive.samples) == ("long", 4, 1, True)
    assert scheduler.update(plan, output_of(plan)) == []
    assert short.state is RequestState.RUNNING
    assert short.output_tokens == [1], "padding samples nothing"
    assert kv.num_available == 6 - 1 - 2, "and keeps its memory"
    assert step(scheduler) == ({"short": 1, "long": 1}, ["short", "long"])
    assert kv.num_available == 6
    assert step(scheduler) == ({"late": 4}, ["late"])


def test_who_comes_later_waits_for_the_whole_batch_and_the_wait_is_the_longest_output() -> None:
    scheduler = StaticBatching(manager(), 2)
    scheduler.add(make_request("a", 4, 5))
    step(scheduler)
    scheduler.add(make_request("b", 4, 1))
    assert [list(step(scheduler)[0]) for _ in range(5)] == [["a"], ["a"], ["a"], ["a"], ["b"]]


def test_an_open_stream_waits_for_a_full_batch_and_a_closed_one_for_nobody() -> None:
    scheduler = StaticBatching(manager(), 3, stream_is_open=True)
    for name in "abcd":
        assert not scheduler.has_work() or name == "d"
        scheduler.add(make_request(name, 4, 1))
    assert list(step(scheduler)[0]) == ["a", "b", "c"]
    assert not scheduler.has_work(), "d is alone"
    assert step(scheduler) == ({}, [])
    assert scheduler.num_waiting == 1
    scheduler.stream_is_open = False
    assert scheduler.has_work()
    assert list(step(scheduler)[0]) == ["d"]
    assert scheduler.row_steps == 4
    assert not scheduler.has_work()


def test_a_batch_is_as_large_as_the_memory_allows() -> None:
    """12 blocks of 4 slots; a request of 4 + 17 tokens needs 5."""
    scheduler = StaticBatching(manager(12), 4)
    steps = run(scheduler, *(make_request(name, 4, 17) for name in "abc"))
    assert [list(rows) for rows, _ in steps] == [["a", "b"]] * 17 + [["c"]] * 17


def test_when_the_last_that_was_alive_is_aborted_the_batch_ends() -> None:
    scheduler = StaticBatching(manager(), 2)
    for request in (make_request("short", 4, 1), make_request("long", 4, 9), make_request("next", 4, 1)):
        scheduler.add(request)
    step(scheduler)
    scheduler.abort("long")
    assert step(scheduler) == ({"short": 1}, ["short"])
    assert step(scheduler)[1] == ["next"]
    assert scheduler.wasted_row_steps == 2, "the row of the aborted one too"


# --- dynamic --------------------------------------------------------------------------------------------------------


def test_a_dynamic_batch_starts_when_it_is_full_or_when_its_oldest_has_waited() -> None:
    scheduler = DynamicBatching(manager(), 2, window=0.5)
    assert scheduler.next_event(0.0) is None
    scheduler.add(make_request("a", 4, 1, arrival=1.0))
    assert scheduler.next_event(1.0) == 1.5
    assert step(scheduler, 1.0) == step(scheduler, 1.4) == ({}, [])
    assert scheduler.has_work()
    assert scheduler.next_event(1.5) is None
    assert step(scheduler, 1.5) == ({"a": 4}, ["a"])
    for name in "bc":
        scheduler.add(make_request(name, 4, 1, arrival=2.0))
    assert scheduler.next_event(2.0) is None
    assert step(scheduler, 2.0) == ({"b": 4, "c": 4}, ["b", "c"])
    assert scheduler.row_steps == 3, "waiting is no step"


def test_the_window_is_that_of_the_oldest_and_who_comes_later_does_not_prolong_it() -> None:
    scheduler = DynamicBatching(manager(), 3, window=0.5)
    for name, arrival in (("a", 1.0), ("b", 1.25)):
        scheduler.add(make_request(name, 4, 1, arrival=arrival))
        assert scheduler.next_event(arrival) == 1.5
    assert step(scheduler, 1.25) == ({}, [])
    assert step(scheduler, 1.5) == ({"a": 4, "b": 4}, ["a", "b"])


def test_once_started_a_dynamic_batch_is_static() -> None:
    scheduler = DynamicBatching(manager(), 2, window=0.0)
    scheduler.add(make_request("a", 4, 3))
    step(scheduler)
    scheduler.add(make_request("b", 4, 1))
    assert scheduler.next_event(0.0) is None
    assert [list(step(scheduler)[0]) for _ in range(3)] == [["a"], ["a"], ["b"]]


@pytest.mark.parametrize("window", [-1, float("inf"), float("nan")])
def test_a_window_is_a_finite_time(window: float) -> None:
    with pytest.raises(ValueError, match=f"expected a finite number, at least 0, got {window}"):
        DynamicBatching(manager(), 2, window)


# --- Orca -----------------------------------------------------------------------------------------------------------


def test_orca_fills_a_seat_in_the_step_after_it_is_free() -> None:
    scheduler = OrcaBatching(manager(), 2)
    steps = run(scheduler, *(make_request(name, n, n) for name, n in (("a", 1), ("b", 4), ("c", 2), ("d", 1))))
    assert steps == [
        ({"a": 1, "b": 4}, ["a"]),
        ({"b": 1, "c": 2}, []),
        ({"b": 1, "c": 1}, ["c"]),
        ({"b": 1, "d": 1}, ["b", "d"]),
    ]


def test_orca_computes_a_long_prompt_in_one_step_beside_those_who_decode() -> None:
    scheduler = OrcaBatching(manager(), 4)
    scheduler.add(make_request("a", 4, 9))
    step(scheduler)
    scheduler.add(make_request("long", 3000, 1))
    assert step(scheduler)[0] == {"a": 1, "long": 3000}


def test_orca_reserves_the_longest_output_and_lets_nobody_overtake() -> None:
    """12 blocks of 4 slots; a and b may need 5 each, so c waits though 10 of the 12 blocks are empty."""
    kv = manager(12)
    scheduler = OrcaBatching(kv, 4)
    for request in (*(make_request(name, 4, 17) for name in "abc"), make_request("small", 1, 1)):
        scheduler.add(request)
    assert list(step(scheduler)[0]) == ["a", "b"]
    assert kv.num_available == 2
    for _ in range(16):
        assert list(step(scheduler)[0]) == ["a", "b"]
    assert list(step(scheduler)[0]) == ["c", "small"]


# --- all ------------------------------------------------------------------------------------------------------------

SCHEDULERS: dict[str, Callable[[KVManager, int], WholeRequests]] = {
    "static": StaticBatching,
    "dynamic": lambda kv, seqs: DynamicBatching(kv, seqs, window=3.0),
    "orca": OrcaBatching,
}
events = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 9), st.integers(1, 9)),
        st.tuples(st.just("step"), st.sampled_from([1, 2, END]), st.just(0)),
        st.tuples(st.just("abort"), st.integers(0, 9), st.just(0)),
        st.tuples(st.just("abort while a step runs"), st.integers(0, 9), st.sampled_from([1, END])),
    ),
    max_size=40,
)


class Serving:
    """Runs one of the schedulers and checks, at every step, what all of them promise."""

    def __init__(self, name: str, num_blocks: int, seqs: int):
        self.kv, self.num_blocks, self.seqs = manager(num_blocks, 4), num_blocks, seqs
        self.scheduler, self.requests, self.now = SCHEDULERS[name](self.kv, seqs), [], 0.0

    def add(self, num_prompt: int, max_tokens: int) -> None:
        longest = self.num_blocks * 4 + 1
        num_prompt = min(num_prompt, longest - 1)
        request = make_request(
            str(len(self.requests)), num_prompt, max_tokens,
            arrival=self.now, max_total_tokens=min(longest, num_prompt + max_tokens),
        )  # fmt: skip
        self.requests.append(request)
        self.scheduler.add(request)

    def abort(self, which: int) -> None:
        alive = [r for r in self.requests if r.state is not RequestState.FINISHED]
        if alive:
            request = alive[which % len(alive)]
            self.scheduler.abort(request.id)
            assert (request.state, request.finish_reason) == (RequestState.FINISHED, "abort")
            assert request.block_table == []

    def step(self, token: int, abort: int | None = None) -> None:
        self.now += 1.0
        plan = self.scheduler.schedule(self.now)
        waits = isinstance(self.scheduler, DynamicBatching) and self.scheduler.next_event(self.now) is not None
        assert bool(plan.rows) == (self.scheduler.has_work() and not waits)
        assert len({row.request_id for row in plan.rows}) == len(plan.rows) <= self.seqs
        assert not plan.preempted
        for row in plan.rows:
            request = self.requests[int(row.request_id)]
            assert request.state is RequestState.RUNNING
            assert row.num_tokens >= 1
            if row.samples:
                assert row.start == request.num_computed_tokens
                assert row.start + row.num_tokens == request.num_tokens, "prompts are computed whole"
            else:
                assert row.start + row.num_tokens == request.num_computed_tokens, "padding overwrites what was there"
            assert len(request.block_table) * 4 >= row.start + row.num_tokens
        if abort is not None:
            self.abort(abort)
        for request in self.scheduler.update(plan, output_of(plan, token)):
            assert request.finish_reason == ("stop" if request.tokens[-1] == END else "length")
        self.check()

    def check(self) -> None:
        owners = Counter(block for request in self.requests for block in request.block_table)
        assert all(count == 1 for count in owners.values())
        assert self.kv.num_available == self.num_blocks - len(owners)
        states = [r.state for r in self.requests if r.state is not RequestState.FINISHED]
        running = states.count(RequestState.RUNNING)
        assert states == [RequestState.RUNNING] * running + [RequestState.WAITING] * (len(states) - running)
        assert (self.scheduler.num_running, self.scheduler.num_waiting) == (running, len(states) - running)
        for request in self.requests:
            assert request.num_tokens <= request.max_total_tokens
            assert request.block_table or request.state is not RequestState.RUNNING


@pytest.mark.parametrize("name", SCHEDULERS)
@examples
@given(num_blocks=st.integers(1, 9), seqs=st.integers(1, 4), drawn=events)
def test_in_any_order_of_events_no_block_is_lost_and_everybody_finishes(name, num_blocks, seqs, drawn) -> None:
    serving = Serving(name, num_blocks, seqs)
    for event, first, second in drawn:
        if event == "add":
            serving.add(first, second)
        elif event == "step":
            serving.step(first)
        elif event == "abort":
            serving.abort(first)
        else:
            serving.step(second, abort=first)
        serving.check()
    for _ in range(20 * len(drawn)):
        if not serving.scheduler.has_work():
            break
        serving.step(1)
    assert all(request.state is RequestState.FINISHED for request in serving.requests)
    assert serving.kv.num_available == num_blocks


@examples
@given(
    outputs=st.lists(st.integers(1, 12), min_size=1, max_size=12),
    prompts=st.lists(st.integers(1, 12), min_size=12, max_size=12),
    seqs=st.integers(1, 5),
)
def test_the_waste_of_static_batches_is_that_of_their_rectangles(outputs, prompts, seqs) -> None:
    scheduler = StaticBatching(manager(), seqs)
    run(scheduler, *(make_request(str(i), prompts[i], n) for i, n in enumerate(outputs)))
    for sizes, area, waste in (
        (outputs, scheduler.row_steps, scheduler.wasted_row_steps),
        (prompts[: len(outputs)], scheduler.prompt_tokens, scheduler.wasted_prompt_tokens),
    ):
        batches = [sizes[i : i + seqs] for i in range(0, len(sizes), seqs)]
        assert area == sum(len(batch) * max(batch) for batch in batches)
        assert area - waste == sum(sizes)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_samples_of_one_prompt_are_requests_that_share_nothing(name: str) -> None:
    scheduler = SCHEDULERS[name](manager(), 2)
    parent = make_request("a", 4, 2)
    parent.children = [make_request("a/1", 4, 2, parent_id="a"), make_request("a/2", 4, 2, parent_id="a")]
    children = list(parent.children)
    scheduler.add(parent)
    while scheduler.has_work():
        step(scheduler, 99.0)
    assert [r.output_tokens for r in (parent, *children)] == [[1, 1]] * 3


@pytest.mark.parametrize("name", SCHEDULERS)
def test_what_they_cannot_do_is_said(name: str) -> None:
    scheduler = SCHEDULERS[name](manager(2), 1)
    with pytest.raises(ValueError, match="'a': beam search needs"):
        scheduler.add(make_request("a", holds=True))
    assert not isinstance(scheduler, ForksRequests)
    with pytest.raises(KeyError, match="nobody"):
        scheduler.abort("nobody")
    with pytest.raises(ValueError, match="max_num_seqs: expected at least 1, got 0"):
        SCHEDULERS[name](manager(2), 0)
    scheduler.add(make_request("large", 4, 6))
    with pytest.raises(RuntimeError, match=r"'large' may need 9 tokens .* \(2 blocks are free\): lower its max_tokens"):
        scheduler.schedule(99.0)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_window_group_gets_all_its_memory_too_and_gives_back_what_it_has_left_behind(name: str) -> None:
    kv = kv_manager(BlockPool(20), 4, windows=(None, 8))
    scheduler = SCHEDULERS[name](kv, 2)
    requests = [make_request(str(i), 4, 17) for i in range(3)]
    for request in requests:
        request.block_tables = [[], []]
        scheduler.add(request)
    free = []
    while scheduler.has_work():
        step(scheduler, 99.0)
        free.append(kv.num_available)
    assert free[0] == 0, "two requests of 20 slots in two groups: 20 blocks of 4"
    assert free[15] == 2 * 2, "20 computed: the window group of each has left the first two blocks behind"
    assert free[-1] == 20
    assert all(request.finish_reason == "length" for request in requests)
