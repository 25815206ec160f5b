"""A case of the kernel bench: given tensors, how the result is checked, what else can compute it, and how it is timed.

`python -m reference_impl.bench kernels` runs all of kernel_cases.py as `bench gpu` runs its cases. A kernel's result is
checked by the error rule, or it is not timed; then kernel and peers run in turns, between two GPU events and after a
pause on the GPU during which the host gets ahead: what is measured is the GPU's time, without Python's.
"""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from reference_impl.bench import harness
from reference_impl.bench.gpu_rows import Row
from reference_impl.kernels import reference

PAUSE = 4_000_000  # clocks of the GPU: two milliseconds
ROUNDS = 15
METRIC = "kernel: {}"  # in the table of `bench gpu`
COMPILING_SECONDS = 40.0  # what a peer that compiles may need; with less time left it is left out

Cast = Callable[[Any], Any]
BLOCK_SIZE = 16
INT8, UINT8, FP8 = torch.int8, torch.uint8, torch.float8_e4m3fn


@dataclass
class Place:
    """The device and dtype of a case. tiny: sizes for the interpreter."""

    device: torch.device
    dtype: torch.dtype
    tiny: bool = False

    def pick(self, real: Any, tiny: Any) -> Any:
        return tiny if self.tiny else real

    def randn(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Random numbers, the same in every run. They are drawn on the device: there may be billions."""
        return torch.randn(shape, device=self.device, dtype=self.dtype) * scale


@dataclass(frozen=True)
class Peer:
    """Another way to compute it. prepare() gives what is timed; its own work (compilation, a custom layout) is not."""

    prepare: Callable[[], Callable[[], Any]]
    compiles: bool = False  # torch.compile: takes long, and a dry run leaves it out


def tensors(found: Any) -> list[Tensor]:
    return [found] if isinstance(found, Tensor) else list(found)


def flat(found: Any) -> Tensor:
    return found if isinstance(found, Tensor) else torch.cat([t.flatten() for t in found])


@dataclass
class Work:
    """The work of a case. ours: the kernel. expected: the same with plain torch, from tensors given to `cast`; `part`
    takes from results what is compared.

    given: tensors that must be read once, while the result must be written once; moved: their bytes, where it is not
    so. precision: that of `flops`. cold: flush the L2 before each run, as between two layers of a decoding step.
    """

    ours: Callable[[], Any]
    expected: Callable[[Cast], Any]
    given: tuple[Tensor, ...] = ()
    moved: float | None = None
    flops: float = 0.0
    precision: str = "16 bits"
    cold: bool = False
    part: Callable[[Any], Tensor] = flat
    peers: dict[str, Peer] = field(default_factory=dict)

    def bytes_moved(self, result: Any) -> float:
        return bytes_of(*self.given, *tensors(result)) if self.moved is None else self.moved


@dataclass(frozen=True)
class Goal:
    """A goal from the project's list. unit: "% of limit", "TFLOP/s", or "x PEER": times as fast as that peer."""

    value: float
    unit: str


@dataclass(frozen=True)
class Case:
    name: str
    make: Callable[[Place], Work]
    goal: Goal | None = None


def as_is(value: Any) -> Any:
    return value


def double(value: Any) -> Any:
    """The value in float64, also in place of a dtype; codes of 8 bits and whole numbers stay."""
    if isinstance(value, torch.dtype):
        return torch.float64
    is_float = isinstance(value, Tensor) and value.is_floating_point() and value.element_size() > 1
    return value.double() if is_float else value


def wrong(work: Work, found: Any) -> str | None:
    """What breaks the error rule: against float64 at most twice the error of plain torch, and 2 eps max |reference|."""
    exact, plain, part = flat(work.expected(double)), flat(work.expected(as_is)), work.part(found)
    if part.shape != plain.shape:
        return f"has the shape {list(part.shape)}, expected {list(plain.shape)}"
    if not exact.is_floating_point():
        differ = int((part != exact).sum())
        return f"differs in {differ} of {exact.numel()} places" if differ else None
    error, allowed = (part.double() - exact).abs().max(), 2 * (plain.double() - exact).abs().max()
    allowed += 2 * torch.finfo(plain.dtype).eps * exact.abs().max()
    return None if bool(error <= allowed) else f"has an error of {float(error):.3g}, allowed {float(allowed):.3g}"


def kernel(name: str, module: str = "") -> Any:
    """A kernel's host function, imported when a case is made: by then it is settled whether kernels are interpreted."""
    return getattr(importlib.import_module(f"reference_impl.kernels.{module or name}"), name)


def twins(name: str, *given: Any, module: str = "", options: dict[str, Any] | None = None, **fields: Any) -> Work:
    """A kernel and the reference of the same name, given the same. fields: the others of `Work`."""
    ours, theirs, named = kernel(name, module), getattr(reference, name), options or {}
    return Work(
        lambda: ours(*given, **named),
        lambda cast: theirs(*map(cast, given), **{key: cast(value) for key, value in named.items()}),
        tuple(value for value in (*given, *named.values()) if isinstance(value, Tensor)), **fields,
    )  # fmt: skip


def bytes_of(*tensors: Tensor) -> float:
    return float(sum(t.numel() * t.element_size() for t in tensors))


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


def timer_of(place: Place) -> Timer:
    return OnCpu() if place.tiny else OnGpu(ROUNDS)


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


def row_of(case: Case, place: Place, timer: Timer, limit: dict[str, float], deadline: float) -> Row:
    """Measures a case, as a line of the table, in µs; a goal stays in the unit that the case says."""
    torch.manual_seed(0)
    try:
        found = measure(case, place, timer, limit, deadline)
    except Exception as error:  # what stops one case must not hide the others
        found = {"error": said(error)}
    if "error" in found:
        return unmeasured(case, found["error"])
    best, reached = found.get("best_peer"), found.get("goal", {}).get("reached")
    return replace(
        unmeasured(case, ""), unit="µs", limit=1e6 * found["limit_seconds"], less_is_better=True, detail=found,
        ours={key: value if key == "runs" else 1e6 * value for key, value in found["seconds"]["ours"].items()},
        peer=None if best is None else (best, 1e6 * found["seconds"][best]["median"]),
        note="" if reached is None else f"reached {reached:.3g}",
    )  # fmt: skip


def unmeasured(case: Case, problem: str) -> Row:
    """The case's line without a figure: why there is none, and the goal."""
    goal, unit = (case.goal.value, case.goal.unit) if case.goal else (None, "")
    return Row(METRIC.format(case.name), problem=problem, goal=goal, goal_unit=unit)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the bench. 0: every case ran and is right. 1: one is not. 2: this machine lacks what the bench needs."""
    from reference_impl.bench import gpu

    return gpu.main(arguments, "kernels")
