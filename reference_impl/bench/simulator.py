"""`python -m reference_impl.bench.simulator calibrate | compare | fleet`, on the course model and this machine.

The files that are written carry a stamp (harness.py): machine, versions, load.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from reference_impl.bench import harness
from reference_impl.config import EngineConfig, course_model
from reference_impl.llm import LLM
from reference_impl.models.decoder import Decoder
from reference_impl.simulation.calibration import fit
from reference_impl.simulation.comparison import ByStep, Step, by_step, compare, real_steps, shrunk, simulated_steps
from reference_impl.simulation.cost import COEFFICIENTS, CalibratedCost
from reference_impl.simulation.ledger import Result
from reference_impl.simulation.measure import Measured, Shape, measure, random_shapes
from reference_impl.simulation.replicas import ROUTERS, simulate_replicas
from reference_impl.theory.deployment import Deployment
from reference_impl.theory.hardware import device
from reference_impl.theory.model_shapes import model as model_shape
from reference_impl.workloads import workload

MAX_ROWS, MAX_TOKENS, NUM_BLOCKS = 32, 512, 1024  # of a step that is measured
CONFIG = EngineConfig(max_num_seqs=MAX_ROWS, max_num_batched_tokens=MAX_TOKENS, num_blocks=NUM_BLOCKS)
CUT = (1024, 128, 0.25)  # longest prompt, longest output, factor on outputs: what the course model does in a minute


def _shapes(decoder: Decoder, steps: int) -> list[Shape]:
    return random_shapes(steps, 0, _longest(decoder), MAX_ROWS, MAX_TOKENS, CONFIG.block_size * NUM_BLOCKS)


def _fit(decoder: Decoder, rounds: list[list[Measured]], stamp: dict[str, Any]) -> CalibratedCost:
    """rounds: of each the same shapes."""
    least = [Measured(same[0].shape, min(m.seconds for m in same)) for same in zip(*rounds, strict=True)]
    c = decoder.config
    bytes_per_token = 2 * c.num_layers * c.num_kv_heads * c.head_dim * decoder.dtype.itemsize
    stamp |= {"model": "course model, target", "dtype": str(decoder.dtype), "rounds": len(rounds)}
    stamp |= {"seconds": "processor seconds of one thread, the least of all rounds"}
    return fit(least, bytes_per_token, _longest(decoder), stamp)


def _calibrate(args: argparse.Namespace) -> None:
    """Measures steps of the engine and fits a cost to them."""
    decoder, stamp = _decoder(), harness.stamp()
    shapes = _shapes(decoder, args.steps)
    cost = _fit(decoder, [measure(decoder, shapes, CONFIG, 1) for _ in range(args.rounds)], stamp)
    cost.save(args.file)
    print(json.dumps(cost.error, indent=2))


def _compare(args: argparse.Namespace) -> None:
    """Calibrates, and runs engine and simulator side by side; by turns, so that all see the machine in one state."""
    decoder, stamp = _decoder(), harness.stamp()
    shapes = _shapes(decoder, args.steps)
    cases: dict[str, tuple[list[ByStep], EngineConfig]] = {}
    for name in args.workload:
        requests = shrunk(workload(name, rate=4.0, num_requests=args.num), *CUT)
        for cache in ("hash", "off"):
            arrivals = by_step(requests, seconds_per_step=0.02)
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
    result["load"] = f"4 requests/s, {args.num} of each workload, cut to (prompt, output, factor on outputs) {CUT}"
    for name, (arrivals, config) in cases.items():
        simulated = simulated_steps(arrivals, cost, config, _longest(decoder))
        result[name] = compare(simulated, runs[name])
    args.file.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


def _fleet(args: argparse.Namespace) -> None:
    """How fast and how large a simulation is."""
    cost = Deployment(model_shape("llama-3-8b"), device("H100"), mfu=0.5, mbu=0.8)
    stamp = harness.stamp()
    began = time.perf_counter()
    stream = workload(args.workload, rate=args.rate * args.replicas, num_requests=args.num)
    config = EngineConfig(max_num_seqs=256, num_blocks=args.blocks)
    result = Result.fold(simulate_replicas(stream, args.replicas, cost, args.processes, args.router, config))
    seconds = time.perf_counter() - began
    own, others = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    found = {
        "stamp": stamp,
        "load": {k: getattr(args, k) for k in ("workload", "num", "rate", "replicas", "blocks", "router", "processes")},
        "on": "llama-3-8b on one H100 each, mfu 0.5, mbu 0.8, prefix cache hash",
        "seconds": seconds,
        "processor_seconds": own.ru_utime + own.ru_stime + others.ru_utime + others.ru_stime,
        "largest_process_bytes": {"router": own.ru_maxrss * _MAXRSS, "worker": others.ru_maxrss * _MAXRSS},
        "simulated": {
            "seconds": result.duration, "steps": result.num_steps,
            "rows_per_step": result.request_steps / result.num_steps,
            "requests": result.num_requests, "refused": result.refused, "output_tokens": result.num_output_tokens,
            "prompt_tokens": result.prompt_tokens, "hit_rate": result.hit_rate, "preemptions": result.preemptions,
            "percentiles_50_90_99": result.percentiles(),
        },
    }  # fmt: skip
    print(json.dumps(found, indent=2))
    if args.file is not None:
        args.file.write_text(json.dumps(found, indent=2) + "\n")


_MAXRSS = 1 if sys.platform == "darwin" else 1024  # bytes


def _longest(decoder: Decoder) -> int:
    return int(min(decoder.config.max_position, decoder.rotary.cos.shape[0]))


def _decoder() -> Decoder:
    torch.set_num_threads(1)
    return LLM(course_model()).engine.model


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m reference_impl.bench.simulator", description=__doc__)
    commands = parser.add_subparsers(required=True)
    for name, run in (("calibrate", _calibrate), ("compare", _compare)):
        command = commands.add_parser(name, help=run.__doc__)
        command.set_defaults(run=run)
        command.add_argument("--steps", type=int, default=120, help="batches to measure")
        command.add_argument("--rounds", type=int, default=3)
        command.add_argument("--file", type=Path, default=harness.RESULTS / f"simulation_{name}.json")
    command.add_argument("--workload", nargs="+", default=["chat", "agents"])
    command.add_argument("--num", type=int, default=10, help="requests of each workload")
    fleet = commands.add_parser("fleet", help=_fleet.__doc__)
    fleet.set_defaults(run=_fleet)
    fleet.add_argument("--workload", default="chat")
    fleet.add_argument("--num", type=int, default=100_000, help="requests")
    fleet.add_argument("--rate", type=float, default=4.0, help="requests per second and replica")
    fleet.add_argument("--replicas", type=int, default=100)
    fleet.add_argument(
        "--blocks", type=int, help="of 16 tokens, of each cache; what fits beside the weights if left out"
    )
    fleet.add_argument("--processes", type=int, default=2)
    fleet.add_argument("--router", choices=sorted(ROUTERS), default="round_robin")
    fleet.add_argument("--file", type=Path, help="where to write the result; it is printed in any case")
    args = parser.parse_args(arguments)
    args.run(args)


if __name__ == "__main__":
    main()
