"""The engines of a server: one, a fleet of equals, or some that compute prompts for others; each in its process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from reference_impl.serving.disaggregated import Disaggregated
from reference_impl.serving.fleet import Fleet
from reference_impl.serving.joining import PeersPort
from reference_impl.serving.peers import load_peer
from reference_impl.serving.runner import EngineHost, Prompts
from reference_impl.serving.supervision import Restarts, SupervisedEngine
from reference_impl.serving.worker import load
from reference_impl.simulation.routers import ROUTERS

SILENCE_SECONDS = 30.0  # of an engine among several roles, or less by step_seconds


def make_engines(
    model: Path,
    prompts: Prompts,
    *,
    dtype: str | None = None,
    restarts: Restarts | None = None,
    data_parallel_size: int = 1,
    prefill: int = 0,
    decode: int = 0,
    peers_port: PeersPort | None = None,
    router: str = "prefix",
    **options: Any,
) -> EngineHost:
    """Engines that are ready. Raises ValueError or OSError where model or options are wrong.

    restarts: of each process, see `Restarts` for the default. data_parallel_size: engines that share the requests;
    prefill, decode: engines that compute prompts and engines that answer, see `Disaggregated`; peers_port: where others
    join them; router: how they share the requests, see `Fleet`. Other options: those of EngineConfig.
    """
    _check(data_parallel_size, prefill, decode, peers_port, router)
    count = data_parallel_size * (prefill + decode or 1)
    make = partial(load, model, dtype, count, **options)
    if prefill:
        over_tcp = None if peers_port is None else (peers_port.host, peers_port.key)
        make = partial(load_peer, model, dtype, count, over_tcp, **options)
    engines = _started(partial(SupervisedEngine, make, prompts, restarts or Restarts()), count)
    if prefill:
        seconds = min(SILENCE_SECONDS, float(options.get("step_seconds", SILENCE_SECONDS)))
        return Disaggregated(engines, prefill, router, seconds=seconds, peers_port=peers_port)
    return engines[0] if count == 1 else Fleet(engines, router)


def _check(data_parallel_size: int, prefill: int, decode: int, peers_port: PeersPort | None, router: str) -> None:
    if router not in ROUTERS:
        raise ValueError(f"router: expected one of {', '.join(ROUTERS)}, got {router!r}")
    if bool(prefill) != bool(decode):
        raise ValueError(f"prefill, decode: expected at least one engine of each or none, got {prefill} and {decode}")
    if peers_port is not None and not prefill:
        raise ValueError("engines can join where there are some of each role: give prefill and decode, too")
    if prefill and data_parallel_size > 1:
        raise ValueError(
            f"data_parallel_size {data_parallel_size} beside prefill {prefill} and decode {decode}: these are engines "
            "of their own already; leave data_parallel_size out"
        )


def _started(start: Callable[[], SupervisedEngine], count: int) -> list[SupervisedEngine]:
    """So many engines. Raises what the first of them raises that does not start."""
    if count == 1:
        return [start()]
    with ThreadPoolExecutor(count) as pool:
        starting = [pool.submit(start) for _ in range(count)]
    errors = [error for each in starting if (error := each.exception()) is not None]
    if errors:
        for each in starting:
            if each.exception() is None:
                asyncio.run(each.result().end(0))
        raise errors[0]
    return [each.result() for each in starting]
