"""What the engine is doing, for the page that a learner can watch while a chapter runs."""

from __future__ import annotations

from typing import Any

from reference_impl.engine import Engine
from reference_impl.trace import StepDone

SECONDS = 10.0  # over which rates are taken
SHOWN = 200  # requests


def snapshot(engine: Engine, model: str, uptime: float, hit_rate: float) -> dict[str, Any]:
    """Read beside the engine's thread: each number is right, together they may be a step apart."""
    now, requests, events = engine.clock.now(), list(engine.requests.values()), engine.trace.events[-5000:]
    steps = [event for event in events if isinstance(event, StepDone) and event.finished_at > now - SECONDS]
    return {
        "model": model,
        "uptime": uptime,
        "running": engine.scheduler.num_running,
        "waiting": engine.scheduler.num_waiting,
        "blocks": engine.num_blocks,
        "blocks_available": engine.kv.num_available,
        "block_size": engine.config.block_size,
        "hit_rate": hit_rate,
        "tokens_per_second": sum(row.samples for step in steps for row in step.rows) / SECONDS,
        "steps_per_second": len(steps) / SECONDS,
        "tokens_per_step": sum(r.num_tokens for s in steps for r in s.rows) / len(steps) if steps else 0.0,
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
