"""What is compiled ahead is what the bench on a GPU launches; and nothing that goes wrong there stops anything."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest
import torch

from reference_impl.bench import gpu_warm
from reference_impl.bench.gpu_cases import CASES
from reference_impl.bench.gpu_engines import Bench, LeftOut
from reference_impl.bench.gpu_warm import ENGINES
from reference_impl.bench.kernel_cases import CASES as KERNELS

OTHERS = {"peers", "kernels"}  # engines of plain qwen3-0.6b; kernels


def test_every_engine_of_the_bench_is_met_with_its_options() -> None:
    asked: list[tuple[str, dict[str, Any]]] = []

    class Asking(Bench):
        def llm(self, shape: str, folder: Any = None, **options: Any) -> Any:
            asked.append((shape, options))
            raise LeftOut

    for case in CASES:
        if case.name not in OTHERS:
            with pytest.raises(LeftOut):
                list(case.run(Asking(torch.device("cpu"), torch.float32), case.metrics))
    assert len(asked) == len(CASES) - len(OTHERS)
    warmed = [(shape, options) for shape, options, _ in ENGINES]
    assert [engine for engine in asked if engine not in warmed] == []


def test_jobs_are_every_kernel_and_every_engine_at_each_number_of_rows() -> None:
    jobs = gpu_warm.jobs()
    assert jobs[: len(KERNELS)] == [case.name for case in KERNELS]
    assert jobs[len(KERNELS) :] == [(shape, options, n) for shape, options, rows in ENGINES for n in rows]


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: f"{engine[0]} {engine[1]}")
def test_every_engine_is_run_once(engine: tuple[str, dict[str, Any], tuple[int, ...]]) -> None:
    shape, options, rows = engine
    assert gpu_warm.compiled(((shape, options, rows[-1]), True)) == ""


def test_a_job_that_fails_is_named_and_the_time_ends_them_all() -> None:
    assert gpu_warm.compiled((("gpt-2", {}, 1), True)) == "('gpt-2', {}, 1): KeyError: 'gpt-2'"
    before = multiprocessing.active_children()
    assert gpu_warm.compile_ahead(["a", "b"], 0.0, tiny=True) == ["after 0 s 0 of 2 jobs were done"]
    assert multiprocessing.active_children() == before
