"""Requests, plans and outputs for a scheduler alone."""

from __future__ import annotations

from collections.abc import Callable

from reference_impl.core.block_pool import BlockPool
from reference_impl.core.kv_manager import KVManager
from reference_impl.core.scheduler import Scheduler, SchedulerFeature
from reference_impl.interfaces import Request, SamplingParams, StepOutput, StepPlan

END = 7  # the end token of these requests


def make_request(name: str, num_prompt: int, max_tokens: int, longest: int = 10**9) -> Request:
    return Request(
        id=name,
        tokens=[1] * num_prompt,
        num_prompt_tokens=num_prompt,
        sampling=SamplingParams(max_tokens=max_tokens),
        seed=0,
        arrival=0.0,
        stop_token_ids=frozenset({END}),
        max_total_tokens=min(num_prompt + max_tokens, longest),
    )


def output_of(plan: StepPlan, token: int = 1) -> StepOutput:
    return StepOutput({row.request_id: (token,) for row in plan.rows if row.samples}, {}, 0.0, 0.0)


def serve(
    num_blocks: int,
    block_size: int,
    seqs: int,
    budget: int,
    *requests: Request,
    feature: Callable[[Scheduler], SchedulerFeature] | None = None,
) -> Scheduler:
    scheduler = Scheduler(KVManager(BlockPool(num_blocks), block_size), seqs, budget)
    if feature is not None:
        scheduler.hooks.add(feature(scheduler))
    for request in requests:
        scheduler.add(request)
    return scheduler


def shape(plan: StepPlan) -> list[tuple[str, int, int, bool]]:
    return [(row.request_id, row.start, row.num_tokens, row.samples) for row in plan.rows]
