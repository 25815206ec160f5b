"""The engine: requests in, one ragged step at a time, tokens out (continuous batching, Orca, Yu et al. 2022).

    schedule -> plan -> submit -> collect -> update -> trace

A request has tokens, some of them computed. A step computes new tokens of many requests in one forward pass, prompts
and decodes side by side; the requests whose last token it reaches get the next one.

The engine owns no policy and no tensor: scheduler, KV manager and executor are parts, made elsewhere (`alone.py`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from reference_impl.core.planner import Planner, output_of
from reference_impl.core.requests import check_plain, make_request
from reference_impl.interfaces import (
    Clock,
    Executor,
    KVManager,
    Reply,
    Request,
    RequestArrived,
    RequestFinished,
    SamplingParams,
    Scheduler,
    Step,
    StepDone,
    StepOutput,
    StepPlan,
    TakesEvents,
)

if TYPE_CHECKING:
    from reference_impl.core.decoder import Decoder


class WallClock:
    """Seconds since an arbitrary moment; never goes back. A simulation brings its own clock."""

    now = staticmethod(time.perf_counter)


@dataclass(frozen=True)
class StepResult:
    """One step as the engine's user sees it. tokens: of each request that got any, in order."""

    tokens: dict[str, tuple[int, ...]]
    finished: tuple[Request, ...]


class FinishedStep(NamedTuple):
    """A step that was collected, and what it gave. num_sampled: as of `StepDone`."""

    plan: StepPlan
    output: StepOutput
    finished: Sequence[Request]
    num_sampled: tuple[int, ...] = ()


class Engine:
    """block_size: tokens in a KV block. num_blocks: of the KV cache. max_model_len: positions of a request. trace: what
    events go to; None: they are dropped."""

    def __init__(
        self,
        model: Decoder,
        scheduler: Scheduler,
        kv: KVManager,
        executor: Executor,
        *,
        block_size: int,
        num_blocks: int,
        max_model_len: int,
        clock: Clock,
        trace: TakesEvents | None = None,
        planner: Planner | None = None,
    ):
        self.model, self.scheduler, self.kv, self.executor = model, scheduler, kv, executor
        self.block_size, self.num_blocks, self.max_model_len = block_size, num_blocks, max_model_len
        self.clock, self.trace = clock, trace
        self.planner = Planner(block_size) if planner is None else planner
        self.requests: dict[str, Request] = {}  # those not finished
        self._num_added = 0

    # --- requests ---------------------------------------------------------------------------------------------------

    def add(
        self, prompt: Sequence[int], sampling: SamplingParams | None = None, request_id: str | None = None
    ) -> Request:
        """Queues a prompt of token ids. ValueError if it is empty, holds unknown ids, or can never fit, and if sampling
        asks for what the core does not have."""
        check_plain(sampling := sampling or SamplingParams())
        return self.enqueue(self.new_request(prompt, sampling, request_id))

    def new_request(
        self, prompt: Sequence[int], sampling: SamplingParams, request_id: str | None, **others: Any
    ) -> Request:
        """A request, not queued yet. others: fields of `Request`. Errors of `make_request`."""
        request_id = self._new_id() if request_id is None else request_id
        if request_id in self.requests:
            raise ValueError(f"request id {request_id!r} is in use")
        c = self.model.config
        limits = f"max_model_len {self.max_model_len}, KV cache {self.num_blocks} blocks of {self.block_size}"
        return make_request(
            request_id, prompt, sampling, vocab_size=c.vocab_size, eos_token_ids=c.eos_token_ids,
            most_tokens=self.max_request_len, limits=limits, arrival=self.clock.now(), **others,
        )  # fmt: skip

    def enqueue(self, request: Request) -> Request:
        self.scheduler.add(request)  # if it raises, nothing was stored yet
        self._arrived(request)
        return request

    def _arrived(self, request: Request) -> None:
        self.requests[request.id] = request
        if self.trace is not None:
            self.trace.add(RequestArrived(request.arrival, request.id, request.num_prompt_tokens))

    def abort(self, request_id: str, reason: str = "abort", num_dropped: int = 0) -> None:
        """Stops a request and frees its blocks. num_dropped: of its last tokens, so many are taken back: a stop string
        may end before the last of a step that gave several. KeyError if it is not running or waiting."""
        request = self._unfinished(request_id)
        if num_dropped:
            request.drop(num_dropped)
        self.scheduler.abort(request_id)
        request.finish_reason = reason
        self._finished(request)

    def _unfinished(self, request_id: str) -> Request:
        if request_id not in self.requests:
            raise KeyError(f"no unfinished request {request_id!r}; unfinished: {sorted(self.requests)}")
        return self.requests[request_id]

    def _finished(self, request: Request) -> None:
        del self.requests[request.id]
        self.planner.close(request.id)
        if self.trace is not None:
            reason = request.finish_reason or "abort"
            self.trace.add(RequestFinished(self.clock.now(), request.id, reason, len(request.output_tokens)))

    # --- steps ------------------------------------------------------------------------------------------------------

    def has_work(self) -> bool:
        """Whether there is a token to compute."""
        return self.scheduler.has_work()

    def step(self) -> StepResult:
        """One forward pass over what the scheduler chooses. RuntimeError where requests wait and it chooses nothing."""
        now = self.clock.now()
        plan = self.scheduler.schedule(now)
        if not (plan.rows or plan.preempted):
            self.check_idle(now)
            return StepResult({}, ())
        try:
            step = self.planner.step(plan, self.requests)
            reply = self.executor.collect(self.executor.submit(step))
            done = self.update(plan, step, reply, self.requests)
        except BaseException:
            self.planner.close_all()  # so that a step that is tried again opens every slot
            raise
        return self.record(done)

    def update(self, plan: StepPlan, step: Step, reply: Reply, requests: Mapping[str, Request]) -> FinishedStep:
        """Appends what was sampled to the requests. requests: by id, those of the plan's rows at least.
        FloatingPointError if a row has no token: `features/failing` ends its request instead."""
        for at, error in reply.errors.items():
            raise FloatingPointError(f"request {plan.rows[at].request_id!r}: {error}")
        output = output_of(reply, plan.rows)
        return FinishedStep(plan, output, self.scheduler.update(plan, output))

    def record(self, done: FinishedStep) -> StepResult:
        """Adds the step to the trace, and drops the requests that finished."""
        plan, output, finished, num_sampled = done
        if self.trace is not None:
            self.trace.add(
                StepDone(
                    plan.step_id, output.started_at, output.finished_at, plan.rows, plan.preempted,
                    self.scheduler.num_waiting, self.scheduler.num_running, self.kv.num_available,
                    plan.transfers, plan.admitted, output.attention, output.transfers, num_sampled,
                    output.layers_moved, plan.num_undrafted, plan.acceptance, plan.num_draft_levels,
                )
            )  # fmt: skip
        for request in finished:
            self._finished(request)
        return StepResult(output.tokens, tuple(finished))

    def check_idle(self, now: float) -> None:
        """Nothing was planned: right only if there is nothing to compute."""
        if self.has_work():
            raise RuntimeError("the scheduler planned nothing although requests wait; they would wait forever")

    def close(self) -> None:
        self.executor.close()

    @property
    def max_request_len(self) -> int:
        """Most tokens a request may have: all but the last one need a slot in the cache."""
        return min(self.max_model_len, self.num_blocks * self.block_size + 1)

    def _new_id(self) -> str:
        """The next number that is no unfinished request's name."""
        while True:
            self._num_added += 1
            if str(self._num_added - 1) not in self.requests:
                return str(self._num_added - 1)
