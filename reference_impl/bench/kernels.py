"""`python -m reference_impl.bench kernels`: every kernel against the limit of this GPU and against torch's own.

From the source tree, on a machine with torch, triton, numpy and nothing else. First the limits are measured: how fast
memory is copied, and how fast matrices multiply. Then each case (kernel_cases.py): the kernel's result is checked by
the error rule, or it is not timed; then kernel and peers run in turns, between two GPU events and after a pause on the
GPU during which the host gets ahead: what is measured is the GPU's time, without Python's.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from reference_impl.bench import gpu_rows, harness
from reference_impl.bench.gpu_rows import Row
from reference_impl.bench.kernel_cases import CASES
from reference_impl.bench.kernel_work import Case, Goal, Place, wrong

NEEDS = (
    "expected a GPU that torch sees (torch.cuda.is_available()), Triton, and no TRITON_INTERPRET; --dry-run tries this "
    "program on any machine that has Triton"
)
PAUSE = 4_000_000  # clocks of the GPU: two milliseconds
METRIC = "kernel: {}"  # in the table of `bench gpu`
COMPILING_SECONDS = 40.0  # what a peer that compiles may need; with less time left it is left out


class OnGpu:
    """Times runs in turns, with CUDA events."""

    def __init__(self, rounds: int):
        self.rounds, self.late = rounds, set[str]()  # what was not launched within the pause
        self.flushed = torch.empty(256 * 2**20, dtype=torch.int8, device="cuda")  # several times an L2

    def __call__(self, runs: dict[str, Callable[[], Any]], cold: bool) -> dict[str, list[float]]:
        """Seconds of each run in each round; the first two rounds warm up and do not count."""
        events: dict[str, list[tuple[Any, Any]]] = {name: [] for name in runs}
        names, self.late = list(runs), set()
        for turn in range(self.rounds + 2):
            for name in harness.rotated(names, turn):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                if cold:
                    # Read after the write: otherwise the run would have to write dirty lines back first.
                    self.flushed.zero_().view(torch.int32).amax()
                torch.cuda._sleep(PAUSE)
                start.record()
                runs[name]()
                end.record()
                if turn > 1:
                    events[name].append((start, end))
                    if start.query():
                        self.late.add(name)
            torch.cuda.synchronize()
        return {name: [a.elapsed_time(b) / 1e3 for a, b in pairs] for name, pairs in events.items()}


class OnCpu:
    """The timer of a dry run: everything once, by wall-clock time. The figures mean nothing."""

    late: frozenset[str] = frozenset()

    def __call__(self, runs: dict[str, Callable[[], Any]], cold: bool) -> dict[str, list[float]]:
        seconds = {}
        for name, run in runs.items():
            began = time.perf_counter()
            run()
            seconds[name] = [time.perf_counter() - began]
        return seconds


Timer = OnGpu | OnCpu


def timer_of(place: Place, rounds: int) -> Timer:
    return OnCpu() if place.tiny else OnGpu(rounds)


def limits(place: Place, timer: Timer) -> dict[str, float]:
    """byte/s of copying (read and written), FLOP/s of a large product in 16 bits and in FP8 (0: torch cannot), and the
    seconds that two events see with nothing between them: every figure contains them."""
    source = torch.ones(place.pick(2**30, 2**16), dtype=torch.int8, device=place.device)
    target, n = torch.empty_like(source), place.pick(8192, 64)
    a, b = place.randn(n, n), place.randn(n, n)
    codes, one = a.to(torch.float8_e4m3fn), torch.ones((), device=place.device)
    runs: dict[str, Callable[[], Any]] = {
        "nothing": lambda: None, "copy": lambda: target.copy_(source), "16 bits": lambda: a @ b,
    }  # fmt: skip
    work = {"copy": 2.0 * source.numel(), "16 bits": 2.0 * n**3, "fp8": 2.0 * n**3}
    found = {"fp8": 0.0}
    try:
        fp8 = lambda: torch._scaled_mm(  # noqa: E731
            codes, codes.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True
        )
        fp8()
        runs["fp8"] = fp8
    except Exception as error:  # an older GPU, say; the limit of such a case is then that of 16 bits
        print(f"torch has no product in FP8 here: {said(error)}")
    seconds = {name: statistics.median(values) for name, values in timer(runs, False).items()}
    return found | {"nothing": seconds.pop("nothing")} | {name: work[name] / s for name, s in seconds.items()}


def run(
    cases: Sequence[Case], place: Place, timer: Timer, seconds: float, limit: dict[str, float] | None = None
) -> dict[str, Any]:
    """Runs all cases until the time is up; the rest is named as left out. limit: the limits, if they are known
    already."""
    deadline = time.monotonic() + seconds
    result: dict[str, Any] = {
        "stamp": harness.stamp(), "dry_run": place.tiny, "dtype": str(place.dtype).removeprefix("torch."),
        "limits": limit or limits(place, timer), "cases": {}, "left_out": [],
    }  # fmt: skip
    for case in cases:
        if time.monotonic() > deadline:
            result["left_out"].append(case.name)
            continue
        torch.manual_seed(0)
        try:
            result["cases"][case.name] = measure(case, place, timer, result["limits"], deadline)
        except Exception as error:  # what stops one case must not hide the others
            result["cases"][case.name] = {"error": said(error)}
        print(line(case.name, result["cases"][case.name]), flush=True)
    result["seconds"] = seconds - (deadline - time.monotonic())
    return result


def measure(case: Case, place: Place, timer: Timer, limit: dict[str, float], deadline: float) -> dict[str, Any]:
    work = case.make(place)
    found = work.ours()
    if problem := wrong(work, found):
        return {"error": f"not timed: the result {problem}"}
    runs, errors = {"ours": work.ours}, {}
    for name, peer in work.peers.items():
        if peer.compiles and (place.tiny or deadline - time.monotonic() < COMPILING_SECONDS):
            errors[name] = "left out: a dry run compiles nothing" if place.tiny else "left out: no time to compile"
            continue
        try:
            runs[name] = peer.prepare()
            theirs, mine = (work.part(r).double() for r in (runs[name](), found))
            if float((theirs - mine).abs().max()) > 0.1 * float(mine.abs().max()):
                raise ValueError("it computes something else")
        except Exception as error:
            runs.pop(name, None)
            errors[name] = said(error)
    seconds = timer(runs, work.cold)
    matrix = limit[work.precision] or limit["16 bits"]
    moved = work.bytes_moved(found)
    least = max(moved / limit["copy"], work.flops / matrix)
    ours = statistics.median(seconds["ours"])
    entry: dict[str, Any] = {
        "seconds": {name: harness.spread(values) for name, values in seconds.items()},
        "peer_errors": errors,
        "late": sorted(timer.late),
        "limit_seconds": least,
        "limited_by": "memory" if least * matrix > work.flops else "matrix",
        "percent_of_limit": 100 * least / ours,
        "bytes_per_second": moved / ours,
        "flops_per_second": work.flops / ours,
    }
    if others := {name: statistics.median(values) for name, values in seconds.items() if name != "ours"}:
        best = min(others, key=others.__getitem__)
        entry |= {"best_peer": best, "times_as_fast": harness.ratio(seconds[best], seconds["ours"])}
    if case.goal is not None:
        reached = _reached(case.goal, entry, others)
        entry["goal"] = {"value": case.goal.value, "unit": case.goal.unit, "reached": reached}
    return entry


def _reached(goal: Goal, entry: dict[str, Any], others: dict[str, float]) -> float | None:
    """What was reached, in the goal's unit; None if the peer that it names did not run."""
    if goal.unit == "% of limit":
        return float(entry["percent_of_limit"])
    if goal.unit == "TFLOP/s":
        return float(entry["flops_per_second"]) / 1e12
    peer = others.get(goal.unit.removeprefix("x "))
    return None if peer is None else peer / float(entry["seconds"]["ours"]["median"])


def said(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].strip() if lines else ''}"[:300]


def line(name: str, entry: dict[str, Any]) -> str:
    """A line for a terminal: the cells of the table, and how much the kernel moves or computes in a second."""
    cells = "  ".join(gpu_rows.cells(row_of(name, entry)))
    if "error" in entry:
        return cells
    which, unit = ("bytes", "TB/s") if entry["limited_by"] == "memory" else ("flops", "TFLOP/s")
    return f"{cells}  {entry[f'{which}_per_second'] / 1e12:.3g} {unit}"


def row_of(name: str, found: dict[str, Any]) -> Row:
    """An entry as a line of the table of `bench gpu`, in µs; a goal stays in the unit that the case says."""
    of_table = [vars(case.goal) for case in CASES if case.name == name and case.goal]  # also of what has an error
    goal = found.get("goal", of_table[0] if of_table else None)
    aim: dict[str, Any] = {} if goal is None else {"goal": goal["value"], "goal_unit": goal["unit"]}
    metric, problem = METRIC.format(name), found.get("error") or found.get("left_out")
    if problem:
        return Row(metric, problem=problem, **aim)
    ours = {key: value if key == "runs" else 1e6 * value for key, value in found["seconds"]["ours"].items()}
    best, reached = found.get("best_peer"), found.get("goal", {}).get("reached")
    return Row(
        metric, "µs", ours, 1e6 * found["limit_seconds"], less_is_better=True, detail=found,
        peer=None if best is None else (best, 1e6 * found["seconds"][best]["median"]),
        note="" if reached is None else f"reached {reached:.3g}", **aim,
    )  # fmt: skip


def notes(result: dict[str, Any]) -> str:
    """Notes: the limits; every peer that did not run, with its reason and the cases; and what was left out."""
    lim, missing, lines = result["limits"], defaultdict[tuple[str, str], list[str]](list), list[str]()
    lines.append(
        f"measured limits: copy {lim['copy'] / 1e12:.2f} TB/s, matrix products {lim['16 bits'] / 1e12:.0f} TFLOP/s in "
        f"{result['dtype']}, {lim['fp8'] / 1e12:.0f} in FP8; two events with nothing between them "
        f"{lim['nothing'] * 1e6:.1f} µs, which every figure contains; {result['stamp']['gpu'] or 'no GPU'}, torch "
        f"{result['stamp']['versions']['torch']}, triton {result['stamp']['versions']['triton']}; "
        f"{result['seconds']:.0f} s"
    )
    for name, entry in result["cases"].items():
        for peer, error in entry.get("peer_errors", {}).items():
            missing[peer, error].append(name)
        if entry.get("late"):
            lines.append(f"{name}: with the host's time, which was longer than the pause: {', '.join(entry['late'])}")
    lines += [f"did not run: {peer}: {error} ({'; '.join(names)})" for (peer, error), names in missing.items()]
    if result["left_out"]:
        lines.append(f"left out, the time was up: {'; '.join(result['left_out'])}")
    if result["dry_run"]:
        lines.append("a dry run in the interpreter: the results are proven, the times mean nothing")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the bench. 0: every case ran and is right. 1: one is not. 2: this machine lacks what the bench needs."""
    parser = argparse.ArgumentParser(prog="python -m reference_impl.bench kernels", description=__doc__)
    parser.add_argument("--dry-run", action="store_true", help="every case once, tiny, in Triton's interpreter")
    parser.add_argument("--only", default="", help="cases whose name contains this; nothing is saved")
    parser.add_argument("--seconds", type=float, default=270.0, help="no case begins after that")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--no-save", action="store_true", help="write no results/kernels.json")
    options = parser.parse_args(arguments)
    if options.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # before the first kernel is defined
    try:
        from reference_impl.kernels.launch import architecture, is_interpreted

        ready = is_interpreted() if options.dry_run else torch.cuda.is_available() and not is_interpreted()
        if ready and not options.dry_run:
            architecture()
    except (ImportError, ValueError) as error:
        print(f"{NEEDS}. {error}", file=sys.stderr)
        return 2
    if not ready:
        print(NEEDS, file=sys.stderr)
        return 2
    cases = [case for case in CASES if options.only in case.name]
    if not cases:
        parser.error(f"--only {options.only!r}: expected a part of one of: {'; '.join(case.name for case in CASES)}")
    device, dtype = ("cpu", torch.float16) if options.dry_run else ("cuda", torch.bfloat16)
    place = Place(torch.device(device), dtype, tiny=options.dry_run)
    result = run(cases, place, timer_of(place, options.rounds), options.seconds)
    print(notes(result))
    if not (options.dry_run or options.no_save or options.only):  # a part must not replace the whole
        print(f"wrote {harness.save('kernels', result)}")
    return int(any("error" in entry for entry in result["cases"].values()))
