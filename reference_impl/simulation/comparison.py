"""The simulator beside the real engine: the same requests, arriving before the same steps.

If arrivals were given in seconds, one step that took longer than predicted would change the next batch, and two runs of
the real engine would not agree with each other. With arrivals given by step, both engines must make the same plans, row
by row, and only the seconds of each step are left to compare.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from reference_impl.assembly.config import EngineConfig
from reference_impl.assembly.engine import Engine
from reference_impl.assembly.parts import Parts
from reference_impl.core.decoder import Decoder
from reference_impl.interfaces import Row, SamplingParams
from reference_impl.simulation.calibration import relative_error
from reference_impl.simulation.executor import SimulatedGPU, StepCost, hollow_model
from reference_impl.simulation.measure import now, one_thread
from reference_impl.simulation.prompts import VOCAB_SIZE, Prompts
from reference_impl.simulation.workloads import PAGE_TOKENS, WorkloadRequest, tokens_of

FIRST_WORD = 3  # of the course tokenizer; the ids below are special


@dataclass(frozen=True)
class ByStep:
    """A request that arrives before the step with this number, from 0. Steps in which nothing is computed do not
    count: if no request is present, the next arrival comes at once."""

    step: int
    request: WorkloadRequest


@dataclass(frozen=True)
class Step:
    """A step of a run. rows, admitted, preempted: its plan. seconds: of this step alone."""

    rows: tuple[Row, ...]
    admitted: tuple[tuple[str, int], ...]
    preempted: tuple[str, ...]
    seconds: float


def by_step(requests: Iterable[WorkloadRequest], seconds_per_step: float) -> list[ByStep]:
    """The arrivals of a stream as step numbers, for steps of this length."""
    return [ByStep(int(request.arrival / seconds_per_step), request) for request in requests]


def shrunk(
    requests: Iterable[WorkloadRequest], longest_prompt: int, longest_output: int, outputs: float = 1.0
) -> list[WorkloadRequest]:
    """The requests, cut to what a small model holds. Longer prompts lose their ends and share their starts.

    outputs: a factor on the lengths of outputs before they are cut.
    """
    found = []
    for request in requests:
        prompt = min(request.num_prompt_tokens, longest_prompt)
        output = min(max(1, round(outputs * request.num_output_tokens)), longest_output)
        pages = request.pages[: prompt // PAGE_TOKENS]
        found.append(replace(request, num_prompt_tokens=prompt, num_output_tokens=output, pages=pages))
    return found


def serve(engine: Engine, arrivals: Sequence[ByStep], tokens: Any, on_clock: bool) -> list[Step]:
    """Serves the arrivals to the end and returns the steps. tokens: makes the prompt of a request. on_clock: seconds
    are the engine's own (its clock is virtual); otherwise those that `Engine.step` takes.

    A request that follows another arrives before the first step after that one's last; pauses take no steps.
    """
    coming = [(a.step, i, a.request) for i, a in enumerate(arrivals) if a.request.after is None]
    followers: dict[str, list[WorkloadRequest]] = {}
    for a in arrivals:
        if a.request.after is not None:
            followers.setdefault(a.request.after, []).append(a.request)
    heapq.heapify(coming)
    steps: list[Step] = []
    number, count = 0, len(arrivals)
    while coming or engine.has_work():
        if not engine.has_work():
            number = max(number, coming[0][0])
        while coming and coming[0][0] <= number:
            request = heapq.heappop(coming)[2]
            params = SamplingParams(max_tokens=request.num_output_tokens, temperature=0, ignore_eos=True, seed=0)
            engine.add(tokens(request), params, request.id, tenant=request.tenant)
        began = engine.clock.now() if on_clock else now()
        finished = engine.step().finished
        seconds = (engine.clock.now() if on_clock else now()) - began
        done = engine.trace.steps()[-1]
        engine.trace.events.clear()
        steps.append(Step(done.rows, done.admitted, done.preempted, seconds))
        number += 1
        for ended in finished:
            for request in followers.pop(ended.id, ()):
                heapq.heappush(coming, (number, count, request))
                count += 1
    return steps


def simulated_steps(arrivals: Sequence[ByStep], cost: StepCost, config: EngineConfig, longest: int) -> list[Step]:
    """The steps of the simulator. longest: positions of the model that the cost replaces."""
    gpu, nothing = SimulatedGPU(cost, block_size=config.block_size), object()
    parts = Parts(executor=gpu, clock=gpu, kv_cache=nothing, attention=nothing)  # type: ignore[arg-type]
    engine = Engine(hollow_model(VOCAB_SIZE, longest, cost.bytes_per_token), config, parts)
    return serve(engine, arrivals, Prompts().tokens, on_clock=True)


def real_steps(model: Decoder, arrivals: Sequence[ByStep], config: EngineConfig) -> list[Step]:
    """The steps of the real engine. Raises RuntimeError where torch has several threads (see measure.py)."""
    one_thread()

    def tokens(request: WorkloadRequest) -> list[int]:
        return tokens_of(request, model.config.vocab_size, FIRST_WORD)

    return serve(Engine(model, config), arrivals, tokens, on_clock=False)


def same_plans(a: Sequence[Step], b: Sequence[Step]) -> int | None:
    """The first step in which two runs differ; None if they are the same, step by step and row by row."""
    for number, (x, y) in enumerate(zip(a, b, strict=False)):
        if (x.rows, x.admitted, x.preempted) != (y.rows, y.admitted, y.preempted):
            return number
    return None if len(a) == len(b) else min(len(a), len(b))


def compare(simulated: Sequence[Step], runs: Sequence[Sequence[Step]]) -> dict[str, Any]:
    """One simulated run beside several real ones of the same arrivals. Raises RuntimeError if their plans differ.

    For each step, the shortest of its runs is compared with the prediction: the same step, with the least disturbance.
    """
    for number, run in enumerate(runs):
        if (step := same_plans(simulated, run)) is not None:
            raise RuntimeError(f"in run {number} the plans of engine and simulator differ from step {step} on")
    measured = np.min([[step.seconds for step in run] for run in runs], axis=0)
    predicted = np.array([step.seconds for step in simulated])
    decodes = np.array([all(row.num_tokens == 1 for row in step.rows) for step in simulated])
    found: dict[str, Any] = {
        "requests": len({row.request_id for step in simulated for row in step.rows}),
        "steps": {"simulated": len(simulated), "real": len(runs[0])},
        "rows": sum(len(step.rows) for step in simulated),
        "cached_tokens": sum(cached for step in simulated for _, cached in step.admitted),
        "preemptions": sum(len(step.preempted) for step in simulated),
        "seconds": {"simulated": float(predicted.sum()), "real": float(measured.sum())},
        "error_of_a_step": relative_error(predicted, measured),
    }
    if len(runs) > 1:  # the error below which no prediction can fall
        found["two_runs_of_the_real_engine"] = relative_error(*(np.array([s.seconds for s in run]) for run in runs[:2]))
    if decodes.any():
        found["error_of_a_step_of_decodes"] = relative_error(predicted[decodes], measured[decodes])
    if not decodes.all():
        found["error_of_a_step_with_chunks"] = relative_error(predicted[~decodes], measured[~decodes])
    return found
