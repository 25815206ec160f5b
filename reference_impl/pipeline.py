"""Steps between submission and booking: one at a time or, overlapped, one more on top of the one that runs.

    one at a time:  submit 1, collect 1 | submit 2, collect 2 | ...
    overlapped:     submit 1 | submit 2, collect 1 | submit 3, collect 2 | ...

Overlapped, step 2 is planned before the tokens of step 1 are known: the scheduler advances its requests as if they were
(`Scheduler.advance`), the worker has them by then, and the KV manager keeps blocks that were given up until the step
that may use them is collected.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from reference_impl.interfaces import (
    DefersReuse,
    Executor,
    FetchesPages,
    KVManager,
    Masks,
    PlansAhead,
    Reply,
    Request,
    RequestState,
    Row,
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
    """A step that was submitted and not collected."""

    plan: StepPlan
    requests: dict[str, Request]  # of its rows
    step: Step
    ticket: Any


class Pipeline:
    """overlaps: whether a step is submitted before the one before it is collected; see `can_overlap`."""

    def __init__(self, scheduler: Scheduler, kv: KVManager, planner: Planner, executor: Executor, overlaps: bool):
        self.scheduler, self.kv = scheduler, kv
        self._ahead = scheduler if overlaps and isinstance(scheduler, PlansAhead) else None
        self._reuse = kv if overlaps and isinstance(kv, DefersReuse) else None
        self.planner, self.executor = planner, executor
        self.overlaps = overlaps
        self._running: deque[_Running] = deque()  # oldest first; two at most
        self._has_sampled = False  # in any step so far
        self._lost: BaseException | None = None  # what a step failed with that another was planned upon

    def __len__(self) -> int:
        """Steps that run."""
        return len(self._running)

    @property
    def is_lost(self) -> bool:
        """An overlapped step failed: `step` and `collect` raise."""
        return self._lost is not None

    def step(self, plan: StepPlan, requests: Mapping[str, Request]) -> Booked | None:
        """Submits a plan, if there is something to do in it or no step runs, and books the step whose turn it is: the
        same one or, overlapped, the one before. None: there is none yet. requests: all that are not finished, by id.

        RuntimeError if an overlapped step failed before.
        """
        with self._watched():
            # With nothing to plan, the step that runs is collected; with none, a step without rows asks for transfers.
            is_submitted = bool(plan.rows or plan.preempted or plan.transfers.is_work or not self._running)
            if is_submitted:
                self._submit(plan, requests)
            booked = None
            if len(self) > is_submitted:  # the step before; what it sampled decides what grammars allow in this one
                booked = self._collect(requests)
            if is_submitted:
                self._finish(self._running[-1])
            if not self.overlaps and is_submitted:
                booked = self._collect(requests)
            if self._ahead is not None and is_submitted:
                self._ahead.advance(plan)
            return booked

    def collect(self, requests: Mapping[str, Request]) -> Booked:
        """Waits for the oldest step that runs, and books it. Errors as of `step`."""
        with self._watched():
            return self._collect(requests)

    def raise_if_lost(self) -> None:
        if self._lost is not None:
            raise RuntimeError(
                "a step on which others were planned failed or was interrupted, so what the cache holds is unknown: "
                "make a new engine (with overlap='off' a step whose model failed can be tried again)"
            ) from self._lost

    @contextmanager
    def _watched(self) -> Iterator[None]:
        self.raise_if_lost()
        try:
            yield
        except BaseException as error:  # also Ctrl-C: the step that was waited for is in no list any more
            self._lost = error if self.overlaps else None
            if not self.overlaps:
                self._running.clear()  # a step that did not get its masks is given up
            self.planner.close_all()  # so that a step that is tried again opens every slot
            raise

    def _submit(self, plan: StepPlan, requests: Mapping[str, Request]) -> None:
        of_rows = {row.request_id: requests[row.request_id] for row in plan.rows}
        step = self.planner.step(plan, requests)
        self._running.append(_Running(plan, of_rows, step, self.executor.submit(step)))
        if self._reuse is not None:
            self._reuse.step_submitted(plan.step_id)

    def _finish(self, running: _Running) -> None:
        """Sends the masks that a step waits for. A request that has ended by now has no use for its own."""
        if not running.step.takes_masks:
            return
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
        if reply.transfers:
            self._pages_of(reply).transfers_ended(reply.transfers)
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
                f"the reply to step {reply.step_id} speaks of transfers {[end.id for end in reply.transfers]}; "
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


def can_overlap(overlap: str, device_type: str, scheduler: Scheduler, kv: KVManager, executor: Executor) -> bool:
    """EngineConfig.overlap for these parts. auto: on a GPU, where all of them can. ValueError where "on" cannot be."""
    if overlap == "off" or (overlap == "auto" and device_type != "cuda"):
        return False
    able = {
        "scheduler (advance)": isinstance(scheduler, PlansAhead),
        "kv_manager (step_submitted, step_collected)": isinstance(kv, DefersReuse),
        "executor (max_in_flight; a sampler that waits for its tokens cannot)": executor.max_in_flight > 1,
    }
    unable = [name for name, is_able in able.items() if not is_able]
    if unable and overlap == "on":
        raise ValueError(f"overlap='on' needs parts that can do it; these cannot: {', '.join(unable)}")
    return not unable
