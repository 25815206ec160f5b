"""Waiting requests that take the place of running ones."""

from __future__ import annotations

from reference_impl.assembly.kv import kv_manager
from reference_impl.core.block_pool import BlockPool
from reference_impl.core.scheduler import Scheduler
from reference_impl.features.policies import ByPriority
from tests.scheduler.plans import make_request, output_of, shape


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
