"""Whether dependent launches are used is decided by what a process of its own finds, whatever becomes of it."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest
import torch

from reference_impl.assembly.llm import LLM
from reference_impl.bench import gpu_dependent
from reference_impl.bench.gpu_engines import DEPENDENT, TINY, Bench


@pytest.fixture
def bench() -> Bench:
    return Bench(torch.device("cuda"), torch.bfloat16)


def ended(monkeypatch: pytest.MonkeyPatch, status: int, out: str = "", said: str = "") -> None:
    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        assert command[-1] == "reference_impl.bench.gpu_dependent"
        return subprocess.CompletedProcess(command, status, out, said)

    monkeypatch.setattr(subprocess, "run", run)


@pytest.mark.parametrize(("on", "use"), [([1.0, 2.0, 1.0], True), ([2.5, 2.0, 3.0], False)])
def test_they_are_used_where_they_are_faster(on: list[float], use: bool, bench: Bench, monkeypatch) -> None:
    ended(monkeypatch, 0, "a warning of some library\n" + json.dumps({"off": [2.0, 2.0, 2.0], "on": on}) + "\n")
    [row] = gpu_dependent.dependent(bench)
    assert bench.configurations[DEPENDENT]["use"] is use
    assert row.ours is not None
    assert row.ours["median"] == pytest.approx(2.0 if use else 0.8)


@pytest.mark.parametrize(("status", "said"), [(1, "RuntimeError: dependent launches 'on': other tokens"), (-11, "")])
def test_they_are_not_used_where_the_process_that_tries_them_fails(status: int, said: str, bench: Bench, monkeypatch):
    ended(monkeypatch, status, "", f"Traceback\n{said}\n" if said else "")
    [row] = gpu_dependent.dependent(bench)
    assert bench.configurations[DEPENDENT] == {"use": False, "options": {}}
    assert (said or "status -11") in row.problem


def test_they_are_not_used_where_it_hangs(bench: Bench, monkeypatch) -> None:
    def run(command: list[str], **options: Any) -> None:
        raise subprocess.TimeoutExpired(command, options["timeout"])

    monkeypatch.setattr(subprocess, "run", run)
    [row] = gpu_dependent.dependent(bench)
    assert bench.configurations[DEPENDENT] == {"use": False, "options": {}}
    assert "more than 80 s" in row.problem


def test_turns_are_timed_after_the_first_and_other_tokens_are_an_error() -> None:
    def engine(seed: int) -> LLM:
        torch.manual_seed(seed)
        llm = LLM(shape=TINY["qwen3-0.6b"], dummy_weights=True, dtype="float32", num_blocks=16)
        llm.engine.model.embedding.mul_(1 + seed)
        return llm

    first = engine(0)
    seconds = gpu_dependent.in_turns({"off": first, "on": first}, 12, 4, 2)
    assert [len(values) for values in seconds.values()] == [2, 2]
    other = engine(0)
    other.engine.model.embedding.copy_(other.engine.model.embedding.roll(1, 0))
    with pytest.raises(RuntimeError, match="dependent launches 'on', turn 0: other tokens"):
        gpu_dependent.in_turns({"off": first, "on": other}, 12, 4, 2)


def test_both_engines_compute_the_same_launches(monkeypatch) -> None:
    """The engines that are compared measure nothing, so that neither rounds where the other does not."""
    made: list[LLM] = []

    def measured(num_tokens: int) -> None:
        raise AssertionError("measured")

    def small(**options: Any) -> LLM:
        made.append(LLM(shape=TINY["qwen3-0.6b"], dummy_weights=True, dtype="float32", num_blocks=16))
        monkeypatch.setattr(made[-1].engine.model, "tune", measured, raising=False)
        return made[-1]

    def turns(engines: dict[str, LLM], *numbers: int) -> dict[str, list[float]]:
        for llm in engines.values():
            llm.engine.model.tune(1)
        return {name: [] for name in engines}

    monkeypatch.setattr(gpu_dependent, "LLM", small)
    monkeypatch.setattr(gpu_dependent, "in_turns", turns)
    gpu_dependent.main()
    assert len(made) == 2
