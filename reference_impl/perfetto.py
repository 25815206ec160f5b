"""A trace as a file for Perfetto (ui.perfetto.dev) and chrome://tracing: Chrome's trace-event format, as JSON.

    process "engine"     track "steps": a slice per forward pass. Counters: running, waiting, free blocks, batch tokens.
    process "requests"   a track per request: its life, in it the phases, in them what each step did for it:

        request    |-----------------------------------------------------------------|
        phases     | queued | prefill | decode | preempted | recompute | decode      |
        steps               |chunk|chunk||t|t|t|           |chunk      | |t|t|t|t|t|t|

The phases follow one another without a gap up to the last token. So queued is the queue time of the request's metrics,
queued and prefill together are its TTFT, and decode is the sum of its ITL (unless it was preempted before that).
Times are microseconds from the first event of the trace, to the nanosecond.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reference_impl.interfaces import Row
from reference_impl.metrics import RequestMetrics
from reference_impl.trace import RequestArrived, RequestFinished, StepDone, Trace

ENGINE, REQUESTS = 1, 2  # pid
STEPS = 1  # tid in ENGINE


@dataclass
class _Slice:
    name: str
    start: float  # seconds
    end: float
    args: dict[str, Any]


@dataclass
class _Life:
    """One request from its arrival to its end. An id that is used again has another life."""

    request_id: str
    arrived: RequestArrived | None  # None: before the events that the trace has kept
    phases: list[_Slice] = field(default_factory=list)
    steps: list[_Slice] = field(default_factory=list)
    finished: RequestFinished | None = None
    cached_tokens: int | None = None  # found in the prefix cache when it was let in first
    seen: int = 0  # how many of its tokens were computed at least once
    is_out: bool = False  # preempted, and not back yet
    gets_tokens: bool = False  # its last step reached its last token: the next one will be a decode step
    first_scheduled: float | None = None
    token_times: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.arrived is not None:
            self.phases.append(_Slice("queued", self.arrived.time, self.arrived.time, {}))

    def preempt(self, step: StepDone) -> None:
        if self.phases:
            last = self.phases[-1]
            if self.gets_tokens and last.name != "decode":  # it had what it needed to decode, and no step for it
                self.phases.append(_Slice("decode", last.end, step.started_at, {"tokens": 0, "steps": 0}))
            else:
                last.end = step.started_at
        self.phases.append(_Slice("preempted", step.started_at, step.started_at, {"step": step.step_id}))
        self.is_out, self.gets_tokens = True, False

    def compute(self, row: Row, step: StepDone, cached: int | None) -> None:
        if self.first_scheduled is None:
            self.first_scheduled = step.started_at
            self.cached_tokens = cached
        if self.is_out:
            self._come_back(row, step, cached or 0)
        kind = self._kind(row)
        now = self.phases[-1] if self.phases else None
        if now is None or now.name != kind:
            # Who waited starts with the step; who was running goes on from where the last phase ended.
            waited = now is None or now.name in ("queued", "preempted", "swapped out")
            begins = step.started_at if now is None or waited else now.end
            if now is not None and waited:
                now.end = begins
            self.phases.append(_Slice(kind, begins, begins, {"tokens": 0, "steps": 0}))
        phase = self.phases[-1]
        phase.end = step.finished_at
        phase.args["tokens"] += row.num_tokens
        phase.args["steps"] += 1
        if cached:
            phase.args["cached_tokens"] = cached
        self.steps.append(
            _Slice(
                "token" if kind == "decode" else "chunk",
                step.started_at,
                step.finished_at,
                {"step": step.step_id, "from": row.start, "tokens": row.num_tokens},
            )
        )
        self.seen = max(self.seen, row.start + row.num_tokens)
        self.gets_tokens = row.samples
        if row.samples:
            self.token_times.append(step.finished_at)

    def _come_back(self, row: Row, step: StepDone, cached: int) -> None:
        """With more tokens computed than the prefix cache gave, its blocks were on the host."""
        self.is_out = False
        out = self.phases[-1]
        out.end = step.started_at
        if row.start > cached:
            out.name = "swapped out"
        out.args |= {"kept_tokens": row.start}

    def _kind(self, row: Row) -> str:
        if row.start < self.seen:
            return "recompute"
        if self.arrived is None:  # the length of its prompt is not known any more
            return "prefill" if not row.samples or row.num_tokens > 1 else "decode"
        return "prefill" if row.start < self.arrived.num_prompt_tokens else "decode"

    def close(self, end_of_trace: float) -> None:
        """Who waits, waits to its own end or that of the trace."""
        if self.phases and (self.is_out or self.phases[-1].name == "queued"):
            self.phases[-1].end = end_of_trace if self.finished is None else self.finished.time

    def whole(self, end_of_trace: float) -> _Slice:
        start = self.phases[0].start
        end = end_of_trace if self.finished is None else max(self.finished.time, self.phases[-1].end)
        args: dict[str, Any] = {"finish_reason": self.finished.reason if self.finished else "unfinished"}
        args["output_tokens"] = len(self.token_times)
        args["preemptions"] = sum(phase.name in ("preempted", "swapped out") for phase in self.phases)
        if self.cached_tokens is not None:
            args["cached_tokens"] = self.cached_tokens
        if self.arrived is None:
            args["arrival"] = "before the first event that was kept"
        else:
            args["prompt_tokens"] = self.arrived.num_prompt_tokens
            m = RequestMetrics.of(self.arrived.time, self.token_times, self.first_scheduled)
            for name in ("queue", "ttft", "tpot", "latency"):
                if (seconds := getattr(m, name)) is not None:
                    args[f"{name}_ms"] = round(seconds * 1e3, 6)
        return _Slice(f"request {self.request_id}", start, end, args)


def to_perfetto(trace: Trace) -> dict[str, Any]:
    """The trace as a JSON object of the trace-event format. One pass over its events; a few events for each row."""
    if not trace.events:
        return {"traceEvents": [], "displayTimeUnit": "ms"}
    zero = min(e.started_at if isinstance(e, StepDone) else e.time for e in trace.events)
    end = max(e.finished_at if isinstance(e, StepDone) else e.time for e in trace.events)
    slices: list[dict[str, Any]] = []
    names = [_name("process_name", ENGINE, 0, "engine"), _name("thread_name", ENGINE, STEPS, "steps")]
    names += [_name("process_name", REQUESTS, 0, "requests")]
    for step in trace.steps():
        slices.append(_complete(_step(step), ENGINE, STEPS, zero))
        slices += _counters(step, zero)
    for tid, life in enumerate(_lives(trace), 1):
        life.close(end)
        names.append(_name("thread_name", REQUESTS, tid, life.request_id))
        names.append(_meta("thread_sort_index", REQUESTS, tid, {"sort_index": tid}))
        for part in (life.whole(end), *life.phases, *life.steps):
            slices.append(_complete(part, REQUESTS, tid, zero))
    # Of two that start together the outer one has to come first. It was added first, and sorting keeps that order.
    slices.sort(key=lambda e: e["ts"])
    return {"traceEvents": names + slices, "displayTimeUnit": "ms"}


def write_perfetto(trace: Trace, path: str | Path) -> None:
    """Writes the trace as JSON, an event a line."""
    content = to_perfetto(trace)
    events = ",\n".join(json.dumps(event, allow_nan=False) for event in content.pop("traceEvents"))
    rest = json.dumps(content)[1:]
    Path(path).write_text(f'{{"traceEvents": [\n{events}\n], {rest}\n')


def _lives(trace: Trace) -> list[_Life]:
    """In the order in which they appear; only those that have something to show."""
    lives: list[_Life] = []
    current: dict[str, _Life] = {}

    def life_of(request_id: str) -> _Life:
        if request_id not in current:
            current[request_id] = _Life(request_id, None)
            lives.append(current[request_id])
        return current[request_id]

    for event in trace.events:
        if isinstance(event, RequestArrived):
            current[event.request_id] = _Life(event.request_id, event)
            lives.append(current[event.request_id])
        elif isinstance(event, RequestFinished):
            life_of(event.request_id).finished = event
        else:
            cached = dict(event.admitted)
            for request_id in event.preempted:
                life_of(request_id).preempt(event)
            for row in event.rows:
                life_of(row.request_id).compute(row, event, cached.get(row.request_id))
    return [life for life in lives if life.phases]


def _step(step: StepDone) -> _Slice:
    tokens = sum(row.num_tokens for row in step.rows)
    alone = sum(row.num_tokens == 1 for row in step.rows)
    kind = "no rows" if not step.rows else "decode" if alone == len(step.rows) else "mixed" if alone else "prefill"
    moved = step.transfers
    args: dict[str, Any] = {"step": step.step_id, "tokens": tokens, "rows": len(step.rows), "rows_of_one_token": alone}
    lists = {"preempted": list(step.preempted), "admitted": [request_id for request_id, _ in step.admitted]}
    counts = {
        "blocks_out": len(moved.swap_out), "blocks_in": len(moved.swap_in), "blocks_copied": len(moved.copies),
        "blocks_evicted": len(moved.evicted), "cached_tokens": sum(cached for _, cached in step.admitted),
    }  # fmt: skip
    args |= {name: value for name, value in (lists | counts).items() if value}
    return _Slice(kind, step.started_at, step.finished_at, args)


def _counters(step: StepDone, zero: float) -> Iterator[dict[str, Any]]:
    """What a step leaves is counted from its end on, its tokens from its start; an engine that falls idle has none."""
    tokens = sum(row.num_tokens for row in step.rows)
    yield _counter("batch tokens", tokens, step.started_at, zero)
    if not step.num_running and not step.num_waiting:
        yield _counter("batch tokens", 0, step.finished_at, zero)
    yield _counter("running", step.num_running, step.finished_at, zero)
    yield _counter("waiting", step.num_waiting, step.finished_at, zero)
    yield _counter("free blocks", step.num_free_blocks, step.finished_at, zero)


# --- trace events -----------------------------------------------------------------------------------------------------


def _nanoseconds(seconds: float, zero: float) -> int:
    return round((seconds - zero) * 1e9)


def _complete(part: _Slice, pid: int, tid: int, zero: float) -> dict[str, Any]:
    # Both ends are rounded, never the length: so slices that touch still touch, and inner ones stay inside.
    start, end = _nanoseconds(part.start, zero), _nanoseconds(part.end, zero)
    times = {"ts": start / 1000, "dur": (end - start) / 1000}
    return {"name": part.name, "ph": "X", **times, "pid": pid, "tid": tid, "args": part.args}


def _counter(name: str, value: int, at: float, zero: float) -> dict[str, Any]:
    time = _nanoseconds(at, zero) / 1000
    return {"name": name, "ph": "C", "ts": time, "pid": ENGINE, "tid": 0, "args": {name: value}}


def _meta(name: str, pid: int, tid: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "ph": "M", "ts": 0, "pid": pid, "tid": tid, "args": args}


def _name(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return _meta(what, pid, tid, {"name": name})
