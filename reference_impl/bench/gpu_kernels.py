"""The kernels that have a goal, as lines of the GPU bench's table; all of them are in `bench kernels`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from reference_impl.bench import kernel_cases, kernels
from reference_impl.bench.gpu_engines import Bench
from reference_impl.bench.gpu_rows import Row
from reference_impl.bench.kernel_work import Place

KERNELS = [case for case in kernel_cases.CASES if case.goal is not None]
NAME = "kernel: {}"
ROWS = tuple(NAME.format(case.name) for case in KERNELS)


def kernels_with_goals(bench: Bench) -> Iterator[Row]:
    """One after another, as long as there is time. A dry run checks two."""
    timer = kernels.OnCpu() if bench.tiny else kernels.OnGpu(15)
    place = Place(bench.device, bench.pick(bench.dtype, torch.float16), bench.tiny)
    for case in KERNELS:
        if bench.left < 5 or (bench.tiny and case not in KERNELS[:2]):
            yield row_of(case.name, {"left_out": "left out: `bench kernels` has them all"})
            continue
        # So short a time that no peer is compiled: `bench kernels` has them.
        result = kernels.run([case], place, timer, min(bench.left, 15.0), limit=bench.raw_limits)
        yield row_of(case.name, result["cases"][case.name])


def row_of(name: str, found: dict[str, Any]) -> Row:
    """An entry of the kernel bench in µs; a goal stays in the unit that the case says."""
    goal = next((case.goal for case in kernel_cases.CASES if case.name == name), None)
    aim: dict[str, Any] = {} if goal is None else {"goal": goal.value, "goal_unit": goal.unit}
    metric, problem = NAME.format(name), found.get("error") or found.get("left_out")
    if problem:
        return Row(metric, problem=problem, **aim)
    ours = {key: value if key == "runs" else 1e6 * value for key, value in found["seconds"]["ours"].items()}
    best, reached = found.get("best_peer"), found.get("goal", {}).get("reached")
    return Row(
        metric, "µs", ours, 1e6 * found["limit_seconds"], less_is_better=True, detail=found,
        peer=None if best is None else (best, 1e6 * found["seconds"][best]["median"]),
        note="" if reached is None else f"reached {reached:.3g}", **aim,
    )  # fmt: skip
