"""Preempted requests whose blocks go to the host and come back."""

from __future__ import annotations

import pytest

from reference_impl.assembly.kv import kv_manager
from reference_impl.core.block_pool import BlockPool
from reference_impl.core.scheduler import Scheduler
from reference_impl.features.beams.scheduling import Branching
from reference_impl.features.prefix.hash_index import HashIndex
from reference_impl.features.swap.scheduling import Swapping
from reference_impl.interfaces import Request, RequestState
from tests.scheduler.plans import make_request, output_of, shape


def swapping(num_blocks: int, block_size: int, *requests: Request, windows=(None,), budget=8) -> Scheduler:
    kv = kv_manager(BlockPool(num_blocks), block_size, windows, host_pool=BlockPool(20))
    scheduler = Scheduler(kv, 4, budget)
    for feature in (Swapping, Branching):
        scheduler.hooks.add(feature(scheduler))
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
