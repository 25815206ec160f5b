"""The life of a request, read off the trace: phases that follow one another, and in them what each step did for it.

    phases     | queued | prefill | decode | preempted | recompute | decode      |
    steps               |chunk|chunk||t|t|t|           |chunk      | |t|t|t|t|t|t|

The phases follow one another without a gap up to the last token. So queued is the queue time of the request's metrics,
queued and prefill together are its TTFT, and decode is the sum of its ITL (unless it was preempted before that).
Times are seconds on the engine's clock.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Container, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from reference_impl.interfaces import Row
from reference_impl.observe.trace import Event, RequestArrived, RequestFinished, StepDone, Trace


@dataclass
class Slice:
    name: str
    start: float  # seconds
    end: float
    args: dict[str, Any]


@dataclass
class Life:
    """One request from its arrival to its end. An id that is used again has another life."""

    request_id: str
    arrived: RequestArrived | None  # None: before the events that the trace has kept
    phases: list[Slice] = field(default_factory=list)
    steps: list[Slice] = field(default_factory=list)
    finished: RequestFinished | None = None
    cached_tokens: int | None = None  # found in the prefix cache when it was let in first
    seen: int = 0  # how many of its tokens were computed at least once
    is_out: bool = False  # preempted, and not back yet
    gets_tokens: bool = False  # its last step reached its last token: the next one will be a decode step
    first_scheduled: float | None = None
    token_times: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.arrived is not None:
            self.phases.append(Slice("queued", self.arrived.time, self.arrived.time, {}))

    def preempt(self, step: StepDone) -> None:
        if self.phases:
            last = self.phases[-1]
            if self.gets_tokens and last.name != "decode":  # it had what it needed to decode, and no step for it
                self.phases.append(Slice("decode", last.end, step.started_at, {"tokens": 0, "steps": 0}))
            else:
                last.end = step.started_at
        self.phases.append(Slice("preempted", step.started_at, step.started_at, {"step": step.step_id}))
        self.is_out, self.gets_tokens = True, False

    def compute(self, row: Row, num_new: int, step: StepDone, cached: int | None) -> None:
        if self.first_scheduled is None:
            self.first_scheduled = step.started_at
            self.cached_tokens = cached
        if self.is_out:
            self._come_back(row, step, cached or 0)
        kind = self._kind(row)
        now = self.phases[-1] if self.phases else None
        if now is None or now.name != kind:
            # A waiting request starts with the step; a running one continues where the last phase ended.
            waited = now is None or now.name in ("queued", "preempted", "swapped out")
            begins = step.started_at if now is None or waited else now.end
            if now is not None and waited:
                now.end = begins
            self.phases.append(Slice(kind, begins, begins, {"tokens": 0, "steps": 0}))
        phase = self.phases[-1]
        phase.end = step.finished_at
        phase.args["tokens"] += row.length
        phase.args["steps"] += 1
        if cached:
            phase.args["cached_tokens"] = cached
        drafts = {"drafts": row.num_drafts, "accepted": max(0, num_new - 1)} if row.num_drafts else {}
        self.steps.append(
            Slice(
                "token" if kind == "decode" else "chunk",
                step.started_at,
                step.finished_at,
                {"step": step.step_id, "from": row.start, "tokens": row.length} | drafts,
            )
        )
        self.seen = max(self.seen, row.start + row.num_tokens)
        self.gets_tokens = row.samples
        self.token_times += [step.finished_at] * num_new

    def _come_back(self, row: Row, step: StepDone, cached: int) -> None:
        """Ends the phase in which the request was out. If more tokens are computed than the prefix cache gave, its
        blocks were on the host, and the phase is called "swapped out"."""
        self.is_out = False
        out = self.phases[-1]
        out.end = step.started_at
        if row.start > cached:
            out.name = "swapped out"
        out.args |= {"kept_tokens": row.start}

    def _kind(self, row: Row) -> str:
        if row.start < self.seen:
            return "recompute"
        if self.arrived is None:  # the length of its prompt is no longer known
            return "prefill" if not row.samples or row.num_tokens > 1 else "decode"
        return "prefill" if row.start < self.arrived.num_prompt_tokens else "decode"

    @property
    def num_preemptions(self) -> int:
        return sum(phase.name in ("preempted", "swapped out") for phase in self.phases)

    def close(self, end_of_trace: float) -> None:
        """Ends the last phase of a request that waits, at the request's own end or that of the trace."""
        if self.phases and (self.is_out or self.phases[-1].name == "queued"):
            self.phases[-1].end = end_of_trace if self.finished is None else self.finished.time


def lives(events: Iterable[Event], only: Container[str] | None = None) -> list[Life]:
    """The lives with something to show, in the order in which they begin. only: ids of requests; None: all."""
    found: list[Life] = []
    current: dict[str, Life] = {}

    def begin(request_id: str, arrived: RequestArrived | None) -> Life:
        current[request_id] = Life(request_id, arrived)
        found.append(current[request_id])
        return current[request_id]

    def life_of(request_id: str) -> Life | None:
        if only is not None and request_id not in only:
            return None
        return current.get(request_id) or begin(request_id, None)

    for event in events:
        if isinstance(event, RequestArrived):
            if only is None or event.request_id in only:
                begin(event.request_id, event)
        elif isinstance(event, RequestFinished):
            if life := life_of(event.request_id):
                life.finished = event
                del life.token_times[event.num_output_tokens :]  # what a stop string took back
        else:
            cached = dict(event.admitted)
            for request_id in event.preempted:
                if life := life_of(request_id):
                    life.preempt(event)
            for row, num_new in zip(event.rows, event.num_new_tokens, strict=True):
                if life := life_of(row.request_id):
                    life.compute(row, num_new, event, cached.get(row.request_id))
    return [life for life in found if life.phases]


def lives_of(trace: Trace, request_ids: Collection[str]) -> list[Life]:
    """The lives of these requests, looked for only between their arrival and end, since a trace may be long. Raises
    KeyError for a request that is not in the trace."""
    arrived = min(map(trace.arrival, request_ids))
    events = trace.events  # another thread may append, and begin a new list
    begin = bisect_left(events, arrived, key=lambda e: e.finished_at if isinstance(e, StepDone) else e.time)
    return lives(_until_finished(events[begin:], set(request_ids)), request_ids)


def _until_finished(events: Iterable[Event], unfinished: set[str]) -> Iterator[Event]:
    for event in events:
        yield event
        if isinstance(event, RequestFinished):
            unfinished.discard(event.request_id)
            if not unfinished:
                return
