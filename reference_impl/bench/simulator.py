"""`inferlab bench simulator calibrate | compare | fleet`, on the course model and this machine.

The files that are written carry a stamp (harness.py): machine, versions, load.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from reference_impl.assembly.config import EngineConfig
from reference_impl.bench import harness
from reference_impl.simulation.ledger import Result
from reference_impl.simulation.replicas import simulate_replicas
from reference_impl.simulation.routers import ROUTERS
from reference_impl.simulation.workloads import workload
from reference_impl.theory.deployment import Deployment
from reference_impl.theory.hardware import device
from reference_impl.theory.model_shapes import model as model_shape


def _calibrate(args: argparse.Namespace) -> None:
    """Measures steps of the engine and fits a cost to them."""
    from reference_impl.bench.calibration import run_calibrate

    run_calibrate(args)


def _compare(args: argparse.Namespace) -> None:
    """Calibrates, and runs engine and simulator side by side."""
    from reference_impl.bench.calibration import run_compare

    run_compare(args)


def _fleet(args: argparse.Namespace) -> None:
    """How fast and how large a simulation is."""
    cost = Deployment(model_shape("llama-3-8b"), device("H100"), mfu=0.5, mbu=0.8)
    load_before = round(os.getloadavg()[0], 2)
    began = time.perf_counter()
    stream = workload(args.workload, rate=args.rate * args.replicas, num_requests=args.num)
    config = EngineConfig(max_num_seqs=256, num_blocks=args.blocks)
    result = Result.fold(simulate_replicas(stream, args.replicas, cost, args.router, config))
    percentiles = result.percentiles()
    seconds, own = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
    found = {
        "stamp": harness.stamp() | {"load_average_before": load_before},  # only now: it imports torch
        "load": {k: getattr(args, k) for k in ("workload", "num", "rate", "replicas", "blocks", "router")},
        "on": "llama-3-8b on one H100 each, mfu 0.5, mbu 0.8, prefix cache hash",
        "seconds": seconds,
        "processor_seconds": own.ru_utime + own.ru_stime,
        "peak_memory_bytes": own.ru_maxrss * _MAXRSS,
        "simulated": {
            "seconds": result.duration, "steps": result.num_steps,
            "rows_per_step": result.request_steps / result.num_steps,
            "requests": result.num_requests, "refused": result.refused, "output_tokens": result.num_output_tokens,
            "prompt_tokens": result.prompt_tokens, "hit_rate": result.hit_rate, "preemptions": result.preemptions,
            "percentiles_50_90_99": percentiles,
        },
    }  # fmt: skip
    print(json.dumps(found, indent=2))
    if args.file is not None:
        harness.write(args.file, found)


_MAXRSS = 1 if sys.platform == "darwin" else 1024  # bytes


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="inferlab bench simulator", description=__doc__)
    commands = parser.add_subparsers(required=True)
    for name, run in (("calibrate", _calibrate), ("compare", _compare)):
        command = commands.add_parser(name, help=run.__doc__)
        command.set_defaults(run=run)
        command.add_argument("--steps", type=int, default=120, help="batches to measure")
        command.add_argument("--rounds", type=int, default=3)
        command.add_argument("--file", type=Path, default=harness.RESULTS / f"simulation_{name}.json")
    command.add_argument("--workload", nargs="+", default=["chat", "agents"], help="names, or .yaml or .jsonl files")
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
    fleet.add_argument("--router", choices=sorted(ROUTERS), default="round_robin")
    fleet.add_argument("--file", type=Path, help="where to write the result; it is printed in any case")
    args = parser.parse_args(arguments)
    args.run(args)
    return 0
