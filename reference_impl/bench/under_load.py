"""How waiting grows with the load: the engine on a simulated GPU, recorded beside what a formula of queues needs.

    inferlab bench under_load       # records again: results/under_load.json

Llama-3-8B on one H100 by formula, prompts of 1,000 tokens, outputs of 100 on average. A p99 takes thousands of
requests and a picture that follows a slider has 0.2 s: so the points are recorded, `short_run` makes one anew, and
tests/bench/test_under_load.py makes some of them again and compares.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import numpy as np

from reference_impl.assembly.config import EngineConfig
from reference_impl.bench import harness
from reference_impl.simulation import Result, simulate
from reference_impl.simulation.workloads import PAGE_TOKENS, Bursty, Poisson, WorkloadRequest
from reference_impl.simulation.workloads.distributions import Floats, bits
from reference_impl.theory.deployment import Deployment
from reference_impl.theory.hardware import device
from reference_impl.theory.model_shapes import model

RECORD = harness.RESULTS / "under_load.json"
PROMPT, OUTPUT = 1000, 100
LOADS = (0.2, 0.4, 0.6, 0.7, 0.8, 0.85, 0.9)  # of the capacity
SEEDS = 3  # runs of a point
NUM, NUM_ALONE = 3000, 6000  # requests in each; with one seat the queue forgets more slowly
STATISTICS = ("mean", "p50", "p90", "p99")

# (max_num_seqs, num_blocks); None: what fits beside the weights, 426,784 tokens.
SEATS: Mapping[str, tuple[int, int | None]] = MappingProxyType(
    {
        "1 seat": (1, None),
        "8 seats": (8, None),
        "256 seats": (256, None),
        "256 seats, cache of 16,000 tokens": (256, 1000),
    }
)
ARRIVALS: Mapping[str, float] = MappingProxyType({"Poisson": 1.0, "bursty, CV 3": 3.0})  # CV of the gaps
OUTPUTS: Mapping[str, Callable[[Floats], Floats]] = MappingProxyType(
    {
        "all of 100 tokens": lambda u: np.full(len(u), OUTPUT),
        "exponential, mean 100": lambda u: np.maximum(1, np.rint(-OUTPUT * np.log1p(-u))),
        "40 tokens, one in ten 640": lambda u: np.where(u < 0.1, 640, 40),
    }
)


@dataclass(frozen=True)
class Point:
    """A load and what it gave. rate: requests per second. wait, ttft, tpot: seconds, by statistic, each over all runs,
    and the least and the greatest of the runs. running: requests in a step, mean over the time of the steps."""

    load: float
    rate: float
    wait: dict[str, tuple[float, float, float]]
    ttft: dict[str, tuple[float, float, float]]
    tpot: dict[str, tuple[float, float, float]]
    running: float
    preempted: int


@dataclass(frozen=True)
class Line:
    """One setting. cv: of the gaps between arrivals. Measured at saturation, where all requests come at once:
    capacity, requests per second; service, mean seconds from the first step to the last token, and scv, its variance
    over its squared mean; servers: how many are served together, capacity * service (Little's law)."""

    cv: float
    capacity: float
    service: float
    scv: float
    servers: float
    points: tuple[Point, ...]


def machine() -> Deployment:
    return Deployment(model("llama-3-8b"), device("H100"), mfu=0.5, mbu=0.8)


def alone() -> dict[str, float]:
    """What `Point` measures for a request served alone, in seconds."""
    where = machine()
    return {"wait": 0.0, "ttft": where.prefill_seconds(PROMPT), "tpot": where.tpot(PROMPT + OUTPUT / 2)}


def run(seats: str, arrivals: str, outputs: str, rate: float | None, num: int, seed: int) -> Result:
    """`num` requests, `rate` per second or, with None, all at once."""
    max_num_seqs, num_blocks = SEATS[seats]
    config = EngineConfig(
        max_num_seqs=max_num_seqs, num_blocks=num_blocks, max_num_batched_tokens=1024, prefix_cache="off"
    )
    cv, lengths = ARRIVALS[arrivals], OUTPUTS[outputs](bits(seed, 1).random(num))
    process = None if rate is None else Poisson(rate=rate) if cv == 1 else Bursty(rate=rate, cv=cv)
    times = iter(lambda: 0, None) if process is None else process.microseconds(bits(seed))
    pages = tuple(range(PROMPT // PAGE_TOKENS))  # no prefix is looked up: the prefix cache is off
    requests = (
        WorkloadRequest(str(i), next(times) / 1e6, PROMPT, int(n), pages) for i, n in enumerate(lengths.tolist())
    )
    return simulate(requests, machine(), config)


@lru_cache(maxsize=64)
def short_run(seats: str, arrivals: str, outputs: str, rate: float, seed: int) -> Result:
    """A run short enough to wait for."""
    return run(seats, arrivals, outputs, rate, 100, 1000 + seed)


def statistic(values: Floats, name: str) -> float:
    """One of STATISTICS; a request of one token has no TPOT and does not count."""
    values = values[~np.isnan(values)]
    return float(values.mean() if name == "mean" else np.percentile(values, float(name[1:])))


def saturated(seats: str, arrivals: str, outputs: str, num: int) -> Line:
    """A line's figures where all requests come at once. Those that end in the middle three fifths count, when the
    engine is full."""
    r = run(seats, arrivals, outputs, None, num, SEEDS)
    order = np.argsort(r.latency)  # all came at 0
    middle = order[num // 5 : num - num // 5]
    capacity = (len(middle) - 1) / float(r.latency[middle[-1]] - r.latency[middle[0]])
    served = (r.latency - r.queue)[middle]
    mean, variance = float(served.mean()), float(served.var())
    return Line(ARRIVALS[arrivals], capacity, mean, variance / mean**2, capacity * mean, ())


def point(seats: str, arrivals: str, outputs: str, load: float, capacity: float) -> Point:
    num = NUM_ALONE if SEATS[seats][0] == 1 else NUM
    runs = [run(seats, arrivals, outputs, load * capacity, num, seed) for seed in range(SEEDS)]
    measured = {name: _ranges(runs, of) for name, of in (("wait", "queue"), ("ttft", "ttft"), ("tpot", "tpot"))}
    together = Result.fold(runs)
    running = together.running_seconds / together.busy_seconds
    return Point(load, load * capacity, **measured, running=running, preempted=together.preemptions)


def _ranges(runs: list[Result], of: str) -> dict[str, tuple[float, float, float]]:
    found = {}
    for name in STATISTICS:
        each = [statistic(getattr(r, of), name) for r in runs]
        found[name] = (statistic(np.concatenate([getattr(r, of) for r in runs]), name), min(each), max(each))
    return found


def line(seats: str, arrivals: str, outputs: str) -> Line:
    full = saturated(seats, arrivals, outputs, 20_000 if SEATS[seats][0] == 1 else 4000)
    points = tuple(point(seats, arrivals, outputs, load, full.capacity) for load in LOADS)
    return replace(full, points=points)


@lru_cache(maxsize=1)
def recorded() -> dict[tuple[str, str, str], Line]:
    """The recorded lines by (seats, arrivals, outputs)."""
    raw = json.loads(RECORD.read_text("utf-8"))
    return {
        tuple(name.split(" | ")): Line(**(found | {"points": tuple(Point(**p) for p in found["points"])}))
        for name, found in raw["lines"].items()
    }


def main(arguments: Sequence[str] | None = None) -> int:
    argparse.ArgumentParser(prog="inferlab bench under_load", description=__doc__).parse_args(arguments)
    stamp: dict[str, Any] = harness.stamp()
    settings, lines = tuple(itertools.product(SEATS, ARRIVALS, OUTPUTS)), {}
    with ProcessPoolExecutor() as pool:  # half an hour on one core
        for names, found in zip(settings, pool.map(line, *zip(*settings, strict=True)), strict=True):
            name = " | ".join(names)
            lines[name] = _rounded(asdict(found))
            print(name, flush=True)
    save(stamp, lines)
    print(f"wrote {RECORD}")
    return 0


def save(stamp: dict[str, Any], lines: dict[str, Any]) -> None:
    """Writes the record, a setting on each line of the file."""
    rows = ",\n".join(f"{json.dumps(name)}: {json.dumps(found)}" for name, found in lines.items())
    RECORD.write_text(f'{{"stamp": {json.dumps(stamp)},\n"lines": {{\n{rows}\n}}}}\n')


def _rounded(value: Any) -> Any:
    """The value with six significant digits: what is plotted, and not what one processor rounds otherwise than
    another."""
    if isinstance(value, dict):
        return {name: _rounded(v) for name, v in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(v) for v in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value
