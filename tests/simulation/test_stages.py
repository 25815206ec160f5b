"""A simulated GPU of several pipeline stages: no work is lost, and none is done twice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from reference_impl.assembly.config import EngineConfig
from reference_impl.assembly.engine import Engine
from reference_impl.assembly.parts import Parts
from reference_impl.interfaces import SamplingParams
from reference_impl.simulation.executor import SimulatedGPU, hollow_model


class PerToken:
    """A step of n tokens takes n seconds."""

    bytes_per_token = 4096.0

    def __init__(self) -> None:
        self.total = 0.0

    def step_seconds(self, new_tokens: Sequence[int], past_tokens: Sequence[int]) -> float:
        self.total += sum(new_tokens)
        return float(sum(new_tokens))


def serve(num_stages: int, num_requests: int, prompt: int = 8, output: int = 16, **options: Any) -> SimulatedGPU:
    """The GPU when all is done."""
    cost, nothing = PerToken(), object()
    gpu = SimulatedGPU(cost, num_stages=num_stages)
    parts = Parts(executor=gpu, clock=gpu, kv_cache=nothing, attention=nothing)  # type: ignore[arg-type]
    options = {"num_blocks": 400, "prefix_cache": "off"} | options
    engine = Engine(hollow_model(61, 512, 4096), EngineConfig(**options), parts)
    assert engine.depth == num_stages
    requests = [engine.add([1] * prompt, SamplingParams(max_tokens=output, temperature=0)) for _ in range(num_requests)]
    while engine.has_work():
        before = gpu.time
        engine.step()
        assert gpu.time >= before
    assert [len(request.output_tokens) for request in requests] == [output] * num_requests
    assert engine.kv.num_available == engine.num_blocks
    steps = engine.trace.steps()
    assert sum(row.num_tokens for step in steps for row in step.rows) == num_requests * (prompt + output - 1)
    assert cost.total == num_requests * (prompt + output - 1), "each token is computed once"
    ends = [step.finished_at for step in steps]
    assert ends == sorted(ends)
    assert gpu.time == ends[-1] >= cost.total / num_stages, "each stage computes its part of every token"
    return gpu


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
@pytest.mark.parametrize("num_requests", [1, 4, 12])
@pytest.mark.parametrize("budget", [3, 2048])
def test_every_token_is_computed_once_and_in_order(num_stages: int, num_requests: int, budget: int) -> None:
    serve(num_stages, num_requests, max_num_batched_tokens=budget)


@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_enough_requests_keep_all_stages_busy_and_one_request_has_one_stage_at_a_time(num_stages: int) -> None:
    """12 requests decode in steps of 12 / S tokens, S in flight; the prompts are read as one step of 96 tokens."""
    assert serve(num_stages, 12).time == pytest.approx(
        96 + 15 * 12 / num_stages + (num_stages - 1) * 12 / num_stages**2
    )
    assert serve(num_stages, 1).time == 8 + 15


@pytest.mark.parametrize("num_stages", [2, 4])
def test_the_chunks_of_one_prompt_fill_the_stages(num_stages: int) -> None:
    """62 chunks of 8 tokens: each stage computes 62 parts in a row, the last begins when the first chunk has come."""
    assert serve(num_stages, 1, 512 - 16, 1, max_num_batched_tokens=8).time == (62 + num_stages - 1) * 8 / num_stages
