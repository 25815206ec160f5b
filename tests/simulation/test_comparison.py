"""The simulator makes the plans of the real engine, step by step and row by row, when arrivals are given by step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from reference_impl.assembly.config import EngineConfig, course_model
from reference_impl.assembly.llm import LLM
from reference_impl.core.decoder import Decoder
from reference_impl.simulation import CalibratedCost
from reference_impl.simulation.comparison import (
    ByStep,
    Step,
    by_step,
    compare,
    real_steps,
    same_plans,
    shrunk,
    simulated_steps,
)
from reference_impl.simulation.measure import Shape, measure
from reference_impl.simulation.workloads import ClosedLoop, workload

from .loads import load, request

COST = CalibratedCost(7e-3, 4e-4, 1.2e-6, 3e-4, 7e-5, 2e-6, 6e-8, 4096, 2048)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def course() -> Decoder:
    return LLM(course_model()).engine.model


def agree(model: Decoder, arrivals: list[ByStep], config: EngineConfig) -> list[Step]:
    simulated = simulated_steps(arrivals, COST, config, min(model.config.max_position, model.rotary.max_position))
    real = real_steps(model, arrivals, config)
    assert same_plans(simulated, real) is None
    assert len(simulated) == len(real)
    return simulated


@pytest.mark.parametrize("cache", ["hash", "radix", "off"])
@pytest.mark.parametrize("name", ["chat", "rag"])
def test_on_the_course_model_every_step_is_the_engines(course: Decoder, name: str, cache: str) -> None:
    requests = shrunk(workload(name, rate=4.0, num_requests=7), 256, 12)
    config = EngineConfig(num_blocks=100, max_num_seqs=4, max_num_batched_tokens=256, prefix_cache=cache)  # type: ignore[arg-type]
    steps = agree(course, by_step(requests, 0.1), config)
    hits = sum(cached for step in steps for _, cached in step.admitted)
    assert (hits > 0) == (cache != "off")


CONFIGS = {
    "roomy": {"num_blocks": 400},
    "preempted": {"num_blocks": 40},
    "swapped": {"num_blocks": 40, "preemption": "swap", "swap_bytes": 1_000_000},
    "worst case": {"num_blocks": 40, "admission": "worst_case"},
    "small chunks": {"num_blocks": 100, "max_num_batched_tokens": 9, "max_num_seqs": 5},
    "radix, preempted": {"num_blocks": 40, "prefix_cache": "radix"},
    "large blocks": {"num_blocks": 14, "block_size": 32},
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_on_a_random_model_too_under_any_setting(random_model: Callable[..., Decoder], name: str, seed: int) -> None:
    config = EngineConfig(**{"block_size": 8} | CONFIGS[name])  # type: ignore[arg-type]
    steps = agree(random_model(max_position_embeddings=512), by_step(load(30, seed, 10.0, 200, 40), 0.02), config)
    if name == "preempted":
        assert any(step.preempted for step in steps)
    assert {row.request_id for step in steps for row in step.rows} == {f"{seed}-{i}" for i in range(30)}


def test_closed_loops_agree_too(random_model: Callable[..., Decoder]) -> None:
    stream = workload("agents", num_requests=24, arrivals=ClosedLoop(num_users=3, think=0.0))
    arrivals = by_step(shrunk(stream, 300, 20, 0.2), 0.02)
    config = EngineConfig(num_blocks=100, max_num_batched_tokens=100)
    steps = agree(random_model(max_position_embeddings=512), arrivals, config)
    assert max(len(step.rows) for step in steps) == 3


def test_another_prefix_is_another_plan(random_model: Callable[..., Decoder]) -> None:
    """What is compared can differ: one page that is somebody else's in the simulator, and the plans part."""
    model, config = random_model(max_position_embeddings=512), EngineConfig(num_blocks=200)
    requests = [request("a", 0.0, 200, 5, prefix=1), request("b", 1.0, 200, 5, prefix=1)]
    real = real_steps(model, by_step(requests, 0.1), config)
    other = replace(requests[1], pages=(5, *requests[1].pages[1:]))
    simulated = simulated_steps(by_step([requests[0], other], 0.1), COST, config, 512)
    assert same_plans(simulated, real) == 5  # the first ran alone for five steps
    with pytest.raises(RuntimeError, match="differ from step 5 on"):
        compare(simulated, [real])
    assert same_plans(real[:3], real) == 3


def test_the_comparison_reports_the_error_of_the_least_disturbed_run() -> None:
    arrivals = by_step(load(6, 1, 5.0), 0.02)
    simulated = simulated_steps(arrivals, COST, EngineConfig(num_blocks=400), 2048)
    slow = [replace(step, seconds=2 * step.seconds) for step in simulated]
    late = [replace(step, seconds=1.25 * step.seconds) for step in simulated]
    found = compare(simulated, [slow, late])
    assert found["error_of_a_step"] == {
        "median": pytest.approx(0.2), "p90": pytest.approx(0.2), "sum": pytest.approx(-0.2)
    }  # fmt: skip
    assert found["two_runs_of_the_real_engine"]["sum"] == pytest.approx(0.6)
    assert found["steps"] == {"simulated": len(simulated), "real": len(simulated)}
    assert found["requests"] == 6


def test_measured_steps_have_the_shape_that_was_asked_for(random_model: Callable[..., Decoder]) -> None:
    """The bench checks every step's rows itself; here also how much is in the cache, and that all is given back."""
    model = random_model(max_position_embeddings=512)
    shapes = [Shape((1, 1, 1), (40, 7, 90)), Shape((30,), (0,)), Shape((30,), (64,)), Shape((1, 1, 20), (9, 33, 50))]
    shapes.append(Shape((5, 12, 8), (0, 0, 0)))
    seen: list[list[tuple[int, int]]] = []
    forward = type(model).forward

    def watch(self: Decoder, batch: object, *rest: object) -> object:
        lens = zip(batch.query_lens, batch.context_lens, strict=True)  # type: ignore[attr-defined]
        seen.append(sorted((n, end - n) for n, end in lens))
        return forward(self, batch, *rest)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(model), "forward", watch)
        found = measure(model, shapes, EngineConfig(num_blocks=60), rounds=2)
    assert [m.shape for m in found] == shapes
    assert all(m.seconds > 0 for m in found)
    for shape in shapes:
        assert sorted(zip(shape.new_tokens, shape.past_tokens, strict=True)) in seen


def test_several_threads_are_refused(random_model: Callable[..., Decoder]) -> None:
    torch.set_num_threads(2)
    with pytest.raises(RuntimeError, match="OMP_NUM_THREADS=1"):
        measure(random_model(), [Shape((1,), (5,))])
