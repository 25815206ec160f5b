"""Scheduler, KV manager, pool and prefix index together, against a model of the memory they manage, in any order of
events: requests with shared prefixes, samples, beams, aborts (also while a step runs), preemption, swapping, eviction.

The memory is played: every slot holds a note of the whole text up to its token, or nothing. A row checks, before it
computes, that each slot it will read holds exactly the text that its request has there. So a block that is shared
wrongly, copied late, overwritten, brought back from the wrong place or evicted in use cannot stay unnoticed.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

from hypothesis import event
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from reference_impl.core.block_pool import BlockPool
from reference_impl.core.kv_manager import KVManager
from reference_impl.core.ranking import FirstCome
from reference_impl.core.scheduler import Scheduler
from reference_impl.features.windows.groups import longest_sequence
from reference_impl.interfaces import (
    NO_BLOCK,
    PinsPrefixes,
    Request,
    RequestState,
    SamplingParams,
    StepOutput,
    StepPlan,
)

END = 7  # the end token of these requests


class PlayedMemory:
    """Slots with notes instead of keys and values."""

    def __init__(self, num_blocks: int, num_host_blocks: int, block_size: int):
        self.block_size = block_size
        self.device: list[list[Any]] = [[None] * block_size for _ in range(num_blocks)]
        self.host: list[list[Any]] = [[None] * block_size for _ in range(num_host_blocks)]

    def transfer(self, transfers: Any) -> None:
        for source, target, pairs in (
            (self.device, self.host, transfers.swap_out),
            (self.device, self.device, transfers.copies),
            (self.host, self.device, transfers.swap_in),
        ):
            contents = [list(source[pair.src]) for pair in pairs]
            for pair, content in zip(pairs, contents, strict=True):
                target[pair.dst] = content

    def forget(self, blocks: list[int]) -> None:
        for block in blocks:
            self.device[block] = [None] * self.block_size

    def compute(self, request: Request, start: int, num_tokens: int, windows: tuple[int | None, ...]) -> None:
        for group, window in enumerate(windows):
            table = request.block_tables[group]
            for position in range(start, start + num_tokens):
                block = table[position // self.block_size]
                assert block != NO_BLOCK, "a new token falls in a block that was given up"
                self.device[block][position % self.block_size] = note(request, position, group)
            first_seen = 0 if window is None else max(0, start - window + 1)
            for position in range(first_seen, start + num_tokens):
                found = self.device[table[position // self.block_size]][position % self.block_size]
                assert found == note(request, position, group), (request.id, position, group)


def note(request: Request, position: int, group: int) -> Any:
    """What the keys and values of a position depend on: every token up to it, the layer's group, the adapter."""
    return group, request.adapter, tuple(request.tokens[: position + 1])


class Serving(RuleBasedStateMachine):
    """What is served is up to the class that builds on it: `serve`, called by its own `@initialize`."""

    branches = False  # whether there are samples and beams

    def serve(
        self, num_blocks: int, block_size: int, seqs: int, budget: int, windows: Any = (None,), index: Any = None,
        num_host_blocks: int = 0, policy: Any = None, admission: str = "fill",
    ) -> None:  # fmt: skip
        self.num_blocks, self.block_size, self.windows = num_blocks * len(windows), block_size, windows
        self.seqs, self.budget, self.admission = seqs, budget, admission
        self.pool = BlockPool(self.num_blocks)
        self.host_pool = BlockPool(num_host_blocks) if num_host_blocks else None
        self.index = index(block_size) if index and windows == (None,) else None
        self.kv = self.make_kv()
        self.policy = policy or FirstCome()
        self.scheduler = self.make_scheduler()
        self.memory = PlayedMemory(self.num_blocks, num_host_blocks, block_size)
        self.requests: dict[str, Request] = {}  # all that ever were
        self.kept: dict[str, list[int]] = {}  # the tokens each request had, which it must never lose
        self.pinned: list[list[int]] = []
        self.held: dict[str, int | None] = {}  # beams -> the token reported to them, or None
        self.beam_blocks = 0  # that the beams may need
        self.now, self.preempted_in_a_row = 0.0, 0
        self.names = map(str, itertools.count())

    def make_kv(self) -> Any:
        return KVManager(self.pool, self.block_size, self.index)

    def make_scheduler(self) -> Scheduler:
        return Scheduler(self.kv, self.seqs, self.budget, self.policy)

    def longest(self, also_pinned: int = 0) -> int:
        blocks = self.num_blocks - also_pinned - len({block for pin in self.pinned for block in pin})
        return longest_sequence(blocks, self.block_size, self.windows, self.budget) + 1

    @precondition(lambda self: self.index is not None and isinstance(self.kv, PinsPrefixes))
    @rule(shared=st.integers(1, 20), off=st.booleans())
    def pin(self, shared: int, off: bool) -> None:
        """As the engine does: only if everybody still fits."""
        if off and self.pinned:
            self.kv.unpin(self.pinned.pop())
            return
        blocks = self.kv.pin(([2, 1, 2, 2, 1] * 4)[:shared], b"")
        pinned = {block for pin in self.pinned for block in pin} | set(blocks)
        too_long = max((r.max_total_tokens for r in self.alive()), default=2) > self.longest(also_pinned=len(blocks))
        if too_long or (self.held and len(pinned) + self.beam_blocks > self.num_blocks):
            self.kv.unpin(blocks)
        else:
            self.pinned.append(blocks)
            event(f"pinned: {bool(blocks)}")

    # --- requests --------------------------------------------------------------------------------------------------

    def make(self, tokens: list[int], **fields: Any) -> Request:
        tokens = tokens[: self.longest() - 1]
        sampling = fields.pop("sampling")
        request = Request(
            id=next(self.names), tokens=tokens, num_prompt_tokens=len(tokens), sampling=sampling, seed=0,
            arrival=self.now, stop_token_ids=frozenset({END}),
            max_total_tokens=min(len(tokens) + sampling.max_tokens, self.longest()),
            block_tables=[[] for _ in self.windows], **fields,
        )  # fmt: skip
        self.requests[request.id] = request
        return request

    @rule(
        family=st.integers(0, 1), shared=st.integers(0, 20), own=st.lists(st.integers(1, 2), min_size=1, max_size=12),
        max_tokens=st.integers(1, 8), n=st.sampled_from([1, 1, 1, 2, 3]), adapter=st.sampled_from([None, None, "a"]),
        priority=st.integers(0, 2), tenant=st.sampled_from(["", "t"]), deadline=st.sampled_from([None, 3.0, 50.0]),
    )  # fmt: skip
    def add(self, family, shared, own, max_tokens, n, adapter, priority, tenant, deadline) -> None:
        n = n if self.branches else 1
        prompt = [family + 1, 1, 2, 2, 1] * 4  # `pin` knows the second family
        fields = {"adapter": adapter, "priority": priority, "tenant": tenant, "deadline": deadline}
        fields["sampling"] = SamplingParams(max_tokens=max_tokens, n=n)
        parent = self.make([*prompt[:shared], *own], **fields)
        fields["sampling"] = SamplingParams(max_tokens=max_tokens)
        parent.children = [
            self.make(list(parent.tokens), **fields, parent_id=parent.id, sample_index=i) for i in range(1, n)
        ]
        self.scheduler.add(parent)

    @precondition(lambda self: self.branches and len(self.held) == 0 and self.seqs >= 2)
    @rule(prompt=st.lists(st.integers(1, 2), min_size=1, max_size=8))
    def add_beam(self, prompt) -> None:
        self.beam_blocks = 2 * -(-(len(prompt) + 5) // self.block_size) * len(self.windows)
        if len({block for pin in self.pinned for block in pin}) + self.beam_blocks <= self.num_blocks:
            root = self.make(list(prompt), sampling=SamplingParams(max_tokens=4), holds=True)
            self.held[root.id] = None
            self.scheduler.add(root)

    def alive(self) -> list[Request]:
        return [r for r in self.requests.values() if r.state is not RequestState.FINISHED]

    @precondition(alive)
    @rule(which=st.integers(0, 9))
    def abort(self, which: int) -> None:
        request = self.alive()[which % len(self.alive())]
        ending = [request, *request.children]
        self.scheduler.abort(request.id)
        for member in ending:
            assert member.state is RequestState.FINISHED
            assert member.finish_reason == "abort"
            assert member.block_tables == [[] for _ in self.windows]
            self.held.pop(member.id, None)

    # --- steps -----------------------------------------------------------------------------------------------------

    @rule(token=st.sampled_from([1, 2, END]))
    def step(self, token: int) -> None:
        self.run_step(token, None)

    @precondition(alive)
    @rule(which=st.integers(0, 9), token=st.sampled_from([1, 2, END]))
    def abort_while_a_step_runs(self, which: int, token: int) -> None:
        self.run_step(token, which)

    def run_step(self, token: int, abort: int | None) -> None:
        self.now += 1.0
        before = {r.id: (r.num_computed_tokens, r.state) for r in self.requests.values()}
        had_work = self.scheduler.has_work()
        plan = self.scheduler.schedule(self.now)
        self.check_plan(plan, before, had_work)
        self.play(plan)
        if abort is not None:
            self.abort(abort)
        output = StepOutput({row.request_id: (token,) for row in plan.rows if row.samples}, {}, 0.0, 0.0)
        computed = {r.id: r.num_computed_tokens for r in self.alive()}
        finished = self.scheduler.update(plan, output)
        self.check_update(plan, computed, finished)
        self.drive_beams(output)
        for request in self.requests.values():
            kept = self.kept.get(request.id, [])
            assert request.tokens[: len(kept)] == kept, "tokens were lost"
            self.kept[request.id] = list(request.tokens)

    def play(self, plan: StepPlan) -> None:
        self.memory.transfer(plan.transfers)
        self.memory.forget([block for block in range(self.num_blocks) if self.pool.ref_count(block) == 0])
        for row in plan.rows:
            self.memory.compute(self.requests[row.request_id], row.start, row.num_tokens, self.windows)
        for what in ("swap_out", "copies", "swap_in", "evicted"):
            if getattr(plan.transfers, what):
                event(what)
        if any(cached for _, cached in plan.admitted):
            event("prefix hit")

    def check_plan(self, plan: StepPlan, before: dict[str, tuple[int, RequestState]], had_work: bool) -> None:
        names = [row.request_id for row in plan.rows]
        beams_may_branch = self.held and None not in self.held.values()  # all others may have to wait until they do
        if had_work and not plan.preempted and not beams_may_branch:
            assert names, "work waits and nothing is planned"
        assert len(set(names)) == len(names) <= self.seqs
        assert len(self.scheduler.running) <= self.seqs
        assert not set(names) & set(plan.preempted)
        assert plan.num_tokens <= self.budget
        admitted = dict(plan.admitted)
        for row in plan.rows:
            request = self.requests[row.request_id]
            assert request.state is RequestState.RUNNING
            assert row.num_tokens >= 1
            assert row.start == request.num_computed_tokens
            if row.request_id not in admitted:
                assert row.start == before[row.request_id][0]
            told = self.held.get(row.request_id) is not None  # what follows; it only computes its tokens again
            assert row.samples == (row.start + row.num_tokens == request.num_tokens and not told)
            shared = [t[row.start // self.block_size] for t in request.block_tables]
            assert all(self.pool.ref_count(block) == 1 for block in shared), "a block that others read is written"
        for name, cached in admitted.items():
            request = self.requests[name]
            assert cached % self.block_size == 0
            assert 0 <= cached < request.num_tokens
        decoding = [r for r in self.scheduler.running if r.num_missing_tokens == 1 and r.id not in admitted]
        if any(row.num_tokens > 1 for row in plan.rows):  # a chunk never costs a decoding request its token
            assert {r.id for r in decoding} <= set(names)
        for name in plan.preempted:
            assert self.requests[name].state is RequestState.WAITING
        if self.admission == "worst_case" and self.windows == (None,) and not self.policy.preemptive:
            forked = any(r.parent_id for r in self.requests.values()) or self.held
            assert not plan.preempted or forked

    def check_update(self, plan: StepPlan, computed: dict[str, int], finished: list[Request]) -> None:
        rows = {row.request_id: row for row in plan.rows}
        for name, before in computed.items():
            request = self.requests[name]
            if request.parent_id is not None and name not in rows:
                continue  # it may just have been forked
            assert request.num_computed_tokens == before + (rows[name].num_tokens if name in rows else 0)
        for request in finished:
            assert request.state is RequestState.FINISHED
            assert request.finish_reason == ("stop" if request.tokens[-1] == END else "length")

    def drive_beams(self, output: StepOutput) -> None:
        """When every beam has been sampled from: of the first two branches go on, the others end."""
        for name in self.held:
            if name in output.tokens:
                [self.held[name]] = output.tokens[name]
        if not self.held or None in self.held.values():
            return
        beams = [self.requests[name] for name in self.held]
        if beams[0].num_tokens >= beams[0].max_total_tokens - 1:
            for beam in beams:
                self.scheduler.abort(beam.id)
            self.held = {}
            return
        first = beams[0]
        branch = self.make([*first.tokens, 1], sampling=first.sampling, holds=True, parent_id=first.id)
        branch.num_prompt_tokens, branch.max_total_tokens = first.num_prompt_tokens, first.max_total_tokens
        branch.num_computed_tokens = first.num_computed_tokens
        self.scheduler.fork(first, branch)
        first.tokens.append(2)
        for beam in beams[1:]:
            self.scheduler.abort(beam.id)
        self.held = {first.id: None, branch.id: None}
        event("beams branched")

    # --- what is always true ---------------------------------------------------------------------------------------

    @invariant()
    def every_reference_is_somebodys(self) -> None:
        if not hasattr(self, "requests"):
            return
        pins = Counter(block for pin in self.pinned for block in pin)
        owners = Counter(b for r in self.requests.values() for t in r.block_tables for b in t if b != NO_BLOCK)
        indexed = self.kv.references.indexed
        assert len(indexed) == (0 if self.index is None else len(self.index))
        for block in range(self.num_blocks):
            assert self.pool.ref_count(block) == owners[block] + pins[block] + (block in indexed)
        free = list(self.pool._free)
        assert len(free) == len(set(free)) == self.pool.num_free
        assert {block for block in range(self.num_blocks) if self.pool.ref_count(block) == 0} == set(free)
        evictable = sum(self.pool.ref_count(block) == 1 for block in indexed)
        assert self.kv.num_available == len(free) + evictable
        for request in self.requests.values():
            for table in request.block_tables:
                own = [block for block in table if block != NO_BLOCK]
                assert len(own) == len(set(own)), "a block stands twice in a table"
        if self.host_pool is not None:
            there = [b for tables in self.kv.on_host.values() for t in tables for b in t if b != NO_BLOCK]
            assert len(there) == len(set(there)) == self.host_pool.num_blocks - self.host_pool.num_free

    @invariant()
    def who_holds_an_indexed_block_holds_the_path_to_it(self) -> None:
        if not hasattr(self, "requests") or self.index is None:
            return
        for request in self.requests.values():
            known = [block in self.kv.references.indexed for block in request.block_table]
            assert known == sorted(known, reverse=True)

    @invariant()
    def who_waits_holds_nothing_and_who_runs_has_room(self) -> None:
        if not hasattr(self, "requests"):
            return
        for request in self.requests.values():
            if request.state is not RequestState.RUNNING:
                assert request.block_tables == [[] for _ in self.windows]
            else:
                for table in request.block_tables:
                    assert len(table) * self.block_size >= request.num_computed_tokens
            assert request.num_tokens <= request.max_total_tokens or request.holds
        running = [self.scheduler.ranks[r.id] for r in self.scheduler.running]
        assert running == sorted(running)
        assert self.scheduler.num_running == len(running)
        assert self.scheduler.num_waiting == len(self.scheduler.waiting)

    def teardown(self) -> None:
        """Everything finishes, nothing leaks."""
        if not hasattr(self, "requests"):
            return
        for name in list(self.held):
            self.scheduler.abort(name)
        self.held = {}
        while self.pinned:
            self.kv.unpin(self.pinned.pop())
        limit = 50 + 4 * sum(r.max_total_tokens for r in self.requests.values())
        for _ in range(limit):
            if not self.scheduler.has_work():
                break
            self.run_step(1, None)
            self.every_reference_is_somebodys()
        assert not self.scheduler.has_work(), "requests are left after far more steps than they have tokens"
        assert self.kv.num_available == self.num_blocks
        if self.host_pool is not None:
            assert self.host_pool.num_free == self.host_pool.num_blocks
        for request in self.requests.values():
            assert request.state is RequestState.FINISHED
            if request.finish_reason == "length":
                assert request.num_tokens == request.max_total_tokens
