"""Random load, aborts and faults for a while: no text changes, nothing leaks, memory does not drift.

Two loads with each of the options, or as many as fit into INFERLAB_SOAK_SECONDS: `make soak SECONDS=3600` runs as long
as you like.
"""

from __future__ import annotations

import gc
import os
import random
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from reference_impl.assembly.config import EngineConfig
from reference_impl.assembly.engine import Engine
from reference_impl.assembly.parts import Parts
from reference_impl.assembly.sampler import sample
from reference_impl.core.decoder import Decoder
from reference_impl.core.ranking import FirstCome
from reference_impl.features.policies import ByPriority, EarliestDeadline, FairShare, ShortestFirst
from reference_impl.interfaces import Request, Sampled, SamplingParams
from reference_impl.observe.trace import Trace

SECONDS = float(os.environ.get("INFERLAB_SOAK_SECONDS", "0"))
REQUESTS = 40 if SECONDS else 20  # of a load
POLICIES = (FirstCome, ShortestFirst, ByPriority, EarliestDeadline, FairShare)
OPTIONS: tuple[dict[str, Any], ...] = (
    {"prefix_cache": "hash"},
    {"prefix_cache": "radix", "preemption": "swap", "swap_bytes": 200_000},
    {"prefix_cache": "off", "preemption": "swap", "swap_bytes": 20_000},
    {"prefix_cache": "radix", "admission": "worst_case"},
    {"prefix_cache": "hash", "block_size": 7, "max_num_batched_tokens": 5},
)


class Fault(RuntimeError):
    """What a device does now and then."""


class FaultySampler:
    """The step has been computed, its transfers are made, and then it is lost."""

    def __init__(self, rng: random.Random):
        self.rng, self.num_faults = rng, 0

    def __call__(self, logits: torch.Tensor, requests: Any) -> Sampled:
        if self.rng.random() < 0.03:
            self.num_faults += 1
            raise Fault
        return sample(logits, requests)


class Load:
    """One engine under random load until it has served `count` requests; then everything must be as at its start."""

    def __init__(self, model: Decoder, rng: random.Random, number: int):
        self.model, self.rng = model, rng
        self.sampler = FaultySampler(rng)
        options = {"block_size": 4, "num_blocks": 40, "max_num_seqs": 6, "max_num_batched_tokens": 24}
        options |= OPTIONS[number % len(OPTIONS)]
        self.policy = POLICIES[number % len(POLICIES)]()
        self.engine = Engine(model, EngineConfig(**options), Parts(sampler=self.sampler, policy=self.policy))
        self.samples: list[tuple[Request, ...]] = []
        self.num_aborted = 0

    def add(self) -> None:
        rng = self.rng
        prompt = [1, 5, 9, 13, 2, 2, 7, 30] * 4
        prompt = prompt[: rng.choice([0, 0, 8, 21, 32])] + rng.choices(range(61), k=rng.randint(1, 24))
        params = SamplingParams(
            max_tokens=rng.randint(1, 30), temperature=rng.choice([0.0, 1.0]), seed=rng.randrange(2**32),
            n=rng.choice([1, 1, 1, 3]),
        )  # fmt: skip
        first = self.engine.add(
            prompt, params, priority=rng.randint(0, 2), tenant=rng.choice("ab"),
            deadline=rng.choice([None, self.engine.clock.now() + 1.0]), cache_salt=rng.choice([None, None, "s"]),
        )  # fmt: skip
        self.samples.append((first, *first.children))

    def serve(self, count: int) -> None:
        while len(self.samples) < count or self.engine.has_work():
            if len(self.samples) < count and self.rng.random() < 0.3:
                self.add()
            if self.engine.requests and self.rng.random() < 0.05:
                self.engine.abort(self.rng.choice(sorted(self.engine.requests)))
                self.num_aborted += 1
            try:
                self.engine.step()
            except Fault:
                continue  # the same step is planned again

    def check(self) -> None:
        engine = self.engine
        assert engine.requests == {}
        assert engine.kv.num_available == engine.num_blocks
        if engine.num_host_blocks:
            assert engine.kv.host.pool.num_free == engine.num_host_blocks
        assert engine.scheduler.requests == engine.scheduler.ranks == {}
        complete = [s for s in self.samples if not any(r.finish_reason == "abort" for r in s)]
        for samples in self.rng.sample(complete, 3):
            assert [r.output_tokens for r in samples] == self.alone(samples[0])

    def alone(self, request: Request) -> list[list[int]]:
        config = EngineConfig(block_size=64, num_blocks=16, prefix_cache="off")
        engine = Engine(self.model, config)
        first = engine.add(request.tokens[: request.num_prompt_tokens], request.sampling)
        samples = [first, *first.children]
        while engine.has_work():
            engine.step()
        return [r.output_tokens for r in samples]


def resident_mb() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="resident memory is read from Linux's /proc")
def test_under_random_load_nothing_changes_leaks_or_drifts(random_model: Callable) -> None:
    model, rng, until = random_model("float64"), random.Random(17), time.monotonic() + SECONDS
    faults, aborted, preempted, hits = 0, 0, 0, 0
    resident: list[float] = []
    number = 0
    while time.monotonic() < until or number < 2 * len(OPTIONS):
        load = Load(model, rng, number)
        load.serve(REQUESTS)
        load.check()
        faults, aborted = faults + load.sampler.num_faults, aborted + load.num_aborted
        steps = load.engine.trace.steps()
        preempted += sum(len(s.preempted) for s in steps)
        hits += sum(cached > 0 for s in steps for _, cached in s.admitted)
        # The engine lives on, and forgets those it has served.
        left = [weakref.ref(r) for samples in load.samples for r in samples]
        load.samples.clear()
        load.engine.trace = Trace()
        gc.collect()
        assert [r for r in left if r() is not None] == []
        del load, steps
        gc.collect()
        resident.append(resident_mb())
        number += 1
    assert min(faults, aborted, preempted, hits) > 0, "the load was too tame to show anything"
    half = resident[len(resident) // 2 :]
    assert half[-1] - half[0] < 16, f"resident memory drifts: {[round(mb) for mb in resident]} MB"
