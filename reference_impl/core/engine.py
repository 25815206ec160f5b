"""The engine: requests in, one ragged step at a time, tokens out (continuous batching, Orca, Yu et al. 2022).

    schedule -> plan -> submit -> collect -> update -> trace

A request has tokens, some of them computed. A step computes new tokens of many requests in one forward pass, prompts
and decodes side by side; the requests whose last token it reaches get the next one.

The engine owns no policy and no tensor: scheduler, KV manager and executor are parts, made elsewhere (`alone.py`).

Several steps may be in flight: step N + 1 is planned and submitted before step N is collected (asynchronous scheduling,
as in vLLM and SGLang), and where an executor runs stages, as many steps are in flight as there are stages.

    depth 1:  submit 1, collect 1 | submit 2, collect 2 | ...
    depth 2:  submit 1 | submit 2, collect 1 | submit 3, collect 2 | ...
    depth 3:  submit 1 | submit 2 | submit 3, collect 1 | submit 4, collect 2 | ...

With more than one, a step is planned before the tokens of those in flight are known. Their requests are advanced when
they are submitted (`PlansAhead.advance`), and the KV manager keeps blocks that were given up until the steps that may
use them are collected (`DefersReuse`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from reference_impl.core.engine_feature import EngineFeature, FinishedStep, Flight
from reference_impl.core.hooks import Hooks
from reference_impl.core.planner import Planner, output_of
from reference_impl.core.requests import check_plain, make_request
from reference_impl.interfaces import (
    Clock,
    DefersReuse,
    Executor,
    KVManager,
    PlansAhead,
    Request,
    RequestArrived,
    RequestFinished,
    RequestState,
    SamplingParams,
    Scheduler,
    StepDone,
    StepPlan,
    TakesEvents,
    Transfers,
    WaitsOnPurpose,
)

if TYPE_CHECKING:
    from reference_impl.core.decoder import Decoder


class WallClock:
    """Seconds since an arbitrary moment; never goes back. A simulation brings its own clock."""

    now = staticmethod(time.perf_counter)


@dataclass(frozen=True)
class StepResult:
    """One step as the engine's user sees it. tokens: {request id: its new tokens, in order}, where it got any."""

    tokens: dict[str, tuple[int, ...]]
    finished: tuple[Request, ...]


class Engine:
    """Runs requests, step by step. block_size: tokens in a KV block. num_blocks: blocks in the KV cache. max_model_len:
    positions of a request. trace: takes the events; None: they are dropped. depth: how many steps may be submitted
    before the first is collected; more than one needs a scheduler that `PlansAhead` and a KV manager that
    `DefersReuse`."""

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
        depth: int = 1,
    ):
        self.model, self.scheduler, self.kv, self.executor = model, scheduler, kv, executor
        self.block_size, self.num_blocks, self.max_model_len = block_size, num_blocks, max_model_len
        self.clock, self.trace = clock, trace
        self.planner = Planner(block_size) if planner is None else planner
        self.depth = depth
        self.hooks = Hooks(EngineFeature)
        self.requests: dict[str, Request] = {}  # those not finished
        self.in_flight: deque[Flight] = deque()  # oldest first
        self.lost: BaseException | None = None  # the error of a step that others were planned on
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
        """A request, not queued yet. others: fields of `Request`. Errors: see `make_request`; ValueError for an id that
        is in use."""
        request_id = self._new_id() if request_id is None else request_id
        self.check_name(request_id)
        c = self.model.config
        limits = f"max_model_len {self.max_model_len}, KV cache {self.num_blocks} blocks of {self.block_size}"
        return make_request(
            request_id, prompt, sampling, vocab_size=c.vocab_size, eos_token_ids=c.eos_token_ids,
            most_tokens=self.max_request_len, limits=limits, arrival=self.clock.now(), **others,
        )  # fmt: skip

    def check_name(self, request_id: str) -> None:
        if request_id in self.requests:
            raise ValueError(f"request id {request_id!r} is in use")

    def enqueue(self, request: Request) -> Request:
        """Queues a request with its other samples, `children`, which the scheduler forks when its prompt is done."""
        children = [*request.children]  # a scheduler may take them as requests of their own
        self.scheduler.add(request)  # if it raises, nothing was stored yet
        for each in (request, *children):
            self.arrived(each)
        return request

    def arrived(self, request: Request) -> None:
        """Notes a request that the scheduler has taken, and reports its arrival to the trace."""
        self.requests[request.id] = request
        if self.trace is not None:
            self.trace.add(RequestArrived(request.arrival, request.id, request.num_prompt_tokens))

    def abort(self, request_id: str, reason: str = "abort", num_dropped: int = 0) -> None:
        """Stops a request, with the samples that were not forked from it yet, and frees its blocks. num_dropped: how
        many of its last tokens are taken back, since a stop string may end before the last token of a step. KeyError if
        it is neither running nor waiting."""
        self.stop(self.unfinished(request_id), reason, num_dropped)
        self._drain()

    def stop(self, request: Request, reason: str, num_dropped: int = 0) -> None:
        """Stops a request like `abort`, but may be called while a step is collected."""
        children = [*request.children]
        if num_dropped:
            request.drop(num_dropped)
        self.scheduler.abort(request.id)
        for each in (request, *children):
            each.finish_reason = reason
            self.finish(each)

    def unfinished(self, request_id: str) -> Request:
        """The request of this name. KeyError if it is neither running nor waiting."""
        if request_id not in self.requests:
            raise KeyError(f"no unfinished request {request_id!r}; unfinished: {sorted(self.requests)}")
        return self.requests[request_id]

    def finish(self, request: Request) -> None:
        """Forgets a request that the scheduler has dropped, frees its slot, and reports its end to the trace."""
        del self.requests[request.id]
        self.planner.close(request.id)
        if self.trace is not None:
            reason = request.finish_reason or "abort"
            self.trace.add(RequestFinished(
                self.clock.now(), request.id, reason, len(request.output_tokens) - request.num_resumed_tokens
            ))  # fmt: skip

    # --- steps ------------------------------------------------------------------------------------------------------

    def has_work(self) -> bool:
        """Whether there is a token to compute, or a step to collect."""
        return bool(self.in_flight) or self.scheduler.has_work() or any(hook() for hook in self.hooks["has_work"])

    def step(self) -> StepResult:
        """Submits what the scheduler chooses as one forward pass, and collects one: the same or, with several in
        flight, the oldest, so that the first steps of such an engine have no tokens.

        RuntimeError where requests wait and nothing is chosen, or an earlier step was lost."""
        if self.lost is not None:
            self.check_not_lost()
        now = self.clock.now()
        for begin in self.hooks["begin"]:
            begin(now)
        plan = self.scheduler.schedule(now)
        is_work = plan.rows or plan.preempted or plan.transfers.is_work
        if not (is_work or self.in_flight or any(hook() for hook in self.hooks["needs_step"])):
            self._check_idle(now)
            return StepResult({}, ())
        done = None
        try:
            if is_submitted := bool(is_work or not self.in_flight):
                self._submit(plan)
            if len(self.in_flight) == self.depth > 1 or not is_submitted:
                done = self._collect()
            if is_submitted:  # after the step before was collected, whose tokens were in flight until then
                for submitted in self.hooks["submitted"]:
                    submitted(self.in_flight[-1])
                if self.depth > 1:  # what it computes counts as computed, so that the next one can be planned
                    cast(PlansAhead, self.scheduler).advance(plan)
            if self.depth == 1:
                done = self._collect()
        except BaseException as error:
            self._lose(error)
            raise
        result = StepResult({}, ()) if done is None else self._record(done)
        if self.in_flight:
            self._drain()
        return result

    def collect(self) -> StepResult:
        """Collects the oldest step in flight, and submits none: for an engine that is to stand still."""
        try:
            return self._record(self._collect())
        except BaseException as error:
            self._lose(error)
            raise

    def _submit(self, plan: StepPlan) -> None:
        requests: Mapping[str, Request] = self.requests
        if self.depth > 1:  # when it is collected, some may have ended
            requests = {row.request_id: self.requests[row.request_id] for row in plan.rows}
        step = self.planner.step(plan, self.requests)
        for message in self.hooks["message"]:
            step = message(step, plan, requests)
        self.in_flight.append(Flight(plan, requests, step, self.executor.submit(step)))
        if self.depth > 1:
            cast(DefersReuse, self.kv).step_submitted(plan.step_id)

    def _collect(self) -> FinishedStep:
        """Waits for the oldest step in flight and gives its tokens to their requests. FloatingPointError if no token
        could be sampled for a row; with `features/failing` its request ends instead."""
        flight = self.in_flight.popleft()
        plan, reply = flight.plan, self.executor.collect(flight.ticket)
        ended: set[str] = set()  # while the step ran: their names may be others' by now
        if self.depth > 1:
            ended = {name for name, r in flight.requests.items() if r.state is RequestState.FINISHED}
            cast(DefersReuse, self.kv).step_collected(plan.step_id)
        afterwards = []
        for collected in self.hooks["collected"]:
            reply, then = collected(flight, reply)
            if then is not None:
                afterwards.append(then)
        for at, error in reply.errors.items():
            raise FloatingPointError(f"request {plan.rows[at].request_id!r}: {error}")
        output = output_of(reply, plan.rows)
        done = FinishedStep(plan, output, self.scheduler.update(plan, output))
        if ended:
            done = self._without(ended, done)
        for then in afterwards:
            done = then(done)
        return done

    def _without(self, ended: set[str], done: FinishedStep) -> FinishedStep:
        """The step without the tokens of requests that ended while it ran."""
        plan, output = done.plan, done.output
        rows = tuple(
            row._replace(samples=row.samples and row.request_id not in ended)
            for row in plan.rows
            if row.request_id not in ended or row.request_id not in self.requests
        )
        num_undrafted = min(plan.num_undrafted, sum(not row.num_drafts for row in rows))
        tokens = {name: new for name, new in output.tokens.items() if name not in ended}
        plan = replace(plan, rows=rows, num_undrafted=num_undrafted)
        return done._replace(plan=plan, output=replace(output, tokens=tokens))

    def _record(self, done: FinishedStep) -> StepResult:
        """Adds the step to the trace, unless nothing happened in it, and drops the requests that finished."""
        plan, output, finished, num_sampled = done
        moved = output.transfers or output.layers_moved
        if self.trace is not None and (plan.rows or plan.preempted or moved or plan.transfers != Transfers()):
            self.trace.add(
                StepDone(
                    plan.step_id, output.started_at, output.finished_at, plan.rows, plan.preempted,
                    self.scheduler.num_waiting, self.scheduler.num_running, self.kv.num_available,
                    plan.transfers, plan.admitted, output.attention, output.transfers, num_sampled,
                    output.layers_moved, plan.num_undrafted, plan.acceptance, plan.num_draft_levels,
                    output.ranks,
                )
            )  # fmt: skip
        for request in finished:
            self.finish(request)
        return StepResult(output.tokens, tuple(finished))

    def _check_idle(self, now: float) -> None:
        """Raises RuntimeError if nothing was planned without a reason. There are three: nothing is left to compute,
        held requests wait for a token to be appended, or the scheduler waits on purpose (dynamic batching)."""
        waits_until = self.scheduler.next_event(now) if isinstance(self.scheduler, WaitsOnPurpose) else None
        if self.has_work() and waits_until is None and not any(request.holds for request in self.requests.values()):
            raise RuntimeError("the scheduler planned nothing although requests wait; they would wait forever")

    def _drain(self) -> None:
        """Collects the steps in flight when no request remains, so that their blocks become free; not after a failed
        step, since an abort that follows it should not raise one more error."""
        while self.in_flight and not self.requests and self.lost is None:
            self.collect()

    def _lose(self, error: BaseException) -> None:
        """Handles a step that failed, or was interrupted by Ctrl-C. With one step at a time it can be tried again, and
        then opens every slot anew; with more the engine is lost."""
        self.planner.close_all()
        if self.depth > 1:
            self.lost = error
        else:
            self.in_flight.clear()

    def check_not_lost(self) -> None:
        """Raises RuntimeError if a step was lost."""
        if self.lost is not None:
            raise RuntimeError(
                "a step on which others were planned failed or was interrupted, so what the cache holds is unknown: "
                "make a new engine (with overlap='off' a step whose model failed can be tried again)"
            ) from self.lost

    def close(self) -> None:
        try:
            for close in self.hooks["close"]:
                close()
        finally:
            self.executor.close()

    @property
    def max_request_len(self) -> int:
        """The most tokens that a request may have: all but the last one need a slot in the cache."""
        return min(self.max_model_len, self.num_blocks * self.block_size + 1)

    def _new_id(self) -> str:
        """The next number that is not the name of an unfinished request."""
        while True:
            self._num_added += 1
            if str(self._num_added - 1) not in self.requests:
                return str(self._num_added - 1)
