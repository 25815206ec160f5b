"""How every claim of speed is measured here: the same work, in one run, interleaved, as ratios, with a stamp."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
TEXTS = Path(__file__).resolve().parent / "texts"


def interleave(candidates: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each candidate in each round. One round runs all of them, so noise hits all alike.

    The first round warms up and is discarded; the order rotates from round to round.
    """
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    names = list(candidates)
    for turn in range(rounds + 1):
        for name in rotated(names, turn):
            began = time.perf_counter()
            candidates[name]()
            if turn:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def rotated(names: list[str], turn: int) -> list[str]:
    """The names in the order of a round: none always comes after the same other at the same place."""
    return names[turn % len(names) :] + names[: turn % len(names)]


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "runs": len(values)}


def ratio(slower: list[float], faster: list[float]) -> dict[str, float]:
    """How many times faster, round by round."""
    return spread([a / b for a, b in zip(slower, faster, strict=True)])


def times(found: dict[str, float], digits: int = 2) -> str:
    """A ratio as text: its median, and in brackets its range."""
    return f"{found['median']:.{digits}f}x ({found['min']:.{digits}f}-{found['max']:.{digits}f})"


def cells(found: dict[str, float], digits: int = 2, unit: str = "x") -> str:
    """Median and range as two cells of a row of Markdown."""
    return f"{found['median']:.{digits}f}{unit} | {found['min']:.{digits}f}-{found['max']:.{digits}f}"


def stamp() -> dict[str, Any]:
    """Where and when it was measured: without them a figure means nothing."""
    import torch

    versions = {}
    for package in ("torch", "triton", "transformers", "numpy", "tokenizers"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "absent"
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _commit(),
        "cpu": _cpu_name(),
        "instructions": _instructions(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average_before": round(os.getloadavg()[0], 2),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "versions": versions,
    }


def _instructions() -> str:
    """What decides the speed of products on a CPU: the widest vectors that torch uses, and native products of bf16."""
    import torch

    found = [torch.backends.cpu.get_cpu_capability()]
    found += ["AVX512-BF16"] * torch.cpu._is_avx512_bf16_supported() + ["AMX"] * torch.cpu._is_amx_tile_supported()
    return ", ".join(found)


def gpu_state() -> dict[str, Any]:
    """Driver, clocks, power and memory as nvidia-smi reports them; {} where there is none."""
    names = (
        "driver_version",
        "clocks.sm",
        "clocks.mem",
        "clocks.max.sm",
        "power.draw",
        "temperature.gpu",
        "memory.total",
    )
    ask = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader", "--id=0"]
    try:
        said = subprocess.run(ask, capture_output=True, text=True, check=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    found = dict(zip(names, (value.strip() for value in said.strip().split(",")), strict=False))
    return {"driver": found.pop("driver_version", "unknown"), "gpu_state": found}


def positive(given: str) -> int:
    """A number of rounds, from its text on a command line."""
    if not given.isdigit() or int(given) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of 1 or more, got {given!r}")
    return int(given)


def in_rounds(
    name: str,
    rounds: int,
    run: Callable[[int], dict[str, Any]],
    shown: Callable[[dict[str, Any]], list[str]],
    arguments: Sequence[str] | None,
) -> int:
    """The command of a bench that is `run(rounds)`, which gives its result. shown: its lines for a terminal. Returns
    the exit status, 1 where nothing was measured."""
    parser = argparse.ArgumentParser(prog=f"inferlab bench {name}")
    parser.add_argument("--rounds", type=positive, default=rounds, help=f"interleaved runs of each candidate: {rounds}")
    parser.add_argument("--save", action="store_true", help=f"write reference_impl/bench/results/{name}.json")
    options = parser.parse_args(arguments)
    result = run(options.rounds)
    if why := result.get("not_measured"):
        print(f"{name}: not measured: {why}")
        return 1
    print("\n".join(shown(result)))
    if options.save:
        print(f"wrote {save(name, result)}")
    return 0


def recorded(name: str, results: Path | None = None) -> dict[str, Any]:
    """The recorded result; {} where nothing is recorded. results: the folder; None: RESULTS."""
    file = (results or RESULTS) / f"{name}.json"
    found: dict[str, Any] = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    return found


def save(name: str, result: dict[str, Any]) -> Path:
    RESULTS.mkdir(exist_ok=True)
    return write(RESULTS / f"{name}.json", result)


def write(file: Path, result: dict[str, Any]) -> Path:
    """Writes the result as a whole or not at all: a process killed while writing leaves the old file."""
    part = file.with_suffix(".part")
    part.write_text(json.dumps(result, indent=2) + "\n")
    part.replace(file)
    return file


def _commit() -> str:
    """The commit of the sources. INFERLAB_COMMIT names it for a copy without git's own files."""
    here = Path(__file__).parent
    try:
        head = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True, check=True
        )
        dirty = subprocess.run(
            ["git", "status", "--porcelain", "-uno"], cwd=here, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("INFERLAB_COMMIT", "unknown")
    return head.stdout.strip() + (" with local changes" if dirty.stdout.strip() else "")


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
