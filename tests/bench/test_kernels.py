"""The kernel bench proves before it times, names what did not run, and keeps its time; all of it on any machine."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import reference_impl
from reference_impl.bench import gpu_cases, gpu_rows, kernel_cases
from reference_impl.bench import kernels as bench
from reference_impl.bench.gpu_engines import Bench
from reference_impl.bench.gpu_rows import Goal
from reference_impl.bench.kernel_cases import CASES
from reference_impl.bench.kernels import Case, Place, Work

OWN = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
PACKAGE = Path(reference_impl.__file__).parent
TINY = Place(torch.device("cpu"), torch.float32, tiny=True)
LIMITS = {"copy": 1e12, "16 bits": 1e14, "fp8": 0.0, "nothing": 0.0}
NOT_ON_A_BARE_MACHINE = (
    "typer", "rich", "click", "pydantic", "yaml", "transformers", "jinja2", "matplotlib", "platformdirs", "scipy",
    "pytest", "hypothesis",
)  # fmt: skip


@pytest.fixture
def bench_in_a_bare_process(forked: Callable[..., list[str]]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """(*arguments): python -m reference_impl.bench without what a bare machine lacks."""
    return lambda *arguments: subprocess.run(
        forked(("-c", bare(*arguments))), capture_output=True, text=True, env=OWN, timeout=600
    )


def bare(*arguments: str) -> str:
    return f"""
import runpy, sys
sys.modules.update(dict.fromkeys({list(NOT_ON_A_BARE_MACHINE)!r}))
sys.path.insert(0, {str(PACKAGE.parent)!r})
sys.argv = ["bench", *{list(arguments)!r}]
runpy.run_module("reference_impl.bench", run_name="__main__")
"""


def test_a_dry_run_proves_every_case_on_a_bare_machine() -> None:
    command = [sys.executable, "-I", "-c", bare("kernels", "--dry-run")]
    done = subprocess.run(command, capture_output=True, text=True, env=OWN, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    for case in CASES:
        [line] = [line for line in lines if line.startswith(f"kernel: {case.name}  ")]
        assert re.search(r"  [\d.,]+ µs \([\d.,]+-[\d.,]+\)  .*  \d+ %  ", line), line
    assert "torch.compile did not run: left out: a dry run compiles nothing" in done.stdout
    assert "every figure is meaningless" in done.stdout


def test_every_kernel_has_a_case() -> None:
    sources = {p.stem: p.read_text("utf-8") for p in (PACKAGE / "kernels").glob("*.py")}
    launching = {name for name, text in sources.items() if re.search(r"^ +launch\(", text, re.MULTILINE)}
    assert {"flash_attention", "paged_decode", "rms_norm", "sample_tokens"} <= launching
    cases = "".join(path.read_text("utf-8") for path in (PACKAGE / "bench").glob("kernel_*.py"))
    named = set(re.findall(r"\"(\w+)\"", cases))
    assert launching <= named


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_it_needs(bench_in_a_bare_process: Any) -> None:
    done = bench_in_a_bare_process("kernels")
    assert done.returncode == 2
    assert "expected a GPU that torch sees" in done.stderr
    assert "--dry-run" in done.stderr


def test_a_name_that_no_bench_has_is_refused(bench_in_a_bare_process: Any) -> None:
    done = bench_in_a_bare_process("kernel")
    assert (done.returncode, "expected: python -m reference_impl.bench NAME" in done.stderr) == (2, True)


def test_a_name_that_no_case_has_is_refused(bench_in_a_bare_process: Any) -> None:
    done = bench_in_a_bare_process("kernels", "--dry-run", "--only", "decoding")
    assert done.returncode == 2
    assert "--only 'decoding': expected a part of one of: kernel: decode, B 64, context 4k; " in done.stderr


class Clock:
    """A timer that runs nothing and knows how long everything takes."""

    def __init__(self, **seconds: float):
        self.seconds = seconds
        self.asked: list[set[str]] = []

    def __call__(self, runs: dict[str, Any], place: Place, cold: bool) -> tuple[dict[str, list[float]], list[str]]:
        self.asked.append(set(runs))
        return {name: [self.seconds[name]] * 3 for name in runs}, ["slow host"]


X = torch.arange(6.0)


def work(ours: torch.Tensor = X * 2, **fields: Any) -> Work:
    """Doubles X; 1 MB moved, so 1 µs at least under LIMITS."""
    return Work(ours=lambda: ours, expected=lambda cast: cast(X) * 2, moved=1e6, **fields)


def measured(case: Case, clock: Clock) -> gpu_rows.Row:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "timed", clock)
        return bench.measure(case, TINY, LIMITS, deadline=float("inf"))


def test_a_wrong_kernel_is_not_timed() -> None:
    clock = Clock(ours=1.0)
    for result in (X * 2 + torch.tensor([0, 0, 0, 0, 0, 1e-4]), X[:5] * 2, X * torch.nan):
        with pytest.raises(ValueError, match="not timed: the result has"):
            measured(Case("wrong", lambda place, result=result: work(result)), clock)
    assert clock.asked == []
    assert measured(Case("right", lambda place: work()), clock).ours


def test_a_token_that_differs_is_wrong() -> None:
    tokens = torch.tensor([5, 7])
    sampled = Work(ours=lambda: tokens + torch.tensor([0, 1]), expected=lambda cast: tokens, moved=1.0)
    with pytest.raises(ValueError, match="differs in 1 of 2"):
        measured(Case("tokens", lambda place: sampled), Clock())


def test_peers_that_fail_or_compute_something_else_are_named_and_the_rest_is_timed() -> None:
    def broken() -> Any:
        raise RuntimeError("no such kernel\nwith a long story")

    peers: bench.Peers = {
        "good": lambda: lambda: X * 2,
        "broken": broken,
        "breaks when run": lambda: broken,
        "something else": lambda: lambda: X * 3,
        "torch.compile": lambda: lambda: X * 2,
    }
    clock = Clock(ours=2e-6, good=3e-6)
    row = measured(Case("c", lambda place: work(peers=peers)), clock)
    assert clock.asked == [{"ours", "good"}]
    assert row.detail["peer_errors"] == {
        "broken": "RuntimeError: no such kernel",
        "breaks when run": "RuntimeError: no such kernel",
        "something else": "ValueError: it computes something else",
        "torch.compile": "left out: a dry run compiles nothing",
    }
    [note] = gpu_rows.notes([row])
    assert note.startswith("- kernel: c: broken did not run: RuntimeError: no such kernel; ")
    assert note.endswith("slow host: with the host's time, longer than the pause")


@pytest.mark.parametrize(
    ("goal", "reached"),
    [
        (Goal(90, "% of limit"), 25.0),
        (Goal(460, "TFLOP/s"), 5.0),
        (Goal(3, "x slow"), 10.0),
        (Goal(3, "x absent"), None),
    ],
)
def test_limit_goal_and_best_peer(goal: Goal, reached: float | None) -> None:
    """4 µs; memory allows 1 µs and the matrix units 0.2 µs (FP8 could not be measured: as 16 bits)."""
    peers: bench.Peers = {name: lambda: lambda: X * 2 for name in ("slow", "fast")}
    case = Case("c", lambda place: work(flops=2e7, precision="fp8", peers=peers), goal)
    row = measured(case, Clock(ours=4e-6, slow=40e-6, fast=2e-6))
    entry = row.detail
    assert entry["limited_by"] == "memory"
    assert entry["limit_seconds"] == pytest.approx(1e-6)
    assert entry["percent_of_limit"] == pytest.approx(25)
    assert (entry["best_peer"], entry["times_as_fast"]["median"]) == ("fast", pytest.approx(0.5))
    assert entry["goal"]["reached"] == (None if reached is None else pytest.approx(reached))
    cells = gpu_rows.cells(row)
    assert cells[:5] == ["kernel: c", "4 µs (4-4)", "fast 2", "1", "25 %"]
    assert cells[5] == f"{goal.value:g} {goal.unit}" + ("" if reached is None else f" (reached {reached:g})")
    assert entry["bytes_per_second"] == pytest.approx(0.25e12)
    json.dumps(entry)


def test_a_case_that_fails_does_not_hide_the_others_and_what_is_left_out_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(place: Place) -> Work:
        raise torch.OutOfMemoryError("too large")

    cases = [Case("fails", fails, Goal(90, "% of limit")), Case("works", lambda place: work())]
    monkeypatch.setattr(kernel_cases, "CASES", cases)
    timed, metrics = Bench(TINY.device, TINY.dtype, tiny=True, limits=LIMITS), [case.metric for case in cases]
    failed, worked = gpu_cases.kernel_rows(timed, metrics)
    assert (failed.problem, failed.ours, failed.goal) == ("OutOfMemoryError: too large", None, 90)
    assert (worked.problem, worked.percent_of_limit is None) == ("", False)
    timed.deadline = 0
    assert {row.problem.partition(":")[0] for row in gpu_cases.kernel_rows(timed, metrics)} == {"left out"}
