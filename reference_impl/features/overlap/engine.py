"""Several steps in flight: step N + 1 is planned and submitted before step N is collected (asynchronous scheduling, as
in vLLM and SGLang), and where an executor runs stages, as many steps are in flight as there are stages.

    one at a time:  submit 1, collect 1 | submit 2, collect 2 | ...                           core/engine.py
    overlapped:     submit 1 | submit 2, collect 1 | submit 3, collect 2 | ...                depth 2
    three stages:   submit 1 | submit 2 | submit 3, collect 1 | submit 4, collect 2 | ...     depth 3

A step is planned before the tokens of those in flight are known. Their requests are advanced when they are submitted
(`PlansAhead.advance`), and the KV manager keeps blocks that were given up until the steps that may use them are
collected (`DefersReuse`). Overlapped, step 2 may go on with the tokens of step 1, which the worker has by then. Between
stages it has not (`RunsStages`), and the scheduler plans other requests.

It extends `Engine.step`, with what follows the schedule (`step_ahead`), and `Engine.update`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from reference_impl.core.engine import Engine, FinishedStep, StepResult
from reference_impl.interfaces import DefersReuse, PlansAhead, Reply, Request, RequestState, Step, StepPlan


@dataclass(frozen=True, eq=False)
class Flight:
    """A step submitted and not collected. requests: of its rows, by id and in their order."""

    plan: StepPlan
    requests: dict[str, Request]
    step: Step
    ticket: Any


class OverlappedEngine(Engine):
    """depth: how many steps may be submitted before the first of them is collected, as `depth_for` found for these
    parts: of more than one, the scheduler can plan ahead and the KV manager defers reuse."""

    def __init__(self, *parts: Any, depth: int = 1, **options: Any):
        super().__init__(*parts, **options)
        self.depth = depth
        self.in_flight: deque[Flight] = deque()  # oldest first
        self.lost: BaseException | None = None  # the error of a step that others were planned on

    @property
    def overlaps(self) -> bool:
        """Whether a step may be submitted before the one before it is collected."""
        return self.depth > 1

    def step_ahead(self, plan: StepPlan) -> StepResult:
        """Submits a plan, unless it is empty while a step runs. Then collects the oldest step, if `depth` are in flight
        or nothing was submitted; otherwise the result is empty."""
        done = None
        try:
            is_submitted = bool(plan.rows or plan.preempted or plan.transfers.is_work or not self.in_flight)
            if is_submitted:
                self.submit(plan)
            if len(self.in_flight) == self.depth or not is_submitted:
                done = self.collect()
            # After the oldest step is collected, whose tokens were counted as in flight until then. If it made the last
            # request fail, that collected the new step, too.
            if is_submitted and self.in_flight:
                self.advance(self.in_flight[-1])
        except BaseException as error:
            self._lose(error)
            raise
        result = StepResult({}, ()) if done is None else self.record(done)
        self.drain()
        return result

    def submit(self, plan: StepPlan) -> None:
        of_rows = {row.request_id: self.requests[row.request_id] for row in plan.rows}
        step = self.message(plan)
        self.in_flight.append(Flight(plan, of_rows, step, self.executor.submit(step)))
        cast(DefersReuse, self.kv).step_submitted(plan.step_id)

    def message(self, plan: StepPlan) -> Step:
        """What the worker gets for a plan."""
        return self.planner.step(plan, self.requests)

    def collect(self) -> FinishedStep:
        """Waits for the oldest step in flight, and gives its tokens to their requests."""
        flight = self.in_flight.popleft()
        return self.update(flight.plan, flight.step, self.executor.collect(flight.ticket), flight.requests)

    def advance(self, flight: Flight) -> None:
        """What a submitted step computes counts as computed, so that the next one can be planned."""
        cast(PlansAhead, self.scheduler).advance(flight.plan)

    def update(self, plan: StepPlan, step: Step, reply: Reply, requests: Mapping[str, Request]) -> FinishedStep:
        """Drops what comes too late: a request that has ended by now has no use for its token, and its name may be
        another's."""
        if not self.overlaps:
            return super().update(plan, step, reply, requests)
        ended = {row.request_id for row in plan.rows if requests[row.request_id].state is RequestState.FINISHED}
        cast(DefersReuse, self.kv).step_collected(plan.step_id)
        done = super().update(plan, step, reply, requests)
        if not ended:
            return done
        rows = tuple(
            row._replace(samples=row.samples and row.request_id not in ended)
            for row in plan.rows
            if row.request_id not in ended or row.request_id not in self.requests
        )
        tokens = {name: new for name, new in done.output.tokens.items() if name not in ended}
        num_undrafted = min(plan.num_undrafted, sum(not row.num_drafts for row in rows))
        plan = replace(plan, rows=rows, num_undrafted=num_undrafted)
        return done._replace(plan=plan, output=replace(done.output, tokens=tokens))

    def drain(self) -> None:
        """When no request remains, collects the steps in flight, so that their blocks are free. Not after a failed
        step: an abort that follows it should not raise one more error."""
        while self.in_flight and not self.requests and self.lost is None:
            try:
                done = self.collect()
            except BaseException as error:
                self._lose(error)
                raise
            self.record(done)

    def abort(self, request_id: str, reason: str = "abort", num_dropped: int = 0) -> None:
        super().abort(request_id, reason, num_dropped)
        self.drain()

    def has_work(self) -> bool:
        return bool(self.in_flight) or super().has_work()

    # --- a step failed on which others were planned -----------------------------------------------------------------

    def _lose(self, error: BaseException) -> None:
        """Also after Ctrl-C: the step that was waited for is not in flight any more."""
        self.lost = error
        self.planner.close_all()

    def check_not_lost(self) -> None:
        if self.lost is not None:
            raise RuntimeError(
                "a step on which others were planned failed or was interrupted, so what the cache holds is unknown: "
                "make a new engine (with overlap='off' a step whose model failed can be tried again)"
            ) from self.lost
