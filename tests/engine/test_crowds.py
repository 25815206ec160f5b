"""Crowds: greedy and sampled texts under loads that are as awkward as they come, against each request alone.

Prompts that end exactly at a block or at the budget, tiny pools, host memory of one block, one seat, policies that
throw out who runs, salts of which one begins like another, pins, up to five samples, and aborts of parents and
children, also while their step runs. What is aborted has the beginning of its text; nothing is left of anybody.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from reference_impl.assembly.config import EngineConfig
from reference_impl.assembly.engine import Engine
from reference_impl.assembly.parts import Parts
from reference_impl.assembly.sampler import sample
from reference_impl.core.decoder import Decoder
from reference_impl.core.ranking import FirstCome
from reference_impl.features.pins.engine import Pin
from reference_impl.features.policies import ByPriority, EarliestDeadline, FairShare, ShortestFirst
from reference_impl.features.windows.groups import kv_specs
from reference_impl.interfaces import Request, RequestState, Sampled, SamplingParams

MODELS: dict[str, dict[str, Any]] = {
    "full": {},
    "window": {"architecture": "MistralForCausalLM", "sliding_window": 6},
    "full and windows": {
        "architecture": "Gemma3ForCausalLM", "sliding_window": 5, "num_hidden_layers": 3, "query_pre_attn_scalar": 8,
        "sliding_window_pattern": 2, "hidden_activation": "gelu_pytorch_tanh",
    },
}  # fmt: skip


class PreemptiveShortest(ShortestFirst):
    preemptive = True


POLICIES: tuple[Callable[[], Any], ...] = (
    FirstCome,
    ShortestFirst,
    lambda: PreemptiveShortest(aging=0.5),
    ByPriority,
    lambda: ByPriority(aging=0),
    lambda: EarliestDeadline(seconds_per_token=0.5, preemptive=True),
    lambda: FairShare({"a": 3.0, "b": 0.5}),
)


class StepClock:
    time = 0.0

    def now(self) -> float:
        return self.time


class Crowd:
    def __init__(self, model: Decoder, tapped_engine: Callable, rng: random.Random):
        self.rng, self.clock = rng, StepClock()
        self.block_size, self.budget = rng.choice([1, 2, 3, 4, 5, 8]), rng.choice([1, 2, 7, 16, 100])
        full = model.config.layer_windows == (None,) * len(model.config.layer_windows)
        self.prefix_cache = rng.choice(["hash", "radix", "off"]) if full else "auto"
        self.coming = [(rng.choice([0, 0, rng.randint(0, 15)]), *self.asked()) for _ in range(rng.randint(2, 9))]
        specs = kv_specs(
            model.config.layer_windows, model.config.num_kv_heads, model.config.head_dim, self.block_size,
            bits_per_value=8 * model.dtype.itemsize,
        )  # fmt: skip
        longest = max(len(prompt) + sampling.max_tokens - 1 for _, prompt, sampling, _ in self.coming)
        needed = -(-longest // self.block_size) + (0 if full else 3 + -(-min(self.budget, 40) // self.block_size))
        options: dict[str, Any] = {
            "block_size": self.block_size,
            "num_blocks": needed * len(specs) + rng.choice([0, 0, 1, 2, needed]),
            "max_num_seqs": rng.choice([1, 2, 3, 8]),
            "max_num_batched_tokens": self.budget,
            "prefix_cache": self.prefix_cache,
            "admission": rng.choice(["fill", "fill", "worst_case"]),
        }
        if host := rng.choice([0, 0, 1, 2, 100]):
            options |= {"preemption": "swap", "swap_bytes": host * specs[0].bytes_per_block}
        parts = Parts(policy=rng.choice(POLICIES)(), clock=self.clock, sampler=self.sample)
        self.engine: Engine = tapped_engine(model, rng.randrange(1000), parts, **options)[0]
        self.served: list[tuple[list[int], SamplingParams, list[Request]]] = []
        self.aborted: set[Request] = set()
        self.pins: list[Pin] = []
        self.abort_rate = rng.choice([0.0, 0.0, 0.05])

    def asked(self) -> tuple[list[int], SamplingParams, dict[str, Any]]:
        rng, size, budget = self.rng, self.block_size, self.budget
        length = rng.choice([1, size, 2 * size, 2 * size + 1, 3 * size - 1, budget, budget + 1, rng.randint(1, 24)])
        length = min(length, 40)
        shared = min(length, rng.choice([0, 0, size, 2 * size, length]))
        prompt = random.Random(rng.randint(0, 1)).choices(range(61), k=40)[:shared]
        prompt += random.Random(rng.randint(2, 5)).choices(range(61), k=length - shared)
        sampling = SamplingParams(
            max_tokens=rng.choice([1, 2, size, rng.randint(1, 14)]), temperature=rng.choice([0, 0, 1.0]),
            seed=rng.randint(0, 5), n=rng.choice([1, 1, 1, 2, 3, 5]),
            stop_token_ids=tuple(rng.sample(range(61), rng.choice([0, 0, 6]))),
        )  # fmt: skip
        who = {
            "priority": rng.randint(0, 2), "tenant": rng.choice("abc"), "deadline": rng.choice([None, 10.0, 40.0]),
            "cache_salt": rng.choice([None, None, "", "a", "ab"]),
        }  # fmt: skip
        return prompt, sampling, who

    def sample(self, logits: Any, requests: Any) -> Sampled:
        sampled = sample(logits, requests)
        self.abort_somebody(self.abort_rate)  # its step is running
        return sampled

    def abort_somebody(self, rate: float) -> None:
        if self.engine.requests and self.rng.random() < rate:
            request = self.engine.requests[self.rng.choice(sorted(self.engine.requests))]
            self.aborted |= {request, *request.children}
            self.engine.abort(request.id)

    def move_a_pin(self) -> None:
        if self.pins and self.rng.random() < 0.5:
            self.engine.unpin(self.pins.pop())
        elif self.served:
            try:
                self.pins.append(self.engine.pin(self.rng.choice(self.served)[0]))
            except ValueError:
                event("pin refused")

    def serve(self) -> None:
        for step in itertools.count():
            for number, (arrival, prompt, sampling, who) in enumerate(self.coming):
                if arrival == step:
                    while self.pins:  # they could leave too little room for it
                        self.engine.unpin(self.pins.pop())
                    first = self.engine.add(prompt, sampling, f"r{number}", **who)
                    self.served.append((prompt, sampling, [first, *first.children]))
            self.abort_somebody(self.abort_rate)
            if self.prefix_cache in ("hash", "radix") and self.rng.random() < 0.1:
                self.move_a_pin()
            self.engine.step()
            self.clock.time += 1.0
            assert step < 3000, "it never ends"
            if len(self.served) == len(self.coming) and not self.engine.has_work():
                return

    def check(self, alone: Callable[[list[int], SamplingParams], list[list[int]]]) -> None:
        for prompt, sampling, samples in self.served:
            for request, text in zip(samples, alone(prompt, sampling), strict=True):
                assert request.state is RequestState.FINISHED
                if request in self.aborted:
                    assert request.output_tokens == text[: len(request.output_tokens)]
                else:
                    assert request.output_tokens == text
        for pin in self.pins:
            self.engine.unpin(pin)
        assert self.engine.kv.num_available == self.engine.num_blocks
        if self.engine.num_host_blocks:
            assert self.engine.kv.host.pool.num_free == self.engine.num_host_blocks
        assert self.engine.requests == self.engine.scheduler.requests == self.engine.scheduler.ranks == {}
        for done in self.engine.trace.steps():
            assert sum(row.num_tokens for row in done.rows) <= self.budget
            event(f"preempted: {bool(done.preempted)}, brought back: {bool(done.transfers.swap_in)}")


@pytest.fixture
def serial() -> Callable[..., list[list[int]]]:
    """serial(model, prompt, sampling) -> the texts of a prompt's samples, with an engine to themselves."""
    texts: dict[Any, list[list[int]]] = {}

    def alone(model: Decoder, prompt: list[int], sampling: SamplingParams) -> list[list[int]]:
        key = (*prompt, sampling)
        if key not in texts:
            engine = Engine(model, EngineConfig(block_size=64, num_blocks=40, prefix_cache="off"))
            first = engine.add(prompt, sampling)
            samples = [first, *first.children]
            while engine.has_work():
                engine.step()
            texts[key] = [request.output_tokens for request in samples]
        return texts[key]

    return alone


@pytest.mark.parametrize(
    ("kind", "examples"),
    [
        ("full", 18), ("window", 6), ("full and windows", 8),
        pytest.param("full", 60, marks=pytest.mark.slow),
        pytest.param("window", 20, marks=pytest.mark.slow),
        pytest.param("full and windows", 25, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_a_crowd_gets_the_texts_of_serial_execution(
    kind: str, examples: int, random_model, tapped_engine, serial
) -> None:
    model = random_model("float64", **MODELS[kind])

    @settings(max_examples=examples, deadline=None, derandomize=True, database=None)
    @given(seed=st.integers(0, 2**32))
    def crowd(seed: int) -> None:
        served = Crowd(model, tapped_engine, random.Random(seed))
        served.serve()
        served.check(lambda prompt, sampling: serial(model, prompt, sampling))

    crowd()
