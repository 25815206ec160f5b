"""A case of the kernel bench: given tensors, how the result is checked, what else can compute it, and how it is timed.

`python -m reference_impl.bench kernels` runs all of kernel_cases.py as `bench gpu` runs its cases. A kernel's result is
checked by the error rule, or it is not timed; then kernel and peers run in turns, between two GPU events and after a
pause on the GPU during which the host gets ahead: what is measured is the GPU's time, without Python's.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from reference_impl.bench import harness
from reference_impl.bench.gpu_rows import Goal, Row
from reference_impl.kernels import reference

PAUSE = 4_000_000  # clocks of the GPU: two milliseconds
ROUNDS = 15
COMPILES = "torch.compile"  # the peer that compiles: a dry run leaves it out
COMPILING_SECONDS = 40.0  # what it may need; with less time left it is left out, too
BLOCK_SIZE = 16
INT8, UINT8, FP8 = torch.int8, torch.uint8, torch.float8_e4m3fn

Run = Callable[[], Any]
Peers = Mapping[str, Callable[[], Run]]  # name -> what prepares it (compiles, packs), and gives what is timed
Cast = Callable[[Any], Any]


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


def flat(found: Any) -> Tensor:
    return found if isinstance(found, Tensor) else torch.cat([t.flatten() for t in found])


@dataclass
class Work:
    """The work of a case. ours: the kernel. expected: the same with plain torch, from tensors given to `cast`; `part`
    takes from results what is compared.

    peers: other ways to compute it.
    given: tensors that must be read once, while the result must be written once; moved: their bytes, where it is not
    so. precision: that of `flops`. cold: flush the L2 before each run, as between two layers of a decoding step.
    """

    ours: Run
    expected: Callable[[Cast], Any]
    given: tuple[Tensor, ...] = ()
    moved: float | None = None
    flops: float = 0.0
    precision: str = "16 bits"
    cold: bool = False
    part: Callable[[Any], Tensor] = flat
    peers: Peers = field(default_factory=dict)

    def bytes_moved(self, result: Any) -> float:
        written = (result,) if isinstance(result, Tensor) else result
        return bytes_of(*self.given, *written) if self.moved is None else self.moved


@dataclass(frozen=True)
class Case:
    """A kernel. goal: in "% of limit", in "TFLOP/s", or as "x PEER": times as fast as that peer."""

    name: str
    make: Callable[[Place], Work]
    goal: Goal | None = None

    @property
    def metric(self) -> str:
        """The name of its line in the table of `bench gpu`."""
        return f"kernel: {self.name}"

    def row(self, problem: str = "") -> Row:
        """The case's line without a figure: why there is none, and the goal."""
        value, unit = (self.goal.value, self.goal.unit) if self.goal else (None, "")
        return Row(self.metric, problem=problem, goal=value, goal_unit=unit)


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


def twins(name: str, *given: Any, module: str = "", options: Mapping[str, Any] | None = None, **fields: Any) -> Work:
    """A kernel and the reference of the same name, given the same. fields: the others of `Work`."""
    theirs, named = getattr(reference, name), options or {}
    return Work(
        partial(kernel(name, module), *given, **named),
        lambda cast: theirs(*map(cast, given), **{key: cast(value) for key, value in named.items()}),
        tuple(value for value in (*given, *named.values()) if isinstance(value, Tensor)),
        **fields,
    )


def bytes_of(*tensors: Tensor) -> float:
    return float(sum(t.numel() * t.element_size() for t in tensors))


def timed(
    runs: Mapping[str, Run], place: Place, cold: bool = False, rounds: int = ROUNDS
) -> tuple[dict[str, list[float]], list[str]]:
    """(seconds of each run in each round, by CUDA events; runs that the host launched too late, after the pause).

    The first two rounds warm up and do not count. A dry run does everything once, by wall-clock time.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    if place.tiny:
        for name, run in runs.items():
            began = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - began)
        return seconds, []
    late, flushed = set[str](), torch.empty(256 * 2**20, dtype=INT8, device="cuda")  # several times an L2
    for turn in range(rounds + 2):
        events: dict[str, tuple[Any, Any]] = {}
        for name in harness.rotated(list(runs), turn):
            start, end = events[name] = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            if cold:  # read after the write: otherwise the run would have to write dirty lines back first
                flushed.zero_().view(torch.int32).amax()
            torch.cuda._sleep(PAUSE)
            start.record()
            runs[name]()
            end.record()
            if turn > 1 and start.query():
                late.add(name)
        torch.cuda.synchronize()
        for name, (start, end) in events.items():
            seconds[name] += [start.elapsed_time(end) / 1e3] * (turn > 1)
    return seconds, sorted(late)


def measure(case: Case, place: Place, limit: Mapping[str, float], deadline: float) -> Row:
    """The case's line, in µs, with all that was measured as its detail; a goal stays in the unit that the case says.
    Raises ValueError for a wrong result, which is not timed."""
    torch.manual_seed(0)
    work = case.make(place)
    found = work.ours()
    if problem := wrong(work, found):
        raise ValueError(f"not timed: the result {problem}")
    peers, errors = _peers(work, found, place, deadline)
    seconds, late = timed({"ours": work.ours} | peers, place, work.cold)
    spreads = {name: harness.spread(values) for name, values in seconds.items()}
    others = {name: spread["median"] for name, spread in spreads.items()}
    ours, matrix = others.pop("ours"), limit[work.precision] or limit["16 bits"]
    moved, best = work.bytes_moved(found), min(others, key=others.__getitem__, default=None)
    least = max(moved / limit["copy"], work.flops / matrix)
    detail: dict[str, Any] = {
        "seconds": spreads,
        "peer_errors": errors,
        "late": late,
        "limit_seconds": least,
        "limited_by": "memory" if least * matrix > work.flops else "matrix",
        "percent_of_limit": 100 * least / ours,
        "bytes_per_second": moved / ours,
        "flops_per_second": work.flops / ours,
    }
    row = replace(case.row(), unit="µs", limit=1e6 * least, less_is_better=True, detail=detail)
    if best is not None:
        detail |= {"best_peer": best, "times_as_fast": harness.ratio(seconds[best], seconds["ours"])}
        row = replace(row, peer=(best, 1e6 * others[best]))
    if case.goal is not None:
        reached = {"% of limit": 100 * least / ours, "TFLOP/s": work.flops / ours / 1e12}
        reached |= {f"x {name}": theirs / ours for name, theirs in others.items()}
        detail["goal"] = {"value": row.goal, "unit": row.goal_unit, "reached": reached.get(row.goal_unit)}
        if row.goal_unit in reached:  # not where the peer that it names did not run
            row = replace(row, note=f"reached {reached[row.goal_unit]:.3g}")
    return replace(row, ours=harness.spread([1e6 * s for s in seconds["ours"]]))


def _peers(work: Work, found: Any, place: Place, deadline: float) -> tuple[dict[str, Run], dict[str, str]]:
    """(peers that compute what we found, why each of the others does not run)."""
    runs, errors = dict[str, Run](), dict[str, str]()
    for name, prepare in work.peers.items():
        if name == COMPILES and (place.tiny or deadline - time.monotonic() < COMPILING_SECONDS):
            errors[name] = "left out: a dry run compiles nothing" if place.tiny else "left out: no time to compile"
            continue
        try:
            run = prepare()
            theirs, mine = (work.part(result).double() for result in (run(), found))
            if float((theirs - mine).abs().max()) > 0.1 * float(mine.abs().max()):
                raise ValueError("it computes something else")
            runs[name] = run
        except Exception as error:
            errors[name] = said(error)
    return runs, errors


def said(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].strip() if lines else ''}"[:300]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the bench. 0: every case ran and is right. 1: one is not. 2: this machine lacks what the bench needs."""
    from reference_impl.bench import gpu

    return gpu.main(arguments, "kernels")
