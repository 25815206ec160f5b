"""What torch's profiler recorded, read from its Chrome trace: operators with their own time, kernels, labels.

Only that file links kernels to the operators that launched them. Times are seconds.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from reference_impl.bench.profiling.labels import PREFIX

STEP, SMALLEST = "step ", "smallest operator"  # labels around a step, and around operators on one number
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass
class Call:
    """One operator or kernel. seconds: its own time, without that of operators that it called.

    label: of the innermost part of the model that it ran for. step: the number of the step, None outside of one.
    dims: shapes of its inputs, itemsizes: bytes of a number in each; 0 for what is no tensor, or unknown.
    hands_on: another operator, which it called, works on as many numbers.
    """

    name: str
    start: float
    end: float
    seconds: float
    label: str | None
    step: int | None
    dims: tuple[tuple[int, ...], ...] = ()
    itemsizes: tuple[int, ...] = ()
    hands_on: bool = False

    @property
    def tensors(self) -> list[tuple[int, int]]:
        """(numbers, bytes of a number) of each input that is a tensor."""
        both = zip(self.dims, self.itemsizes, strict=True)
        return [(math.prod(dims), itemsize) for dims, itemsize in both if itemsize]

    @property
    def numbers(self) -> int:
        """How many numbers the largest input has."""
        return max((numbers for numbers, _ in self.tensors), default=0)


@dataclass
class Entry:
    """All calls of one name for one part of the model, in all steps."""

    name: str
    label: str | None
    calls: list[Call] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return sum(call.seconds for call in self.calls)


@dataclass(frozen=True)
class Recorded:
    """A recording. calls: in the steps. steps: (start, end) of each. smallest: seconds of an operator that does almost
    nothing.

    busy: seconds in which the device computed: on a CPU the sum of all calls, on a GPU without counting twice what
    overlaps.
    """

    calls: list[Call]
    steps: list[tuple[float, float]]
    smallest: float
    busy: float

    def undisturbed(self) -> tuple[int, Recorded]:
        """The number of the shortest step, and this step with each of its parts as fast as in any; for a CPU.

        Another program takes the processor for milliseconds, from whichever operator runs: in a step of 15 ms it would
        be the longest entry.
        """
        lengths = [end - start for start, end in self.steps]
        number = min(range(len(lengths)), key=lengths.__getitem__)
        outside = list(lengths)
        parts: dict[tuple[str, str | None], dict[int, list[Call]]] = {}
        for call in self.calls:
            if call.step is not None:
                outside[call.step] -= call.seconds
                parts.setdefault((call.name, call.label), {}).setdefault(call.step, []).append(call)
        calls: list[Call] = []
        for steps in parts.values():
            alike = [found for found in steps.values() if len(found) == len(steps.get(number, ()))]
            calls += min(alike, key=lambda found: sum(call.seconds for call in found), default=[])
        busy, start = sum(call.seconds for call in calls), self.steps[number][0]
        return number, Recorded(calls, [(start, start + min(outside) + busy)], self.smallest, busy)

    def entries(self) -> list[Entry]:
        """The entries, longest first."""
        found: dict[tuple[str, str | None], Entry] = {}
        for call in self.calls:
            found.setdefault((call.name, call.label), Entry(call.name, call.label)).calls.append(call)
        return sorted(found.values(), key=lambda entry: -entry.seconds)


def read(trace: dict[str, Any], gpu: bool = False) -> Recorded:
    """What a trace recorded. gpu: the steps ran on one. Raises ValueError where it holds no step, or no kernel of a
    GPU."""
    slices = [e for e in trace["traceEvents"] if e.get("ph") == "X"]
    nested = _nest([e for e in slices if e.get("cat") in ("cpu_op", "user_annotation", *_RUNTIME)])
    calls = [call for event, call in nested if event["cat"] == "cpu_op"]
    launched = {e["args"]["correlation"]: call for e, call in nested if "correlation" in e.get("args", {})}
    kernels = [_kernel(e, launched.get(e["args"].get("correlation"))) for e in slices if e.get("cat") in _ON_GPU]
    steps = sorted((c.start, c.end) for e, c in nested if _label(e, STEP))
    if not steps:
        raise ValueError("the profiler's trace holds no step: expected annotations 'inferlab: step N'")
    if gpu and not any(kernel.step is not None for kernel in kernels):
        raise ValueError(
            "the profiler's trace holds no kernel of these steps: expected that torch can trace this GPU (CUPTI), and "
            "that nothing else profiled in this process before"
        )
    calls = kernels if gpu else calls
    inside = [call for call in calls if call.step is not None and call.label != SMALLEST]
    small = [call.seconds for call in calls if call.label == SMALLEST]
    busy = sum(call.seconds for call in inside)
    if gpu:
        busy, _ = busy_seconds((call.start, call.end) for call in inside)
    return Recorded(inside, steps, statistics.median(small or [0.0]), busy)


_RUNTIME = ("cuda_runtime", "cuda_driver")


def _label(event: dict[str, Any], begins: str = "") -> str | None:
    """The label of an annotation of ours, without the prefix."""
    if event["cat"] == "user_annotation" and event["name"].startswith(PREFIX + begins):
        return str(event["name"].removeprefix(PREFIX))
    return None


def _nest(events: list[dict[str, Any]]) -> list[tuple[dict[str, Any], Call]]:
    """Each event with its own time, the label around it and its step; a thread's events lie inside one another."""
    found: list[tuple[dict[str, Any], Call]] = []
    around: dict[Any, list[tuple[dict[str, Any], Call]]] = {}
    for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
        stack = around.setdefault(event["tid"], [])
        start, end = event["ts"] * 1e-6, (event["ts"] + event["dur"]) * 1e-6
        while stack and stack[-1][1].end <= start:
            stack.pop()
        label = step = None
        if stack:
            parent, outer = stack[-1]
            label, step = _label(parent) or outer.label, outer.step
            if number := _label(parent, STEP):
                label, step = None, int(number.removeprefix(STEP))
            if event["cat"] == "cpu_op":
                outer.seconds -= end - start
        args = event.get("args", {})
        dims, sizes = _inputs(args.get("Input Dims", ()), args.get("Input type", ()))
        call = Call(event["name"], start, end, end - start, label, step, dims, sizes)
        if stack and event["cat"] == "cpu_op" and short_name(call.name) not in _PREPARES:
            outer.hands_on |= 0 < outer.numbers <= call.numbers
        found.append((event, call))
        stack.append((event, call))
    return found


# Called by operators that do the work themselves.
_PREPARES = {
    f"aten::{name}"
    for name in (
        "as_strided", "detach", "empty", "empty_like", "empty_strided", "expand", "fill_", "narrow", "permute",
        "resize_", "resolve_conj", "select", "slice", "squeeze", "t", "transpose", "unsqueeze", "view", "zero_",
    )
}  # fmt: skip
_SIZES = {"float": 4, "double": 8, "c10::BFloat16": 2, "c10::Half": 2, "long int": 8, "int": 4, "signed char": 1,
          "unsigned char": 1, "bool": 1, "c10::Float8_e4m3fn": 1}  # fmt: skip


def _inputs(dims: Sequence[Any], kinds: Sequence[str]) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
    """Shapes and bytes of a number of each input; for a list of tensors, whose type is not recorded, each shape and
    0."""
    found: list[tuple[tuple[int, ...], int]] = []
    for shape, kind in zip(dims, kinds, strict=True):
        is_list = bool(shape) and isinstance(shape[0], list)
        found += [(tuple(one), _SIZES.get(kind, 0)) for one in (shape if is_list else [shape])]
    return tuple(shape for shape, _ in found), tuple(size for _, size in found)


def _kernel(event: dict[str, Any], launch: Call | None) -> Call:
    """A GPU's kernel or copy; its launch says for which part of the model."""
    start, end = event["ts"] * 1e-6, (event["ts"] + event["dur"]) * 1e-6
    label, step = (None, None) if launch is None else (launch.label, launch.step)
    return Call(short_name(event["name"]), start, end, end - start, label, step)


def short_name(kernel: str) -> str:
    """A C++ kernel's name without its types: void at::native::foo<float, 4>(...) is at::native::foo."""
    name = re.sub(r"^void ", "", kernel)
    cut = min((place for place in (name.find("<"), name.find("(")) if place > 0), default=len(name))
    return name[:cut]


def busy_seconds(spans: Iterable[tuple[float, float]], longest: float = 0.0) -> tuple[float, float]:
    """(time in which at least one of the spans runs, sum of the gaps between them that last `longest` at most)."""
    busy = short = 0.0
    until = float("-inf")
    for start, end in sorted(spans):
        short += start - until if 0 < start - until <= longest else 0.0
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    return busy, short
