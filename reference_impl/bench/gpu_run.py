"""Runs the cases of the GPU bench, one after another, and writes what is known after every line.

It runs in a separate process (`gpu.py` starts it), because a case can leave the GPU in a state in which nothing works
any more, or a kernel may never end. Then the next process continues after that case.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from reference_impl.bench import gpu_rows, harness, kernels
from reference_impl.bench.gpu_cases import Case, with_goal
from reference_impl.bench.gpu_engines import Bench, OutOfTime
from reference_impl.bench.gpu_rows import Row
from reference_impl.bench.kernel_work import Place

LIMIT_ROWS = ("copy bandwidth", "matrix products, 16 bits", "matrix products, FP8", "launch gap in a graph")
GRAPH_KERNELS = 1000
PATIENCE = 3  # a case is stopped after this many times its expected seconds
BEYOND = 20.0  # seconds for which a case may run on past the deadline
GRACE = 15.0  # seconds after which a process that does not stop is killed


class LostGPU(Exception):
    """Nothing works on the GPU any more in this process."""


def begin(tiny: bool) -> dict[str, Any]:
    """A result without lines. begun: cases, and until when each may take, on time.monotonic (None: over); ended: how a
    process was lost in a case."""
    return {
        "stamp": harness.stamp() | harness.gpu_state(), "dry_run": tiny, "complete": False, "rows": [], "limits": {},
        "configurations": {}, "seconds": {}, "begun": {}, "ended": {},
    }  # fmt: skip


def run(bench: Bench, cases: Sequence[Case], out: Path | None, result: dict[str, Any] | None = None) -> dict[str, Any]:
    """Every case in its turn; the rows in the order of the cases, each measured, failed or left out.

    result: of the process before, lost in a case. LostGPU where another process has to continue.
    """
    result, parent = begin(bench.tiny) if result is None else result, os.getppid()
    bench.configurations = result["configurations"]
    bench.know(result["limits"])

    def add(row: Row) -> None:
        row = with_goal(row)
        result["rows"].append(row.to_json())
        print("  ".join(gpu_rows.cells(row)), flush=True)
        write()
        if os.getppid() != parent:
            raise SystemExit("the process that started this one is gone")

    def write() -> None:
        if out is not None:
            harness.write(out, result)

    for case in [Case("limits", LIMIT_ROWS, 12, limits), *cases]:
        known = {row["metric"] for row in result["rows"]}
        missing = [metric for metric in case.rows if metric not in known]
        if not missing:
            continue
        started, lost = time.monotonic(), False
        if case.name in result["begun"]:
            problem = result["ended"].get(case.name, "the process that measured it ended")
        else:
            allowed = bench.pick(max(1.0, min(PATIENCE * case.seconds, bench.left + BEYOND)), 300)
            result["begun"][case.name] = started + allowed + GRACE
            write()
            problem = _measure(bench, case, allowed, missing, add)
            bench.record()
            result["limits"] = bench.raw_limits
            result["seconds"][case.name] = time.monotonic() - started
            # A failed case may hold an engine in any state.
            lost = not _released(bench, everything=bool(missing))
        for metric in missing:
            add(Row(metric, problem=problem))
        if lost:
            raise LostGPU(problem)
    result["stamp"]["gpu_after"] = harness.gpu_state().get("gpu_state")
    result["complete"] = True
    write()
    return result


def _measure(bench: Bench, case: Case, allowed: float, missing: list[str], add: Any) -> str:
    """Removes what is measured from `missing`; says why the rest is not. No traceback, and no engine, outlives it."""
    try:
        bench.need(case.seconds)
        if case.fresh:
            bench.release()
        with at_most(allowed):
            for row in case.run(bench):
                missing.remove(row.metric)
                add(row)
    except OutOfTime as error:
        return str(error)
    except Exception as error:  # what stops one case must not hide the others
        return _said(error)
    return f"{case.name} ended without it"


def _released(bench: Bench, everything: bool) -> bool:
    try:
        bench.release(everything)
    except Exception as error:  # an illegal access, say: every later call would fail with it
        print(f"the GPU is lost to this process: {_said(error)}", flush=True)
        return False
    return True


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """TimeoutError in the main thread when it takes longer; again every 10 s, in case it is swallowed."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"stopped after {seconds:.0f} s")

    handler = signal.signal(signal.SIGALRM, stop)
    timer = signal.setitimer(signal.ITIMER_REAL, max(0.1, seconds), 10.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)  # of the caller: pytest-timeout's
        signal.signal(signal.SIGALRM, handler)


def limits(bench: Bench) -> Iterator[Row]:
    """What this machine does at best, measured as in the bench of kernels; all other limits are counted from these."""
    place = Place(bench.device, bench.dtype, tiny=bench.tiny)
    found = kernels.limits(place, kernels.OnCpu() if bench.tiny else kernels.OnGpu(15))
    bench.know(found)
    for metric, name, scale, unit in zip(
        LIMIT_ROWS, ("copy", "16 bits", "fp8"), (1e-12,) * 3, ("TB/s", "TFLOP/s", "TFLOP/s"), strict=False
    ):
        value = found[name] * scale
        yield Row(metric, unit, harness.spread([value])) if value else Row(metric, problem="torch has none here")
    gaps = launch_gap(bench)
    bench.raw_limits["launch_gap"] = sorted(gaps)[len(gaps) // 2]
    yield Row(LIMIT_ROWS[3], "µs", harness.spread([1e6 * gap for gap in gaps]), less_is_better=True,
              note="from one tiny kernel to the next, with the kernel")  # fmt: skip


def launch_gap(bench: Bench) -> list[float]:
    """Seconds from the start of one kernel that does almost nothing to the next, in a graph of many."""
    x = torch.zeros(1, device=bench.device)
    if bench.device.type != "cuda":
        seconds = harness.interleave({"one": lambda: x.add_(1)}, 3)["one"]
        return seconds
    x.add_(1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(GRAPH_KERNELS):
            x.add_(1)
    timed = kernels.OnGpu(5)({"graph": graph.replay}, False)["graph"]
    return [seconds / GRAPH_KERNELS for seconds in timed]


def _said(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].strip() if lines else ''}"[:300]
