"""What workers report before the first step: compared where it must be the same, and of the rest what each has."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from reference_impl.assembly.checks import settled
from reference_impl.assembly.config import EngineConfig, course_model
from reference_impl.assembly.engine import Engine
from reference_impl.assembly.model import load_model
from reference_impl.assembly.parts import Parts
from reference_impl.assembly.planner_half import PlannerHalf
from reference_impl.assembly.worker_half import WorkerHalf
from reference_impl.features.process.facts import PROTOCOL, Facts, combined
from reference_impl.interfaces import SamplingParams

CONFIG = settled(EngineConfig(num_blocks=14, block_size=8, preemption="swap"), Parts())


@pytest.fixture(scope="module")
def model() -> Any:
    return load_model(course_model("draft"), torch.float32)


@pytest.fixture(scope="module")
def half(model: Any) -> WorkerHalf:
    return WorkerHalf(model, CONFIG, Parts())


def test_an_engine_has_as_many_blocks_as_each_of_its_workers(model: Any, half: WorkerHalf) -> None:
    """And its planner gives no others away."""
    bytes_for_3 = 3 * half.bytes_per_block
    less = dataclasses.replace(CONFIG, num_blocks=9, swap_bytes=bytes_for_3, max_model_len=100)
    asked = Parts(sampler=lambda logits, requests: None)  # type: ignore[arg-type,return-value]
    facts, its = half.facts, WorkerHalf(model, less, asked).facts
    assert (facts.num_blocks, its.num_blocks) == (14, 9)
    both = combined([facts, its])
    assert both == combined([its, facts])
    assert (both.num_blocks, both.num_host_blocks, both.max_model_len) == (9, 3, 100)
    assert both.reads == facts.reads & its.reads
    assert combined([facts]) == facts
    planner = PlannerHalf(CONFIG, Parts(), both, half.executor)
    assert planner.kv.num_available == planner.block_pool.num_free == 9


@pytest.mark.parametrize(
    ("other", "name"),
    [
        ({"dtype": "torch.float64"}, "model"), ({"weights": "abc"}, "model"), ({"protocol": PROTOCOL + 1}, "protocol"),
        ({"page_store": True}, "page_store"), ({"max_num_seqs": 3}, "max_num_seqs"), ({"kv_specs": ()}, "kv_specs"),
    ],
)  # fmt: skip
def test_what_must_be_the_same_is_named_where_it_differs(half: WorkerHalf, other: dict[str, Any], name: str) -> None:
    facts = half.facts
    if name == "model":
        its = dataclasses.replace(facts, model=dataclasses.replace(facts.model, **other))
        assert facts.model.fingerprint != its.model.fingerprint
        expected = f"model: expected '{facts.model.fingerprint}', the worker has '{its.model.fingerprint}'"
    elif name == "kv_specs":  # ranks and stages have heads and layers of their own
        its = dataclasses.replace(facts, **other)
        alike = tuple(dataclasses.replace(s, num_kv_heads=1, num_layers=1, layers=()) for s in facts.kv_specs)
        expected = f"kv_specs: expected {alike!r}, the worker has ()"
    else:
        its = dataclasses.replace(facts, **other)
        expected = f"{name}: expected {getattr(facts, name)!r}, the worker has {getattr(its, name)!r}"
    fewer = dataclasses.replace(its, num_blocks=9)  # which is no difference that matters
    with pytest.raises(ValueError, match="this worker belongs to another engine; start it from the same") as caught:
        combined([facts, fewer])
    assert str(caught.value).endswith(f"version. {expected}")


def test_an_engine_plans_for_an_executor_that_reports_its_facts_without_its_model(model: Any) -> None:
    """Nothing of the model is asked but the facts."""
    request = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)
    texts = []
    for executor in (None, Reporting(WorkerHalf(model, CONFIG, Parts()))):
        given = model if executor is None else executor.facts.model
        engine = Engine(given, EngineConfig(num_blocks=14, block_size=8, preemption="swap"), Parts(executor=executor))
        asked = [engine.add([5 + i, 6, 7] * 9, request) for i in range(3)]
        while engine.has_work():
            engine.step()
        texts.append([r.tokens for r in asked])
        assert hasattr(engine, "kv_cache") == (executor is None)
    assert texts[0] == texts[1]


class Reporting:
    """As a worker somewhere else."""

    def __init__(self, half: WorkerHalf):
        self.facts: Facts = half.facts
        self.submit, self.collect, self.close = half.executor.submit, half.executor.collect, half.executor.close
        self.max_in_flight = half.executor.max_in_flight
