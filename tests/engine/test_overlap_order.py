"""Overlapped steps change by at most a step who goes when; a token is told once; nothing waits for nobody.

What is given up while a step runs comes back later, and what a step samples is told later: neither may turn the order
around, be taken for something newer, or be forgotten.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from reference_impl.assembly.engine import Engine
from reference_impl.assembly.parts import Parts
from reference_impl.features.policies import ByPriority
from reference_impl.interfaces import RequestState, SamplingParams

Make = Callable[..., Engine]
PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9]


@pytest.fixture
def make(random_model: Callable, late_engine: Callable) -> Make:
    def make(late: bool, model: Any = None, **options: Any) -> Engine:
        """With priorities. late: overlapped; otherwise it waits for each step."""
        model = random_model("float64") if model is None else model
        parts = Parts(policy=ByPriority(aging=0))
        return late_engine(model, 0 if late else None, parts, **{"block_size": 4} | options)

    return make


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("late", [False, True])
def test_a_held_request_is_told_its_token_once_also_if_it_is_thrown_out_after_that(
    late: bool, preemption: str, make: Make
) -> None:
    """It comes back and computes its tokens again, which takes a step. Whoever appended meanwhile would take what that
    step tells for the token after the appended one."""
    engine = make(late, num_blocks=6, prefix_cache="off", preemption=preemption)
    held = engine.add(PROMPT, greedy(9), "held", holds=True, priority=1)
    told: list[int] = []

    def step() -> None:
        told.extend(engine.step().tokens.get("held", ()))

    while not told:
        step()
    engine.add([2] * 14, greedy(1), "urgent", priority=0)
    thrown_out = False
    for _ in range(20):
        step()
        thrown_out |= held.state is RequestState.WAITING
        if thrown_out and held.state is RequestState.RUNNING:
            break
    assert thrown_out
    assert held.num_missing_tokens == 0
    engine.append("held", 5)
    for _ in range(4):
        step()
    alone = make(False, num_blocks=6)
    for tokens in (PROMPT, [*PROMPT, 5]):
        alone.add(tokens, greedy(1), str(len(tokens)))
    expected = {}
    while alone.has_work():
        expected |= alone.step().tokens
    assert told == [*expected["9"], *expected["10"]]


def test_a_token_on_its_way_to_a_held_request_is_work(make: Make) -> None:
    """There is nothing to compute for it; who steps while there is work must be told the token all the same."""
    engine = make(True, num_blocks=6)
    engine.add(PROMPT, greedy(9), "held", holds=True)
    engine.step()
    assert not engine.scheduler.has_work()
    assert engine.has_work()
    assert "held" in engine.step().tokens
    assert not engine.has_work()


@pytest.mark.parametrize("late", [False, True])
def test_a_held_request_is_told_its_token_also_if_its_name_was_that_of_another_as_long(late: bool, make: Make) -> None:
    engine = make(late, num_blocks=6)
    for _ in range(2):
        engine.add(PROMPT, greedy(9), "held", holds=True)
        told = engine.step().tokens | (engine.step().tokens if late else {})
        assert "held" in told
        engine.abort("held")


def test_when_the_last_request_is_aborted_its_blocks_are_back_and_nothing_is_left_to_do(make: Make) -> None:
    engine = make(True, num_blocks=6)
    for name in ("a", "b"):
        engine.add(PROMPT, greedy(9), name)
    engine.step()
    engine.abort("a")
    assert engine.has_work()
    engine.abort("b")
    assert not engine.has_work()
    assert (engine.kv.num_available, engine.kv.num_releasing) == (6, 0)
    assert len(engine.trace.steps()) == 1, "the step that ran is in the trace"


def steps_until_urgent_runs(engine: Engine) -> int:
    """An urgent request finds a part of its prompt in the cache, and no room for the rest unless another goes."""
    engine.add([1] * 9, greedy(1))
    while engine.has_work():
        engine.step()
    engine.add([2] * 5, greedy(33), "long", priority=1)
    for _ in range(20):
        engine.step()
    urgent = engine.add([1] * 9 + [3] * 11, greedy(4), "urgent", priority=0)
    for steps in range(40):
        if urgent.state is RequestState.RUNNING:
            return steps
        engine.step()
    raise AssertionError


def test_looking_for_room_for_a_cached_prefix_is_not_taken_for_blocks_that_come(make: Make) -> None:
    """Its cached blocks are held while the rest is looked for, and let go where that is not found: nobody gets them."""
    waited, overlapped = (steps_until_urgent_runs(make(late, num_blocks=10)) for late in (False, True))
    assert waited == 2, "one step throws out the other, the next lets it in"
    assert overlapped <= 3, "the other's blocks come one step later"


def test_who_overtakes_throws_out_no_more_than_it_needs_while_their_blocks_are_on_their_way(make: Make) -> None:
    engine = make(True, num_blocks=9, prefix_cache="off")
    for i in range(3):
        engine.add([i + 1] * 9, greedy(4), f"long{i}", priority=1)
    for _ in range(2):
        engine.step()
    assert engine.kv.num_available == 0
    engine.add([5] * 12, greedy(1), "urgent", priority=0)
    while "urgent" in engine.requests:
        engine.step()
    assert [name for step in engine.trace.steps() for name in step.preempted] == ["long2"]


def first_to_finish(engine: Engine, late_by: int) -> list[str]:
    """Of three long requests and an urgent one, which ranks first and comes so many steps later."""
    for i in range(3):
        engine.add([2] * 5, greedy(36), f"long{i}", priority=1)
    for _ in range(late_by):
        engine.step()
    engine.add([1] * 19, greedy(4), "urgent", priority=0)
    finished: list[str] = []
    while not finished:
        finished += [request.id for request in engine.step().finished]
    return finished


def test_who_waits_for_blocks_to_come_back_goes_before_those_that_rank_after_it(make: Make, random_model) -> None:
    """A window gives blocks up with every step. Waiting for them is right once: if others took them each time, the
    first in rank would wait until those have finished."""
    window = random_model("float64", architecture="MistralForCausalLM", sliding_window=6)
    ends = []
    for late in (False, True):
        engine = make(late, model=window, block_size=1, num_blocks=25, max_num_batched_tokens=12)
        assert first_to_finish(engine, late_by=10) == ["urgent"]
        ends.append(len(engine.trace.steps()))
    assert ends[1] <= ends[0] + 5


def test_without_overlap_a_step_that_failed_can_be_tried_again(make: Make) -> None:
    engine = make(False, num_blocks=6)
    request = engine.add(PROMPT, greedy(4))
    engine.step()
    collect = engine.executor.collect

    def fails(ticket: Any) -> Any:
        raise OSError("the device is gone")

    engine.executor.collect = fails
    with pytest.raises(OSError, match="the device is gone"):
        engine.step()
    engine.executor.collect = collect
    while engine.has_work():
        engine.step()
    again = make(False, num_blocks=6)
    twin = again.add(PROMPT, greedy(4))
    while again.has_work():
        again.step()
    assert request.output_tokens == twin.output_tokens


def test_the_trace_does_not_say_that_a_step_of_the_last_holder_of_a_name_computed_the_next(make: Make) -> None:
    """The step that runs when a request is aborted is over when its name is somebody else's."""
    engine = make(True, num_blocks=12, prefix_cache="off")
    engine.add(PROMPT, greedy(9), "other")
    engine.add(PROMPT, greedy(9), "name")
    engine.step()
    engine.abort("name")
    engine.add([4, 4], greedy(3), "name")
    while engine.has_work():
        engine.step()
    rows = [row for step in engine.trace.steps() for row in step.rows if row.request_id == "name"]
    assert [(row.start, row.num_tokens) for row in rows] == [(0, 2), (2, 1), (3, 1)]
