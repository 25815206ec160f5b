"""Brings an engine into the state to profile, and runs torch's profiler around some of its steps."""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from reference_impl.assembly.engine import Engine
from reference_impl.bench.profiling.alignment import Alignment
from reference_impl.bench.profiling.events import SMALLEST, STEP, Recorded, read
from reference_impl.bench.profiling.explain import Machine
from reference_impl.bench.profiling.labels import PREFIX, labelled
from reference_impl.interfaces import Row, SamplingParams

Phase = Literal["decode", "prefill"]
WARM_STEPS = 3


@dataclass(frozen=True)
class Profile:
    """A profile. recorded: on a GPU all steps that were profiled, on a CPU one (Recorded.undisturbed). rows: of these
    steps. plain_seconds: of a step without the profiler. file: torch's Chrome trace of all.
    """

    recorded: Recorded
    machine: Machine
    plain_seconds: float
    rows: list[tuple[Row, ...]]
    file: dict[str, Any]
    alignment: Alignment

    @property
    def step_seconds(self) -> float:
        """Mean seconds of a step under the profiler."""
        return statistics.mean(end - start for start, end in self.recorded.steps)


def record(engine: Engine, phase: Phase, batch: int, context: int, steps: int) -> Profile:
    """Profiles `steps` steps in which `batch` requests decode after `context` tokens, or prefill that many.

    Raises ValueError where that many do not fit into a step or into the cache.
    """
    machine = measure(engine.model.device, engine.model.dtype)
    gpu = engine.model.device.type == "cuda"
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * gpu
    load = _Load(engine, phase, batch, context, num_tokens(batch, context, steps, engine.config.max_num_batched_tokens))
    for _ in range(WARM_STEPS):
        load.step()
    plain = [_plain_step(load) for _ in range(steps)]
    brackets = []
    # One session in a process: CUPTI of CUDA 13.0 reports a second one wrongly, or not at all.
    with profile(activities=activities, record_shapes=True) as profiler:
        smallest_operators(engine.model.device)
        for _ in range(WARM_STEPS):  # a profiler that has just begun delays the first one
            load.step()
        _wait(engine)
        first = len(engine.trace.steps())
        with labelled(engine):
            for number in range(steps):
                load.prepare()
                before = engine.clock.now()
                with record_function(f"{PREFIX}{STEP}{number}"):
                    engine.step()
                brackets.append((before, engine.clock.now()))
        _wait(engine)
    load.leave()
    file = _exported(profiler)
    recorded = read(file, gpu)
    rows = [step.rows for step in engine.trace.steps()[first:]]
    if not rows or any(len(r) != batch for r in rows):
        raise ValueError(f"expected steps of {batch} requests, got {[len(r) for r in rows]}: do they fit the KV cache?")
    alignment = Alignment.of(recorded.steps, brackets)
    small = replace(machine, smallest=recorded.smallest)
    if gpu:
        return Profile(recorded, small, statistics.mean(plain), rows, file, alignment)
    number, recorded = recorded.undisturbed()
    return Profile(recorded, small, min(plain), [rows[number]], file, alignment)


def num_tokens(batch: int, context: int, steps: int, budget: int) -> int:
    """Most tokens of output that a decoding request needs: some decode already while others' prompts are read."""
    return 2 * steps + 2 * WARM_STEPS + 4 + 2 * -(-batch * context // budget)


def _plain_step(load: _Load) -> float:
    load.prepare()
    began = time.perf_counter()
    load.engine.step()  # a GPU's step is waited for by itself, or by the next one
    return time.perf_counter() - began


class _Load:
    """The requests that keep an engine in the state to profile."""

    def __init__(self, engine: Engine, phase: Phase, batch: int, context: int, tokens: int):
        self.engine, self.phase, self.batch, self.context, self.tokens = engine, phase, batch, context, tokens
        self.random = random.Random(0)
        if phase == "decode":
            self._add(tokens)
            while any(not request.output_tokens for request in engine.requests.values()):
                engine.step()

    def _add(self, max_tokens: int) -> None:
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        vocabulary = self.engine.model.config.vocab_size
        for _ in range(self.batch):
            prompt = [self.random.randrange(vocabulary) for _ in range(self.context)]
            self.engine.add(prompt, sampling)

    def prepare(self) -> None:
        """Makes ready for a step: new prompts, if prefill is profiled."""
        if self.phase == "prefill":
            self._add(1)

    def step(self) -> None:
        self.prepare()
        self.engine.step()

    def leave(self) -> None:
        for request_id in list(self.engine.requests):
            self.engine.abort(request_id)


def _wait(engine: Engine) -> None:
    if engine.model.device.type == "cuda":
        torch.cuda.synchronize(engine.model.device)


def _exported(profiler: profile) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        found: dict[str, Any] = json.loads(path.read_text("utf-8"))
        return found


# --- the machine ------------------------------------------------------------------------------------------------------


def measure(device: torch.device, dtype: torch.dtype) -> Machine:
    """Bandwidth of a copy and rate of a product of this dtype; `smallest` is measured under the profiler.

    Limits are the best of this machine in several runs. A CPU without arithmetic of a 16-bit dtype can compute in
    float32, and is far slower in torch's own product of that dtype: the faster of both counts.
    """
    gpu = device.type == "cuda"
    source = torch.ones((256 if gpu else 16) << 20, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    copying = _seconds(lambda: target.copy_(source), device)
    size = 8192 if gpu else 512
    multiplying = {}
    for of in {dtype} if gpu or dtype.itemsize > 2 else {dtype, torch.float32}:
        a = torch.randn(size, size, device=device).to(of)  # on a GPU equal numbers multiply faster
        multiplying[str(of).removeprefix("torch.")] = _seconds(partial(torch.mm, a, a), device)
    fastest = min(multiplying, key=multiplying.__getitem__)
    return Machine(2 * source.nbytes / copying, 2 * size**3 / multiplying[fastest], 0.0, fastest)


def _seconds(run: Callable[[], Any], device: torch.device, rounds: int = 7) -> float:
    """Seconds of the shortest of several runs, after one to warm up."""
    run()
    return min(_timed(run, device) for _ in range(rounds))


def _timed(run: Callable[[], Any], device: torch.device) -> float:
    if device.type != "cuda":
        began = time.perf_counter()
        run()
        return time.perf_counter() - began
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(1_000_000)  # clocks of the GPU: the host launches meanwhile
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def smallest_operators(device: torch.device, count: int = 50) -> None:
    """Runs operators on one number, for the profiler to see what one costs at least."""
    one = torch.zeros(1, device=device)
    with record_function(PREFIX + SMALLEST):
        for _ in range(count):
            one.add_(1)
