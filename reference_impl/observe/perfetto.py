"""A trace as a file for Perfetto (ui.perfetto.dev) and chrome://tracing: Chrome's trace-event format, as JSON.

    process "engine"     track "steps": a slice per forward pass.
                         Counters: running and waiting requests, free blocks, tokens of the batch.
    process "requests"   a track per request: its life, in it the phases, in them what each step did for it.
    process "ranks"      where there are several: a track per rank, a slice per step.

Times are microseconds from the first event of the trace, to the nanosecond. Several engines: `perfetto_together.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from reference_impl.observe.metrics import RequestMetrics
from reference_impl.observe.timeline import Life, Slice, lives
from reference_impl.observe.trace import StepDone, Trace

ENGINE, REQUESTS, RANKS = (
    1,
    2,
    3,
)  # pid; Perfetto takes the track with the same number as tid for the main one, and puts it first
STEPS = 1  # tid in ENGINE


def to_perfetto(trace: Trace, zero: float | None = None) -> dict[str, Any]:
    """The trace as a JSON object of the trace-event format. One pass over its events; a few events for each row. zero:
    where times begin, in seconds of the trace's clock; None: with the first event."""
    if not trace.events:
        return {"traceEvents": [], "displayTimeUnit": "ms"}
    if zero is None:
        zero = min(e.started_at if isinstance(e, StepDone) else e.time for e in trace.events)
    end = max(e.finished_at if isinstance(e, StepDone) else e.time for e in trace.events)
    slices: list[dict[str, Any]] = []
    names = [name_event("process_name", ENGINE, 0, "engine"), name_event("thread_name", ENGINE, STEPS, "steps")]
    names += [name_event("process_name", REQUESTS, 0, "requests")]
    for step in trace.steps():
        slices.append(complete_event(_step(step), ENGINE, STEPS, zero))
        slices += _counters(step, zero)
        for rank, time in enumerate(step.ranks, 1):
            args = {"step": step.step_id, "waited_ms": round(time.waited * 1e3, 6)}
            slices.append(complete_event(Slice(f"step {step.step_id}", *time[:2], args), RANKS, rank, zero))
    if num_ranks := max((len(step.ranks) for step in trace.steps()), default=0):
        names.append(name_event("process_name", RANKS, 0, "ranks"))
        names += [name_event("thread_name", RANKS, rank + 1, f"rank {rank}") for rank in range(num_ranks)]
    for tid, life in enumerate(lives(trace.events), REQUESTS + 1):
        life.close(end)
        names.append(name_event("thread_name", REQUESTS, tid, life.request_id))
        names.append(_meta("thread_sort_index", REQUESTS, tid, {"sort_index": tid}))
        for part in (_whole(life, end), *life.phases, *life.steps):
            slices.append(complete_event(part, REQUESTS, tid, zero))
    # Of two that start together the outer one has to come first. It was added first, and sorting keeps that order.
    slices.sort(key=lambda e: e["ts"])
    return {"traceEvents": names + slices, "displayTimeUnit": "ms"}


def write_perfetto(trace: Trace, path: str | Path) -> None:
    """Writes the trace as JSON, an event a line."""
    write_events(to_perfetto(trace)["traceEvents"], path)


def write_events(events: Iterable[dict[str, Any]], path: str | Path) -> None:
    """Writes trace events as JSON, one a line."""
    lines = ",\n".join(json.dumps(event, allow_nan=False) for event in events)
    Path(path).write_text(f'{{"traceEvents": [\n{lines}\n], "displayTimeUnit": "ms"}}\n', "utf-8")


def _whole(life: Life, end_of_trace: float) -> Slice:
    start = life.phases[0].start
    end = end_of_trace if life.finished is None else max(life.finished.time, life.phases[-1].end)
    args: dict[str, Any] = {"finish_reason": life.finished.reason if life.finished else "unfinished"}
    args["output_tokens"] = len(life.token_times)
    args["preemptions"] = life.num_preemptions
    if life.cached_tokens is not None:
        args["cached_tokens"] = life.cached_tokens
    if life.arrived is None:
        args["arrival"] = "before the first event that was kept"
    else:
        args["prompt_tokens"] = life.arrived.num_prompt_tokens
        m = RequestMetrics.of(life.arrived.time, life.token_times, life.first_scheduled)
        for name in ("queue", "ttft", "tpot", "latency"):
            if (seconds := getattr(m, name)) is not None:
                args[f"{name}_ms"] = round(seconds * 1e3, 6)
    return Slice(f"request {life.request_id}", start, end, args)


def _step(step: StepDone) -> Slice:
    tokens = sum(row.length for row in step.rows)
    alone = sum(row.length == 1 for row in step.rows)
    kind = "no rows" if not step.rows else "decode" if alone == len(step.rows) else "mixed" if alone else "prefill"
    moved = step.transfers
    args: dict[str, Any] = {"step": step.step_id, "tokens": tokens, "rows": len(step.rows), "rows_of_one_token": alone}
    lists = {"preempted": list(step.preempted), "admitted": [request_id for request_id, _ in step.admitted]}
    counts = {
        "blocks_out": len(moved.swap_out), "blocks_in": len(moved.swap_in), "blocks_copied": len(moved.copies),
        "blocks_evicted": len(moved.evicted), "cached_tokens": sum(cached for _, cached in step.admitted),
    }  # fmt: skip
    args |= {name: value for name, value in (lists | counts).items() if value}
    return Slice(kind, step.started_at, step.finished_at, args)


def _counters(step: StepDone, zero: float) -> Iterator[dict[str, Any]]:
    """Counters: what a step leaves, from its end on; its tokens, from its start to the next or until the engine is
    idle."""
    tokens = sum(row.length for row in step.rows)
    yield _counter("batch", "tokens", tokens, step.started_at, zero)
    if not step.num_running and not step.num_waiting:
        yield _counter("batch", "tokens", 0, step.finished_at, zero)
    yield _counter("running", "requests", step.num_running, step.finished_at, zero)
    yield _counter("waiting", "requests", step.num_waiting, step.finished_at, zero)
    yield _counter("free", "blocks", step.num_free_blocks, step.finished_at, zero)


# --- trace events -----------------------------------------------------------------------------------------------------


def _nanoseconds(seconds: float, zero: float) -> int:
    return round((seconds - zero) * 1e9)


def complete_event(part: Slice, pid: int, tid: int, zero: float) -> dict[str, Any]:
    # Both ends are rounded, never the length: so slices that touch still touch, and inner ones stay inside.
    start, end = _nanoseconds(part.start, zero), _nanoseconds(part.end, zero)
    times = {"ts": start / 1000, "dur": (end - start) / 1000}
    return {"name": part.name, "ph": "X", **times, "pid": pid, "tid": tid, "args": part.args}


def _counter(name: str, unit: str, value: int, at: float, zero: float) -> dict[str, Any]:
    """An event of a counter. Perfetto writes name and unit over the track: "running requests"."""
    time = _nanoseconds(at, zero) / 1000
    return {"name": name, "ph": "C", "ts": time, "pid": ENGINE, "tid": 0, "args": {unit: value}}


def _meta(name: str, pid: int, tid: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "ph": "M", "ts": 0, "pid": pid, "tid": tid, "args": args}


def name_event(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return _meta(what, pid, tid, {"name": name})
