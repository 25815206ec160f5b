"""A load on a GPU we do not have: the real engine over a simulated executor and clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from reference_impl.assembly.config import EngineConfig
from reference_impl.assembly.engine import Engine
from reference_impl.assembly.kv import kv_manager
from reference_impl.assembly.parts import Parts
from reference_impl.core.block_pool import BlockPool
from reference_impl.interfaces import KVManager, Policy, SamplingParams, Scheduler, WaitsOnPurpose
from reference_impl.observe.trace import Trace
from reference_impl.simulation.cost import Roofline
from reference_impl.simulation.executor import END, SimulatedGPU, weightless
from reference_impl.theory.deployment import Deployment


@dataclass(frozen=True)
class Arrival:
    """A request of a load. output: tokens it will write, as it turns out; max_tokens: what it may write."""

    second: float
    prompt: int
    output: int
    max_tokens: int | None = None  # None: the output's length is known
    name: str | None = None
    priority: int = 0
    tenant: str = ""
    deadline: float | None = None


def simulate(
    deployment: Deployment,
    arrivals: Iterable[Arrival],
    config: EngineConfig | None = None,
    policy: Policy | None = None,
    scheduler: Callable[[KVManager], Scheduler] | None = None,
    host_seconds: float = 0.0,
) -> Trace:
    """Serves the arrivals to the end. config.num_blocks None: what fits beside the weights at 0.9 of the memory.

    scheduler: builds another scheduler over the KV manager it is given. The prefix cache is off.
    """
    config = config or EngineConfig()
    fields: dict[str, Any] = vars(config) | {"prefix_cache": "off"}
    fields["num_blocks"] = config.num_blocks or deployment.cache_tokens() // config.block_size
    lengths: dict[str, int] = {}
    gpu = SimulatedGPU(Roofline(deployment), lengths, host_seconds, block_size=config.block_size)
    parts = Parts(policy=policy, executor=gpu, clock=gpu, kv_cache=object())  # type: ignore[arg-type]
    if scheduler is not None:
        parts.block_pool = BlockPool(fields["num_blocks"])
        parts.kv_manager = kv_manager(parts.block_pool, config.block_size)
        parts.scheduler = scheduler(parts.kv_manager)
    engine = Engine(weightless(deployment), EngineConfig(**fields), parts)
    coming = deque(sorted(arrivals, key=lambda a: a.second))
    while coming or engine.has_work():
        if not engine.has_work():
            gpu.time = max(gpu.time, coming[0].second)
        while coming and coming[0].second <= gpu.time:
            _add(engine, gpu, coming.popleft(), lengths)
        before = gpu.time
        engine.step()
        if gpu.time == before:  # a scheduler that waits for more requests
            gpu.time = _next_event(engine, coming, before)
    return engine.trace


def _add(engine: Engine, gpu: SimulatedGPU, a: Arrival, lengths: dict[str, int]) -> None:
    """Gives the engine a request with its own time of arrival, not the time at which the loop looks again."""
    gpu.time, now = a.second, gpu.time
    stop = () if a.max_tokens is None else (END,)
    sampling = SamplingParams(max_tokens=a.max_tokens or a.output, ignore_eos=True, stop_token_ids=stop)
    request = engine.add(
        [1] * a.prompt, sampling, a.name, priority=a.priority, tenant=a.tenant, deadline=a.deadline
    )  # fmt: skip
    if a.max_tokens is not None:
        lengths[request.id] = a.output
    gpu.time = now


def _next_event(engine: Engine, coming: Sequence[Arrival], now: float) -> float:
    times = [a.second for a in list(coming)[:1]]
    closes = engine.scheduler.next_event(now) if isinstance(engine.scheduler, WaitsOnPurpose) else None
    times += [closes] if closes is not None else []
    if not times:
        raise RuntimeError(
            "the scheduler planned nothing, no request is to come, and it does not say what it waits for"
        )
    return max(now, min(times))


def poisson(
    rate: float,
    seconds: float,
    seed: int,
    prompts: Sequence[int] = (1000,),
    shares: Sequence[float] = (1.0,),
    mean_output: float = 200,
    max_tokens: int | None = None,
) -> list[Arrival]:
    """Arrivals at random, `rate` per second; prompts drawn by share; outputs exponential with this mean, at least 1."""
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(1 / rate, int(rate * seconds)))
    outputs = np.maximum(1, np.rint(rng.exponential(mean_output, len(times)))).astype(int)
    outputs = outputs if max_tokens is None else np.minimum(outputs, max_tokens)
    drawn = rng.choice(prompts, len(times), p=shares)
    return [
        Arrival(float(t), int(p), int(n), max_tokens) for t, p, n in zip(times, drawn, outputs, strict=True)
    ]  # fmt: skip
