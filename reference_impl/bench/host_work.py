"""What the host does between two passes of the model: scheduling, without a model."""

from __future__ import annotations

import statistics
import time
from typing import Any

from reference_impl.bench import harness
from reference_impl.core.block_pool import BlockPool
from reference_impl.core.kv_manager import KVManager
from reference_impl.core.scheduler import Scheduler
from reference_impl.features.prefix.hash_index import HashIndex
from reference_impl.interfaces import Request, SamplingParams, StepOutput

STEPS, PROMPT, BLOCK_SIZE = 200, 200, 16


def scheduler_seconds(num_requests: int) -> list[float]:
    """Seconds of schedule() + update() for each step in which all requests decode."""
    pool = BlockPool(num_requests * (-(-(PROMPT + STEPS) // BLOCK_SIZE) + 1))
    scheduler = Scheduler(KVManager(pool, BLOCK_SIZE, index=HashIndex(BLOCK_SIZE)), num_requests, 10**9)
    for i in range(num_requests):
        prompt = [i, *range(PROMPT - 1)]
        params = SamplingParams(max_tokens=STEPS + 2)
        scheduler.add(Request(str(i), prompt, PROMPT, params, 0, 0.0, max_total_tokens=10**6))
    seconds = []
    for step in range(STEPS + 1):
        began = time.perf_counter()
        plan = scheduler.schedule(0.0)
        planned = time.perf_counter()
        output = StepOutput({row.request_id: (5,) for row in plan.rows}, {}, 0.0, 0.0)
        computed = time.perf_counter()
        scheduler.update(plan, output)
        if step:  # the first admits all requests
            seconds.append(time.perf_counter() - computed + planned - began)
    return seconds


def run(rounds: int) -> dict[str, Any]:
    step = {n: [statistics.median(scheduler_seconds(n)) for _ in range(rounds)] for n in (16, 256)}
    return {
        "scheduler_step_ms": {str(n): harness.spread([s * 1e3 for s in values]) for n, values in step.items()},
        "scheduler_us_per_request": {
            str(n): harness.spread([s * 1e6 / n for s in values]) for n, values in step.items()
        },
    }
