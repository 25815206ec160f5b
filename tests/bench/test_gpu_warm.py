"""What is compiled ahead is what the bench on a GPU launches; and nothing that goes wrong there stops anything."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from reference_impl.bench import gpu_warm
from reference_impl.bench.gpu_cases import CASES
from reference_impl.bench.gpu_engines import Bench, OutOfTime
from reference_impl.bench.kernel_cases import CASES as KERNELS

OTHERS = {"dependent launches", "peers", "kernels"}  # no engines; those of plain qwen3-0.6b; kernels


def test_every_engine_of_the_bench_is_met_with_its_options() -> None:
    asked: list[tuple[str, dict[str, Any]]] = []

    class Asking(Bench):
        def llm(self, shape: str, folder: Any = None, **options: Any) -> Any:
            asked.append((shape, options))
            raise OutOfTime

    for case in CASES:
        if case.name not in OTHERS:
            with pytest.raises(OutOfTime):
                list(case.run(Asking(torch.device("cpu"), torch.float32)))
    assert len(asked) == len(CASES) - len(OTHERS)
    warmed = [(shape, options) for shape, options, _ in gpu_warm.ENGINES]
    assert [engine for engine in asked if engine not in warmed] == []


def test_jobs_are_the_engines_with_and_without_dependent_launches_and_every_kernel() -> None:
    found = gpu_warm.jobs()
    assert [job[1] for job in found if job[0] == "kernel"] == [case.name for case in KERNELS]
    engines = [job[1:] for job in found if job[0] == "engine"]
    for shape, options, rows in engines:
        off = {name: value for name, value in options.items() if name != "dependent_launches"}
        assert (shape, off, rows) in engines
        assert (shape, off | {"dependent_launches": "on"}, rows) in engines
    assert len({str(job) for job in found}) == len(found)


def test_a_dry_run_does_every_kind_of_job() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "reference_impl.bench.gpu_warm", "--dry-run", "--workers", "1"]
    done = subprocess.run([*command, "--seconds", "500"], capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"compiled ahead: {len(gpu_warm.ENGINES) + 1} jobs"), done.stdout


def test_a_job_that_fails_is_named_and_the_time_ends_them_all(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu_warm.run(("engine", "gpt-2", {}, 1), tiny=True) == "('engine', 'gpt-2', {}, 1): KeyError: 'gpt-2'"
    monkeypatch.setattr(gpu_warm, "_run", slow)
    before = multiprocessing.active_children()
    assert gpu_warm.warm([("kernel", "a"), ("kernel", "b")], 1, 0.0) == ["after 0 s 0 of 2 jobs were done"]
    assert multiprocessing.active_children() == before


def slow(given: Any) -> str:
    import time

    time.sleep(1000)
    return ""
