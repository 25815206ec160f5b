"""Contiguous reservation: no slot has two owners, every slot is accounted for, and the engine runs over it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference_impl.core.scheduler import Scheduler
from reference_impl.features.baselines.contiguous_allocator import ContiguousAllocator, MemoryUse
from reference_impl.features.baselines.contiguous_manager import ContiguousKVManager
from reference_impl.features.baselines.orca_batching import OrcaBatching
from reference_impl.interfaces import Request, RequestState, SamplingParams, StepOutput

examples = settings(max_examples=200, deadline=None, derandomize=True, database=None)


def gaps(memory: ContiguousAllocator) -> list[tuple[int, int]]:
    """The free runs, found slot by slot."""
    taken = [False] * memory.num_slots
    for start, length in memory.runs.values():
        for slot in range(start, start + length):
            assert not taken[slot], "two requests own a slot"
            taken[slot] = True
    found: list[tuple[int, int]] = []
    for slot in (slot for slot in range(memory.num_slots) if not taken[slot]):
        if found and sum(found[-1]) == slot:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((slot, 1))
    return found


@examples
@given(
    num_slots=st.integers(1, 60),
    fit=st.sampled_from(["first", "best"]),
    events=st.lists(st.tuples(st.booleans(), st.integers(1, 20), st.integers(0, 20), st.integers(0, 20)), max_size=40),
)
def test_every_slot_is_accounted_for_at_every_moment(num_slots: int, fit, events) -> None:
    memory, final, used = ContiguousAllocator(num_slots, fit), {}, {}
    for number, (arrives, length, tokens, wanted) in enumerate(events):
        before, name = gaps(memory), str(number)
        large_enough = [hole for hole in before if hole[1] >= length]
        if arrives or not memory.runs:
            start = memory.allocate(name, length)
            assert (start is None) == (not large_enough)
            if start is not None:
                best = min(large_enough, key=lambda hole: (hole[1], hole[0]))
                assert start == (large_enough[0] if fit == "first" else best)[0]
                final[name] = min(tokens, length)
                used[name] = final[name] * wanted // 20
                memory.write(name, used[name])
        else:
            name = list(memory.runs)[tokens % len(memory.runs)]
            memory.free(name)
            del final[name], used[name]
        assert memory.holes == gaps(memory)
        use = memory.memory(final, wanted)
        assert use.total == num_slots
        assert use.used == sum(used.values())
        assert use.later == sum(final[n] - used[n] for n in used)
        assert use.never == sum(memory.runs[n][1] - final[n] for n in used)
        assert use.stranded == sum(length for _, length in gaps(memory) if length < wanted)
        assert min(use.used, use.later, use.never, use.stranded, use.usable) >= 0
    for name in list(memory.runs):
        memory.free(name)
    assert memory.holes == [(0, num_slots)]


def test_a_request_that_uses_300_of_32768_slots_wastes_the_rest() -> None:
    memory = ContiguousAllocator(32_768)
    memory.allocate("a", 32_768)
    memory.write("a", 200)
    assert memory.memory({"a": 300}, wanted=1) == MemoryUse(used=200, later=100, never=32_468, stranded=0, usable=0)
    assert memory.allocate("b", 1) is None


def test_two_requests_with_8192_slots_each() -> None:
    """They end at 500 and 2,000 tokens: 7,692 and 6,192 slots are never written."""
    memory = ContiguousAllocator(20_000)
    for name in ("a", "b"):
        memory.allocate(name, 8192)
    use = memory.memory({"a": 500, "b": 2000}, wanted=8192)
    assert use == MemoryUse(used=0, later=2500, never=7692 + 6192, stranded=20_000 - 16_384, usable=0)


def test_free_memory_can_be_useless() -> None:
    """Half of the memory is free, and a request of a third of it does not fit."""
    memory = ContiguousAllocator(120)
    for name in "abcd":
        memory.allocate(name, 30)
    memory.free("a")
    memory.free("c")
    assert memory.allocate("e", 40) is None
    assert memory.memory({"b": 30, "d": 30}, wanted=40) == MemoryUse(0, 60, 0, stranded=60, usable=0)
    assert memory.memory({"b": 30, "d": 30}, wanted=30).usable == 60
    memory.free("b")
    assert memory.holes == [(0, 90)], "a run joins the holes on both sides"
    assert memory.allocate("e", 40) == 0


@pytest.mark.parametrize(("fit", "large_fits"), [("first", False), ("best", True)])
def test_best_fit_keeps_the_large_hole_for_a_large_request(fit, large_fits: bool) -> None:
    memory = ContiguousAllocator(100, fit)
    for name, length in (("a", 50), ("wall", 20), ("b", 30)):
        memory.allocate(name, length)
    memory.free("a")
    memory.free("b")
    memory.allocate("small", 30)
    assert (memory.allocate("large", 50) is not None) == large_fits


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda m: ContiguousAllocator(0), "num_slots: expected at least 1, got 0"),
        (lambda m: ContiguousAllocator(8, "worst"), 'expected "first" or "best", got \'worst\''),
        (lambda m: m.allocate("a", 2), "'a': expected a new request"),
        (lambda m: m.allocate("b", 0), "at least 1 slot, got 0"),
        (lambda m: m.write("a", 5), "5 tokens do not fit the 4 slots reserved"),
        (lambda m: m.write("a", -1), "-1 tokens do not fit"),
        (lambda m: m.memory({"a": 5}, 1), "has 2 tokens in 4 slots, and cannot end with 5"),
        (lambda m: m.memory({"a": 1}, 1), "cannot end with 1"),
    ],
)
def test_bad_arguments_change_nothing(wrong, message: str) -> None:
    memory = ContiguousAllocator(8)
    memory.allocate("a", 4)
    memory.write("a", 2)
    with pytest.raises(ValueError, match=message):
        wrong(memory)
    assert memory.memory({"a": 2}, 1) == MemoryUse(used=2, later=0, never=2, stranded=0, usable=4)
    with pytest.raises(KeyError):
        memory.free("nobody")


def make_request(name: str, num_prompt: int, max_tokens: int) -> Request:
    return Request(
        name, [1] * num_prompt, num_prompt, SamplingParams(max_tokens=max_tokens), seed=0, arrival=0.0,
        stop_token_ids=frozenset({7}), max_total_tokens=num_prompt + max_tokens,
    )  # fmt: skip


def test_continuous_batching_runs_over_contiguous_memory() -> None:
    """Ten requests that may have 24 tokens and end after 4 of output: as many run as have a run, all finish."""
    kv = ContiguousKVManager(num_blocks=16, block_size=4)
    scheduler = Scheduler(kv, max_num_seqs=8, max_num_batched_tokens=16)
    requests = [make_request(str(i), 5, 20) for i in range(10)]
    for request in requests:
        scheduler.add(request)
    most = 0
    for step in range(100):
        plan = scheduler.schedule(float(step))
        assert not plan.preempted
        running = [request for request in requests if request.state is RequestState.RUNNING]
        most = max(most, len(running))
        for request in running:
            assert request.block_table == list(range(request.block_table[0], request.block_table[0] + 6))
        use = kv.allocator.memory({request.id: 8 for request in running}, wanted=24)
        assert use.total == 64
        assert use.never == len(running) * (24 - 8)
        assert use.stranded + use.usable == kv.num_available * 4
        scheduler.update(
            plan,
            StepOutput(
                {r.request_id: (7 if r.start + r.num_tokens == 8 else 1,) for r in plan.rows if r.samples}, {}, 0, 0
            ),
        )
        if not scheduler.has_work():
            break
    assert most == 2, "64 slots / 24 reserved; the 9 tokens that each has would let 6 run"
    assert all(request.finish_reason == "stop" for request in requests)
    assert kv.num_available == 16


def test_what_a_step_writes_counts_as_used() -> None:
    kv = ContiguousKVManager(num_blocks=16, block_size=4)
    scheduler, requests = OrcaBatching(kv, 4), [make_request(str(n), n, 8) for n in (3, 9)]
    for request in requests:
        scheduler.add(request)
    for step in range(8):
        plan = scheduler.schedule(float(step))
        written = sum(request.num_tokens for request in requests)
        use = kv.allocator.memory({"0": 99, "3": 10, "9": 16}, wanted=1)
        assert (use.used, use.later) == (written, 10 + 16 - written)
        scheduler.update(plan, StepOutput({row.request_id: (1,) for row in plan.rows}, {}, 0, 0))
    assert not scheduler.has_work()


def test_a_contiguous_run_cannot_be_shared() -> None:
    with pytest.raises(ValueError, match="one request per sample"):
        ContiguousKVManager(4, 4).fork(make_request("a", 2, 2), make_request("a/1", 2, 2))
