"""A cost of steps, fitted to steps measured on this machine, and the simulator with that cost beside the real engine.

The commands `calibrate` and `compare` of simulator.py. The files that are written carry a stamp (harness.py).
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import Any

import torch

from reference_impl.assembly.config import EngineConfig, course_model
from reference_impl.assembly.llm import LLM
from reference_impl.bench import harness
from reference_impl.core.decoder import Decoder
from reference_impl.simulation.calibration import fit
from reference_impl.simulation.comparison import ByStep, Step, by_step, compare, real_steps, shrunk, simulated_steps
from reference_impl.simulation.cost import COEFFICIENTS, CalibratedCost
from reference_impl.simulation.measure import Measured, Shape, measure, random_shapes
from reference_impl.simulation.workloads import WorkloadRequest, workload

MAX_ROWS, MAX_TOKENS, NUM_BLOCKS = 32, 512, 1024  # of a step that is measured
CONFIG = EngineConfig(max_num_seqs=MAX_ROWS, max_num_batched_tokens=MAX_TOKENS, num_blocks=NUM_BLOCKS)
RATE = 4.0  # requests per second
CUT = (1024, 128, 0.25)  # longest prompt, longest output, factor on outputs: what the course model does in a minute


def _shapes(decoder: Decoder, steps: int) -> list[Shape]:
    return random_shapes(steps, 0, _longest(decoder), MAX_ROWS, MAX_TOKENS, CONFIG.block_size * NUM_BLOCKS)


def _fit(decoder: Decoder, rounds: list[list[Measured]], stamp: dict[str, Any]) -> CalibratedCost:
    """The cost fitted to the least seconds of each shape. rounds: each measured the same shapes."""
    least = [Measured(same[0].shape, min(m.seconds for m in same)) for same in zip(*rounds, strict=True)]
    c = decoder.config
    bytes_per_token = 2 * c.num_layers * c.num_kv_heads * c.head_dim * decoder.dtype.itemsize
    stamp |= {"model": "course model, target", "dtype": str(decoder.dtype), "rounds": len(rounds)}
    stamp |= {"seconds": "processor seconds of one thread, the least of all rounds"}
    return fit(least, bytes_per_token, _longest(decoder), stamp)


def run_calibrate(args: argparse.Namespace) -> None:
    """Measures steps of the engine and fits a cost to them."""
    decoder, stamp = _decoder(), harness.stamp()
    shapes = _shapes(decoder, args.steps)
    cost = _fit(decoder, [measure(decoder, shapes, CONFIG, 1) for _ in range(args.rounds)], stamp)
    cost.save(args.file)
    print(json.dumps(cost.error, indent=2))


def run_compare(args: argparse.Namespace) -> None:
    """Calibrates, and runs engine and simulator side by side; in turns, so that all find the machine in one state."""
    decoder, stamp = _decoder(), harness.stamp()
    shapes = _shapes(decoder, args.steps)
    cases: dict[str, tuple[list[ByStep], EngineConfig]] = {}
    for name in args.workload:
        arrivals = by_step(_requests(name, args), seconds_per_step=0.02)
        for cache in ("hash", "off"):
            cases[f"{name}, prefix cache {cache}"] = arrivals, replace(CONFIG, prefix_cache=cache)
    measured: list[list[Measured]] = []
    runs: dict[str, list[list[Step]]] = {name: [] for name in cases}
    for turn in range(args.rounds):
        measured.append(measure(decoder, shapes, CONFIG, 1))
        for name, (arrivals, config) in cases.items():
            runs[name].append(real_steps(decoder, arrivals, config))
        print(f"round {turn + 1} of {args.rounds}", flush=True)
    cost = _fit(decoder, measured, stamp)
    result: dict[str, Any] = {"stamp": cost.stamp, "calibration_error": cost.error}
    result["coefficients"] = dict(zip(COEFFICIENTS, cost.coefficients, strict=True))
    result["load"] = (
        f"{args.num} requests of each workload, {RATE:g} per second or as recorded, cut to (prompt, output, factor on "
        f"outputs) {CUT}"
    )
    result["config"] = vars(CONFIG)
    for name, (arrivals, config) in cases.items():
        simulated = simulated_steps(arrivals, cost, config, _longest(decoder))
        result[name] = compare(simulated, runs[name])
    harness.write(args.file, result)
    print(json.dumps(result, indent=2))


def _requests(name: str, args: argparse.Namespace) -> list[WorkloadRequest]:
    """The requests of a workload at RATE; a recorded trace keeps its own rate."""
    rate = None if name.endswith(".jsonl") else RATE
    return shrunk(list(workload(name, rate=rate, num_requests=args.num)), *CUT)


def _longest(decoder: Decoder) -> int:
    return int(min(decoder.config.max_position, decoder.rotary.max_position))


def _decoder() -> Decoder:
    torch.set_num_threads(1)
    return LLM(course_model()).engine.model
