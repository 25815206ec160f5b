"""Steps between submission and booking: as many in flight as the pipeline is deep.

    one at a time:  submit 1, collect 1 | submit 2, collect 2 | ...
    overlapped:     submit 1 | submit 2, collect 1 | submit 3, collect 2 | ...
    three stages:   submit 1 | submit 2 | submit 3, collect 1 | submit 4, collect 2 | ...

A step is planned before the tokens of those in flight are known. Their requests are advanced when they are submitted
(`PlansAhead.advance`), and the KV manager keeps blocks that were given up until the steps that may use them are
collected. Overlapped, step 2 may go on with the tokens of step 1, which the worker has by then. Between stages it has
not (`RunsStages`), and the scheduler plans other requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from reference_impl.interfaces import (
    DefersReuse,
    Executor,
    FetchesPages,
    KVManager,
    Masks,
    PlansAhead,
    PlansStages,
    Reply,
    Request,
    RequestState,
    Row,
    RunsStages,
    Scheduler,
    Step,
    StepOutput,
    StepPlan,
    TakesMasks,
)
from reference_impl.planner import Planner, output_of


@dataclass(frozen=True)
class Booked:
    """A step that is over. rows and tokens: without those that came too late, of requests that had ended by then.

    num_sampled: of each row how many tokens its request got; () where no row had drafts.
    """

    plan: StepPlan
    rows: tuple[Row, ...]
    num_sampled: tuple[int, ...]
    output: StepOutput
    tokens: dict[str, tuple[int, ...]]
    finished: tuple[Request, ...]


@dataclass(frozen=True, eq=False)
class _Running:
    """A step submitted and not collected."""

    plan: StepPlan
    requests: dict[str, Request]  # of its rows
    step: Step
    ticket: Any


class Pipeline:
    """depth: how many steps may be submitted before the first of them is collected; see `depth_for`."""

    def __init__(self, scheduler: Scheduler, kv: KVManager, planner: Planner, executor: Executor, depth: int):
        self.scheduler, self.kv = scheduler, kv
        self.planner, self.executor, self.depth = planner, executor, depth
        self.overlaps = depth > 1  # whether a step may be planned and submitted before the one before it is collected
        self._ahead = scheduler if self.overlaps and isinstance(scheduler, PlansAhead) else None
        self._reuse = kv if self.overlaps and isinstance(kv, DefersReuse) else None
        self._running: deque[_Running] = deque()  # oldest first
        self._has_sampled = False  # in any step so far
        self.lost: BaseException | None = None  # the error of a step that others were planned on; `step` raises then

    def __len__(self) -> int:
        """Running steps."""
        return len(self._running)

    def step(self, plan: StepPlan, requests: Mapping[str, Request]) -> Booked | None:
        """Submits a plan, unless it is empty while a step runs. Then books the oldest step, if the
        pipeline is full or nothing was submitted; else returns None. requests: all that are not finished, by id.

        RuntimeError if a step failed before on which others may have been planned.
        """
        if self.lost is not None:
            self.raise_lost()
        try:
            # With nothing to plan, the oldest step is collected; with none, a step without rows asks for transfers.
            is_submitted = bool(plan.rows or plan.preempted or plan.transfers.is_work or not self._running)
            if is_submitted:
                self._submit(plan, requests)
            is_due, booked = len(self._running) == self.depth or not is_submitted, None
            if is_due and self.overlaps:  # before the new step's masks: it may be the step before, whose tokens decide
                booked = self._collect(requests)  # what grammars allow, and those tokens are booked before `advance`
            if is_submitted and self._running[-1].step.takes_masks:
                self._finish(self._running[-1])
            if is_due and not self.overlaps:
                booked = self._collect(requests)
            if self._ahead is not None and is_submitted:
                self._ahead.advance(plan)
            return booked
        except BaseException as error:
            self._failed(error)
            raise

    def collect(self, requests: Mapping[str, Request]) -> Booked:
        """Waits for the oldest step that runs, and books it. Errors as of `step`."""
        if self.lost is not None:
            self.raise_lost()
        try:
            return self._collect(requests)
        except BaseException as error:
            self._failed(error)
            raise

    def raise_lost(self) -> None:
        raise RuntimeError(
            "a step on which others were planned failed or was interrupted, so what the cache holds is unknown: "
            "make a new engine (with overlap='off' a step whose model failed can be tried again)"
        ) from self.lost

    def _failed(self, error: BaseException) -> None:
        """Also after Ctrl-C: the step that was waited for is in no list any more."""
        self.lost = error if self.overlaps else None
        if not self.overlaps:
            self._running.clear()  # a step that did not get its masks is given up
        self.planner.close_all()  # so that a step that is tried again opens every slot

    def _submit(self, plan: StepPlan, requests: Mapping[str, Request]) -> None:
        of_rows = {row.request_id: requests[row.request_id] for row in plan.rows}
        step = self.planner.step(plan, requests)
        self._running.append(_Running(plan, of_rows, step, self.executor.submit(step)))
        if self._reuse is not None:
            self._reuse.step_submitted(plan.step_id)

    def _finish(self, running: _Running) -> None:
        """Sends the masks that a step waits for. A request that has ended by now has no use for its own."""
        masks: list[bytes | None] = []
        for row, request in zip(running.plan.rows, running.requests.values(), strict=True):
            mask = None
            if row.samples and request.grammar is not None and request.state is not RequestState.FINISHED:
                mask = request.grammar.allowed(request.output_tokens)
                if mask is None:
                    name = type(request.grammar).__name__
                    raise TypeError(
                        f"request {request.id!r}: {name}.allowed returned None: expected bytes, a bit per token"
                    )
            masks.append(mask)
        assert isinstance(self.executor, TakesMasks)  # or the request would not have been added
        self.executor.finish(running.ticket, Masks(running.plan.step_id, tuple(masks)))

    def _collect(self, requests: Mapping[str, Request]) -> Booked:
        running = self._running.popleft()
        reply = self.executor.collect(running.ticket)
        rows = running.plan.rows
        if drafts := self.planner.has_drafted:
            self.planner.settle(running.step, reply, running.requests)
            rows = tuple(_where_it_was(row, running.requests[row.request_id]) for row in rows)
        if reply.transfers or reply.layers_moved:
            pages = self._pages_of(reply)
            pages.transfers_moved(reply.layers_moved)
            pages.transfers_ended(reply.transfers)
        for at, (start, reports) in reply.prompt_logprobs.items():
            known = running.requests[running.plan.rows[at].request_id].prompt_logprobs
            known += reports[max(0, len(known) - start) :]  # preempted, it computes its prompt once more
        for at, (start, values) in reply.pooled.items():
            running.requests[running.plan.rows[at].request_id].pool(start, values)
        output = output_of(reply, running.plan.rows)
        # A request that has ended by now has no use for its token, and its name may be another's.
        ended = {name for name, request in running.requests.items() if request.state is RequestState.FINISHED}
        if self._reuse is not None:
            self._reuse.step_collected(running.plan.step_id)
        drafted = [row.request_id for row in rows if row.num_drafts] if drafts else []
        had = {name: len(running.requests[name].tokens) for name in drafted}
        finished = self.scheduler.update(running.plan, output)
        tokens = output.tokens
        if tokens and not self._has_sampled:
            grown = next((running.requests[name] for name in tokens if not running.requests[name].holds), None)
            if grown is not None:
                self._has_sampled = True
                _check_appended(self.scheduler, grown)
        for name, length in had.items():  # of several tokens, those behind one that ends the request are not its own
            if name not in ended:
                tokens[name] = tuple(running.requests[name].tokens[length:])
        if ended:
            rows = tuple(
                row._replace(samples=row.samples and row.request_id not in ended)
                for row in rows
                if row.request_id not in ended or row.request_id not in requests
            )
            tokens = {name: new for name, new in tokens.items() if name not in ended}
        num_sampled = tuple(len(tokens.get(row.request_id, ())) for row in rows) if drafts else ()
        return Booked(running.plan, rows, num_sampled, output, tokens, tuple(finished))

    def _pages_of(self, reply: Reply) -> FetchesPages:
        if not isinstance(self.kv, FetchesPages):
            raise ValueError(
                f"the reply to step {reply.step_id} speaks of transfers "
                f"{[*reply.layers_moved, *(end.id for end in reply.transfers)]}; "
                f"{type(self.kv).__name__} has begun none"
            )
        return self.kv


def _check_appended(scheduler: Scheduler, request: Request) -> None:
    """TypeError for a scheduler that was written when a step gave one token per request."""
    if isinstance(request.tokens[-1], tuple):
        raise TypeError(
            f"{type(scheduler).__name__}.update appended {request.tokens[-1]!r} to the tokens of request "
            f"{request.id!r}: StepOutput.tokens has a tuple for each request, since a step may give several. Write "
            "request.tokens.extend(output.tokens[request.id]), or reset this lab's notebook to today's version"
        )


def _where_it_was(row: Row, request: Request) -> Row:
    """A plan's rows begin where they do if all drafts of the step before are right. Before its tokens are booked, a
    row that samples is known to have reached the request's last."""
    if not row.samples or request.holds:
        return row
    return row._replace(start=len(request.tokens) - row.num_tokens)


def stages_for(overlap: str, kv: KVManager, executor: Executor) -> int:
    """How many stages a scheduler plans for: the executor's, where as many steps are to be in flight.

    ValueError unless an executor that runs stages has at least one.
    """
    if not isinstance(executor, RunsStages):
        return 1
    if executor.num_stages < 1:
        raise ValueError(f"{type(executor).__name__}.num_stages: expected at least 1, got {executor.num_stages}")
    wanted = overlap == "on" or (overlap == "auto" and isinstance(kv, DefersReuse))
    return executor.num_stages if wanted else 1


def depth_for(overlap: str, device_type: str, scheduler: Scheduler, kv: KVManager, executor: Executor) -> int:
    """EngineConfig.overlap for these parts: the executor's stages, 2 for overlapped steps, 1 for one at a time.

    auto: of stages, and on a GPU; where all parts can. ValueError where "on" cannot be, or the scheduler plans for
    stages, and not for as many.
    """
    stages = executor.num_stages if isinstance(executor, RunsStages) else 1
    able = {"kv_manager (step_submitted, step_collected)": isinstance(kv, DefersReuse)}
    if stages > 1:
        plans = isinstance(scheduler, PlansStages) and scheduler.num_stages == stages
        able = {f"scheduler (advance, num_stages={stages})": plans} | able
    else:
        able = {"scheduler (advance)": isinstance(scheduler, PlansAhead)} | able
        able["executor (max_in_flight; a sampler that waits for its tokens cannot)"] = executor.max_in_flight > 1
    unable = [name for name, is_able in able.items() if not is_able]
    if unable and overlap == "on":
        raise ValueError(f"overlap='on' needs parts that can do it; these cannot: {', '.join(unable)}")
    wanted = overlap == "on" or (overlap == "auto" and (stages > 1 or device_type == "cuda"))
    depth = max(2, stages) if wanted and not unable else 1
    if isinstance(scheduler, PlansStages) and scheduler.num_stages not in (1, depth):
        raise ValueError(
            f"{type(scheduler).__name__} plans for num_stages={scheduler.num_stages}; here at most {depth} steps are "
            f"in flight (executor's num_stages: {stages}, overlap={overlap!r}): make it for as many, or for 1"
        )
    return depth
