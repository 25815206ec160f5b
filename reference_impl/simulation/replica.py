"""One replica: the real engine and scheduler, a cost model for an executor, a virtual clock.

It may leap. While all rows decode and none can be admitted, step follows step with the same rows, each a token
longer, until a request arrives, ends or runs out of blocks. Those steps are done at once: what they decide is known,
only their seconds are added up, one after another. The result is the one of single steps, to the last bit (tested).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

from reference_impl.assembly.config import EngineConfig
from reference_impl.assembly.engine import Engine
from reference_impl.assembly.parts import Parts
from reference_impl.core.scheduler import Scheduler
from reference_impl.features.sizing.budget import KV_CACHE_BYTES
from reference_impl.interfaces import Policy, Request, SamplingParams
from reference_impl.simulation.cost import BoundedCost, Roofline, SummedCost
from reference_impl.simulation.executor import WORD, SimulatedGPU, StepCost, hollow_model
from reference_impl.simulation.ledger import Ledger, Result
from reference_impl.simulation.prompts import VOCAB_SIZE, PromptIndex, Prompts
from reference_impl.simulation.workloads.request import WorkloadRequest
from reference_impl.theory.deployment import Deployment

LONGEST = 131_072  # tokens of a sequence, where the cost does not say


@lru_cache(maxsize=100_000)
def _sampling(num_output_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_output_tokens, temperature=0, ignore_eos=True, seed=0)


class Replica:
    """One replica. cost: a StepCost or a Deployment; one that is a SummedCost lets it leap. config.num_blocks None:
    what a Deployment has room for beside its weights, or else what config.kv_cache_bytes (None: 256 MiB) pays for.
    host_seconds: added to every step. ended: called with the id of every request that finishes, and when. acceptance,
    draft_seconds, keep_up_seconds: see `SimulatedGPU`; they are for config.num_drafts > 0; such a replica does not
    leap.
    """

    def __init__(
        self,
        cost: StepCost | Deployment,
        config: EngineConfig | None = None,
        policy: Policy | None = None,
        host_seconds: float = 0.0,
        ended: Callable[[str, float], None] | None = None,
        leaps: bool = True,
        acceptance: float = 0.0,
        draft_seconds: float = 0.0,
        keep_up_seconds: float = 0.0,
    ):
        cost = Roofline(cost) if isinstance(cost, Deployment) else cost
        config = config or EngineConfig()
        config = replace(config, num_blocks=num_blocks(cost, config), kv_cache_bytes=None)
        self.gpu = SimulatedGPU(
            cost, host_seconds=host_seconds, block_size=config.block_size, acceptance=acceptance,
            draft_seconds=draft_seconds, keep_up_seconds=keep_up_seconds,
        )  # fmt: skip
        self.ledger = Ledger()
        nothing: Any = object()
        index = PromptIndex(config.block_size) if config.prefix_cache in ("auto", "hash") else None
        parts = Parts(
            policy=policy, executor=self.gpu, clock=self.gpu, kv_cache=nothing, attention=nothing, trace=self.ledger,
            prefix_index=index,
        )  # fmt: skip
        longest = cost.longest if isinstance(cost, BoundedCost) else LONGEST
        self.engine = Engine(hollow_model(VOCAB_SIZE, longest, cost.bytes_per_token), config, parts)
        scheduler = self.engine.scheduler
        assert isinstance(scheduler, Scheduler)
        self._scheduler = scheduler
        self._longest = self.engine.max_request_len
        self._decode_seconds: Callable[[int, int], float] | None = (
            cost.decode_seconds if leaps and not config.num_drafts and isinstance(cost, SummedCost) else None
        )
        self._ended = ended
        self._prompts = Prompts()
        self._coming: list[tuple[float, int, WorkloadRequest]] = []  # a heap, by arrival, then by order of offering
        self._num_offered = 0
        self._began = 0.0  # of the last step that was begun

    def offer(self, request: WorkloadRequest, arrival: float) -> None:
        """Offers a request that will arrive at `arrival`. Raises ValueError if the replica has run beyond that."""
        if arrival < self._began:
            raise ValueError(
                f"request {request.id!r} arrives at {arrival:.6f} s, and the replica has run to {self._began:.6f} s: a "
                "stream must be in order of arrival, a follower offered before the request that it follows has ended"
            )
        heapq.heappush(self._coming, (arrival, self._num_offered, request))
        self._num_offered += 1

    @property
    def next_time(self) -> float:
        """When the next step may begin; infinity if nothing is left to do."""
        if self.engine.has_work():
            return self.gpu.time
        return max(self.gpu.time, self._coming[0][0]) if self._coming else math.inf

    def run(self, until: float = math.inf) -> None:
        """Runs every step that begins before `until`; all arrivals before that must have been offered."""
        while (begins := self.next_time) < until:
            self.gpu.time = self._began = begins
            while self._coming and self._coming[0][0] <= begins:
                arrival, _, request = heapq.heappop(self._coming)
                self._add(request, arrival)
            if self.engine.has_work():  # or all arrivals were rejected
                self._step(until)

    def result(self) -> Result:
        return self.ledger.result()

    def _add(self, request: WorkloadRequest, arrival: float) -> None:
        """Gives the engine a request with its own time of arrival, not the time at which the engine looks again."""
        if request.num_prompt_tokens >= self._longest:  # the engine would refuse it
            self.ledger.refuse()
            if self._ended is not None:
                self._ended(request.id, self.gpu.time)
            return
        gpu = self.gpu
        gpu.time, now = arrival, gpu.time
        prompt = self._prompts.tokens(request)
        self.engine.add(prompt, _sampling(request.num_output_tokens), request.id, tenant=request.tenant)
        gpu.time = now

    def _step(self, until: float) -> None:
        finished = self.engine.step().finished
        if self._ended is not None:
            for request in finished:
                self._ended(request.id, self.gpu.time)
        if self._decode_seconds is None:
            return
        if not self._scheduler.num_waiting or (not finished and self._changed_no_seat()):
            until = min(until, self._coming[0][0]) if self._coming else until
            if self.gpu.time < until:
                self._leap(self._decode_seconds, until)

    def _changed_no_seat(self) -> bool:
        """Whether the last step had decodes only, and admitted none although there were tokens left. Then the next will
        admit none: it has the same rows and no more blocks."""
        last = self.ledger.last_step
        return (
            last is not None
            and not last.admitted
            and not last.preempted
            and len(last.rows) < self._scheduler.max_num_batched_tokens
            and all(row.num_tokens == 1 for row in last.rows)
        )

    def _leap(self, decode_seconds: Callable[[int, int], float], until: float) -> None:
        """Runs all steps that begin before `until` and before the one in which a request ends, while free blocks last.
        Taking a block from the prefix cache is a decision, and so is left to a single step."""
        running, gpu = self._scheduler.running, self.gpu
        num_rows = len(running)
        if not 0 < num_rows <= self._scheduler.max_num_batched_tokens:
            return
        most, past = math.inf, 0
        for request in running:
            length, computed = len(request.tokens), request.num_computed_tokens
            if length - computed != 1 or length == request.num_prompt_tokens:  # its first token is an event
                return
            past += computed
            left = request.max_total_tokens - length - 1
            if left < most:
                most = left
        started = time = gpu.time
        ends: list[float] = []
        while len(ends) < most and time < until:
            time += gpu.host_seconds
            time += decode_seconds(num_rows, past)
            past += num_rows
            ends.append(time)
        num_steps = len(ends)
        while num_steps and self._num_new_blocks(running, num_steps) > self.engine.block_pool.num_free:
            num_steps //= 2
        if not num_steps:
            return
        size = self.engine.config.block_size
        for request in running:
            end = request.num_computed_tokens + num_steps
            if end > len(request.block_tables[0]) * size and not self.engine.kv.reserve(request, num_steps):
                raise RuntimeError(f"no block for request {request.id!r} although {num_steps} steps were counted out")
            request.num_computed_tokens = end
            request.tokens += [WORD] * num_steps
            sent = self.engine.planner.sent[request.id]
            sent.num_computed += num_steps
            sent.num_tokens += num_steps
        gpu.time = ends[num_steps - 1]
        self._began = ends[num_steps - 2] if num_steps > 1 else started
        self.ledger.leap(num_steps, num_rows, self._scheduler.num_waiting, started, gpu.time)

    def _num_new_blocks(self, running: list[Request], num_steps: int) -> int:
        size = self.engine.config.block_size
        return sum(max(0, -(-(r.num_computed_tokens + num_steps) // size) - len(r.block_tables[0])) for r in running)


def num_blocks(cost: StepCost, config: EngineConfig) -> int:
    """The blocks of a replica's cache, counted as the engine would on the machine that the cost describes."""
    if config.num_blocks is not None:
        return config.num_blocks
    if isinstance(cost, Roofline):
        return cost.cache_tokens // config.block_size
    budget = KV_CACHE_BYTES if config.kv_cache_bytes is None else config.kv_cache_bytes
    return int(budget // (cost.bytes_per_token * config.block_size))
