"""What the engine is doing and has done, for the page that a learner can watch while a chapter runs. Never any text."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from reference_impl.assembly.engine import Engine
from reference_impl.interfaces import Clock
from reference_impl.observe.metrics import WorkloadMetrics
from reference_impl.observe.timeline import Life, Slice, lives_of
from reference_impl.observe.trace import StepDone, Trace
from reference_impl.serving.metrics import Finished, rank_reports

SECONDS = 10.0  # over which rates are taken
SHOWN = 200  # requests that run or wait
SHOWN_FINISHED = 50
SHARES = (50, 90, 99)


def snapshot(engine: Engine, hit_rate: float) -> dict[str, Any]:
    """What runs and waits, the blocks, and the rates of the last seconds."""
    now, requests, events = engine.clock.now(), list(engine.requests.values()), engine.trace.events[-5000:]
    steps = [event for event in events if isinstance(event, StepDone) and event.finished_at > now - SECONDS]
    return {
        "pid": os.getpid(),
        "running": engine.scheduler.num_running,
        "waiting": engine.scheduler.num_waiting,
        "blocks": engine.num_blocks,
        "blocks_available": engine.kv.num_available,
        "block_size": engine.config.block_size,
        "acceptance": engine.config.acceptance,
        "hit_rate": hit_rate,
        "tokens_per_second": sum(sum(step.num_new_tokens) for step in steps) / SECONDS,
        "steps_per_second": len(steps) / SECONDS,
        "tokens_per_step": sum(r.length for s in steps for r in s.rows) / len(steps) if steps else 0.0,
        "ranks": [report._asdict() for report in rank_reports(engine)],
        "num_requests": len(requests),
        "requests": [
            {
                "id": request.id,
                "state": request.state.value,
                "prompt": request.num_prompt_tokens,
                "cached": request.num_cached_tokens,
                "computed": request.num_computed_tokens,
                "output": max(0, request.num_tokens - request.num_prompt_tokens),
                "max_tokens": request.sampling.max_tokens,
                "blocks": len(request.block_table),
                "seconds": now - request.arrival,
            }
            for request in requests[:SHOWN]
        ],
    }


def finished(last: Sequence[Finished], now: float, ttft: float, tpot: float) -> dict[str, Any]:
    """Percentiles, attainment and goodput of finished requests, as `reference_impl.observe.metrics` defines them.

    last: the latest at the end. ttft, tpot: the objectives, in seconds. An aborted request counts with what it got.
    """
    load = WorkloadMetrics.of((request.arrival, request.metrics) for request in last)
    values = {"queue": [m.queue for m in load.requests if m.queue is not None], "ttft": load.ttft, "tpot": load.tpot,
              "itl": load.itl, "latency": load.latency}  # fmt: skip
    return {
        "objectives": {"ttft": ttft, "tpot": tpot},
        "num_finished": len(last),
        "duration": load.duration,
        "throughput": load.throughput,
        "goodput": load.goodput(ttft, tpot),
        "attainment": load.attainment(ttft, tpot) if last else None,
        "percentiles": {name: _percentiles(of) for name, of in values.items()},
        "finished": [
            {
                "id": request.id,
                "reason": request.reason,
                "prompt": request.num_prompt_tokens,
                "output": request.metrics.num_output_tokens,
                **{name: getattr(request.metrics, name) for name in ("queue", "ttft", "tpot", "latency")},
                "meets": request.metrics.meets(ttft, tpot),
                "ago": now - request.end,
            }
            for request in last[: -SHOWN_FINISHED - 1 : -1]
        ],
    }


def _percentiles(values: Sequence[float]) -> dict[str, float] | None:
    return {f"p{p}": float(v) for p, v in zip(SHARES, np.percentile(values, SHARES), strict=True)} if values else None


def timeline(engine: Engine, answer: str) -> dict[str, Any]:
    """What happened to the requests of an answer (one per prompt and sample), or to one of them, by its id; also what
    this engine computed of it for another one, or took over from one ("id.transfer", "id~move").

    Times are seconds from the request's arrival. Raises KeyError where the trace does not have it, or no longer.
    """
    trace, now, epoch = engine.trace, engine.clock.now(), epoch_of(engine.clock)
    ids = [i for i in trace.request_ids() if i == answer or i.startswith(tuple(answer + mark for mark in "-/.~"))]
    if not ids:
        raise KeyError(answer)
    return {"id": answer, "requests": [_life(life, trace, now, epoch) for life in lives_of(trace, ids)]}


def epoch_of(clock: Clock) -> float:
    """Seconds since 1970 when the engine's clock was 0. From the quickest of some pairs of readings."""
    readings = [(clock.now(), time.time(), clock.now()) for _ in range(5)]
    before, wall, after = min(readings, key=lambda reading: reading[2] - reading[0])
    return wall - (before + after) / 2


def _life(life: Life, trace: Trace, now: float, epoch: float) -> dict[str, Any]:
    life.close(now)
    arrival, m = trace.arrival(life.request_id), trace.metrics(life.request_id)

    def part(s: Slice) -> dict[str, Any]:
        return {"name": s.name, "start": s.start - arrival, "end": s.end - arrival, **s.args}

    return {
        "id": life.request_id,
        "arrived_at": epoch + arrival,  # seconds since 1970
        "finish_reason": life.finished.reason if life.finished else None,
        "finished": life.finished.time - arrival if life.finished else None,
        "prompt_tokens": life.arrived.num_prompt_tokens if life.arrived else None,  # null: that event is not kept
        "cached_tokens": life.cached_tokens,
        "output_tokens": m.num_output_tokens,
        "preemptions": life.num_preemptions,
        **{name: getattr(m, name) for name in ("queue", "ttft", "tpot", "latency", "itl")},
        "token_times": [at - arrival for at in trace.token_times(life.request_id)],
        "phases": [part(phase) for phase in life.phases],
        "steps": [part(step) for step in life.steps],
    }
