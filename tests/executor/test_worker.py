"""The core's worker, and the one with all features: the same replies to the same messages."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from reference_impl.assembly.config import EngineConfig
from reference_impl.assembly.engine import Engine
from reference_impl.assembly.worker import LocalExecutor
from reference_impl.core.attention import TorchAttention
from reference_impl.core.decoder import Decoder
from reference_impl.core.kv_cache import PagedKVCache
from reference_impl.core.sampler import TorchSampler
from reference_impl.core.worker import StepRun, Worker
from reference_impl.interfaces import Reply, SamplingParams

PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0}, {"temperature": 0.9, "seed": 1}, {"temperature": 0.7, "top_k": 9, "seed": 2, "logprobs": 2},
    {"temperature": 1.1, "top_p": 0.8, "seed": 3}, {"temperature": 1.0, "min_p": 0.05, "seed": 4, "n": 2},
]  # fmt: skip
CONFIG = EngineConfig(block_size=4, num_blocks=20, max_num_seqs=5, max_num_batched_tokens=16, overlap="off")


@pytest.fixture(scope="module")
def recorded(random_model: Any) -> tuple[Engine, list[tuple[bytes, Reply]]]:
    """An engine, and what it sent and received while prompts were cut, shared, preempted and sampled twice."""
    engine = Engine(random_model("float64"), CONFIG)
    submit, collect = engine.executor.submit, engine.executor.collect
    messages: list[bytes] = []
    replies: list[Reply] = []
    engine.executor.submit = lambda step: (messages.append(pickle.dumps(step)), submit(step))[1]  # type: ignore[method-assign]
    engine.executor.collect = lambda run: (replies.append(collect(run)), replies[-1])[1]  # type: ignore[method-assign]
    for i, params in enumerate(PARAMS):
        engine.add([7, 8, 9, 10, 11, *[i] * (9 + i)], SamplingParams(max_tokens=12, **params))
    while engine.has_work():
        engine.step()
    assert any(step.preempted for step in engine.trace.steps())
    return engine, list(zip(messages, replies, strict=True))


def worker_for(engine: Engine, make: Callable[..., Worker]) -> Worker:
    model: Decoder = engine.model
    cache = PagedKVCache(engine.kv_specs, engine.num_blocks, model.dtype, model.device)
    attention = TorchAttention(model.config.attention_scale, model.dtype, None)
    return make(
        model, cache, attention, engine.kv_specs, engine.clock, TorchSampler(),
        max_num_seqs=CONFIG.max_num_seqs, max_len=engine.max_model_len,
    )  # fmt: skip


class AlwaysAsked(LocalExecutor):
    """All features are asked for a part in every step, drafts among them."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        for feature in self.hooks.features:
            feature.every_step = True
        self.requests.every_step = False


@pytest.mark.parametrize("make", [Worker, LocalExecutor, AlwaysAsked], ids=lambda make: make.__name__)
@pytest.mark.parametrize("in_flight", [1, 2])
def test_the_same_messages_get_the_same_replies(make: Any, in_flight: int, recorded: Any) -> None:
    engine, exchanged = recorded
    worker, running, found = worker_for(engine, make), [], []
    for message, _ in exchanged:
        running.append(worker.submit(pickle.loads(message)))
        if len(running) == in_flight:
            found.append(worker.collect(running.pop(0)))
    found += [worker.collect(run) for run in running]
    for mine, (_, expected) in zip(found, exchanged, strict=True):
        assert replace(mine, started_at=0, finished_at=0) == replace(expected, started_at=0, finished_at=0)


def test_a_step_that_asks_for_tokens_alone_is_computed_by_the_core(recorded: Any) -> None:
    engine, exchanged = recorded
    worker = worker_for(engine, LocalExecutor)
    for message, _ in exchanged:
        run = worker.submit(pickle.loads(message))
        worker.collect(run)
        assert type(run) is StepRun
        assert run.parts == []
