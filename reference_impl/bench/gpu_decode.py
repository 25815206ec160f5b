"""Decoding on the GPU bench: one stream, a sweep of batch sizes, experts, and how long the GPU is idle.

Timed by the host's clock, from the moment a step's tokens are there to the same moment some steps later: what
a user sees, with whatever the host and the GPU do at the same time.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from reference_impl.assembly.llm import LLM, Generation
from reference_impl.bench import harness
from reference_impl.bench.gpu_engines import Bench, statistics_of
from reference_impl.bench.gpu_rows import Row
from reference_impl.interfaces import SamplingParams

IDLE_ROWS = ("GPU idle, qwen3-0.6b, B 256", "GPU waits for the host, same", "work of the host per step, same")
LONG_GAP = 5e-6  # seconds: longer than any gap between two kernels of one graph


@dataclass(frozen=True)
class Steady:
    """Seconds of a step in each window of equal steps in which all requests decode; and the mean context in each."""

    step_seconds: list[float]
    contexts: list[float]
    requests: int

    @property
    def context(self) -> float:
        return statistics.median(self.contexts)

    def tokens_per_second(self) -> dict[str, float]:
        return harness.spread([self.requests / s for s in self.step_seconds])


class Decoding:
    """`with Decoding(llm, prompts, steps)`: all prompts are computed, and all requests decode, for at least `steps`."""

    def __init__(self, llm: LLM, prompts: list[list[int]], steps: int, warm: int = 8):
        self.llm, self.prompts, self.steps, self.warm = llm, prompts, steps + warm + 8, warm
        self.running: list[Generation] = []

    def __enter__(self) -> Decoding:
        sampling = SamplingParams(max_tokens=self.steps + len(self.prompts), temperature=0, ignore_eos=True)
        try:
            for prompt in self.prompts:
                self.running.append(self.llm.start(prompt, sampling))
            waits_for = {generation.request.id for generation in self.running}
            while waits_for:
                waits_for.difference_update(self.llm.step().tokens)
            for _ in range(self.warm):
                self.step()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for generation in self.running:
            self.llm.leave(generation)

    def step(self) -> None:
        """RuntimeError if a request got no token: then the window would time something else."""
        got = len(self.llm.step().tokens)
        if got != len(self.running):
            raise RuntimeError(f"a decoding step gave {got} tokens to {len(self.running)} requests")

    def context(self) -> float:
        return statistics.mean(generation.request.num_computed_tokens for generation in self.running)


def steady(bench: Bench, llm: LLM, prompts: list[list[int]], windows: int, steps: int, warm: int = 8) -> Steady:
    windows, steps = bench.pick((windows, steps), (2, 2))
    with Decoding(llm, prompts, windows * steps, bench.pick(warm, 2)) as decoding:
        marks, contexts = [time.perf_counter()], [decoding.context()]
        for _ in range(windows):
            for _ in range(steps):
                decoding.step()
            marks.append(time.perf_counter())
            contexts.append(decoding.context())
    seconds = [(b - a) / steps for a, b in itertools.pairwise(marks)]
    means = [(a + b) / 2 for a, b in itertools.pairwise(contexts)]
    return Steady(seconds, means, len(prompts))


def prompts_of(count: int, length: int) -> list[list[int]]:
    """Different ids in each, below any vocabulary here."""
    return [[(7 * i + 13 * j) % 10_000 for j in range(length)] for i in range(count)]


def one_stream(bench: Bench, name: str, shape: str, **options: Any) -> Iterator[Row]:
    """A prompt of 1,024 tokens, then 8 windows of 32 greedy tokens."""
    llm = bench.llm(shape, **options)
    found = steady(bench, llm, prompts_of(1, bench.pick(1024, 24)), 8, 32, 16)
    yield Row(
        name, "tokens/s", found.tokens_per_second(), _limit(bench, llm, found),
        note=f"context {found.context:.0f}", detail=_detail(found, llm),
    )  # fmt: skip


def sweep(bench: Bench, shape: str, sizes: tuple[int, ...], metric: str, **options: Any) -> Iterator[Row]:
    """Windows of 16 steps at each batch size, contexts of 512 and a few more."""
    for size in sizes:
        bench.need(3 + size / 40)
        llm = bench.llm(shape, **options)
        size_here = bench.pick(size, min(size, 4))
        found = steady(bench, llm, prompts_of(size_here, bench.pick(512, 12)), 5, 16)
        yield Row(
            metric.format(size), "tokens/s", found.tokens_per_second(), _limit(bench, llm, found),
            note=f"context {found.context:.0f}", detail=_detail(found, llm),
        )  # fmt: skip


def check_profile(busy: float, wall: float) -> None:
    """RuntimeError where kernels run for longer than the step that they are part of. Seconds per step."""
    if busy > 1.1 * wall:
        raise RuntimeError(
            f"kernels run for {1e6 * busy:.0f} µs of a step in the profile, and a step without it takes "
            f"{1e6 * wall:.0f} µs at most: the profile cannot be right"
        )


def idle(bench: Bench, shape: str = "qwen3-0.6b") -> Iterator[Row]:
    """Steps of 256 requests, first by the clock, then under torch's profiler, which records when a kernel runs.

    idle = 1 - (time in which a kernel runs, per step, from the profile) / (a step by the clock, without the profiler).
    "Waits for the host" is the same without the short gaps, which lie between a graph's kernels. With dependent
    launches there are none: a kernel that waits for the one before has begun.
    """
    size, steps = bench.pick(256, 4), bench.pick(16, 2)
    llm = bench.llm(shape)
    on_gpu = bench.device.type == "cuda"
    kind = torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU
    with Decoding(llm, prompts_of(size, bench.pick(512, 12)), (bench.rounds + 2) * steps) as decoding:
        walls, host = [], []
        with waiting(llm) as waited:
            for _ in range(bench.rounds):
                began, before = time.perf_counter(), sum(waited)
                for _ in range(steps):
                    decoding.step()
                walls.append((time.perf_counter() - began) / steps)
                host.append(walls[-1] - (sum(waited) - before) / steps)
        bench.wait()
        with torch.profiler.profile(activities=[kind]) as profile:
            for _ in range(steps):
                decoding.step()
            bench.wait()
    wanted = "CUDA" if on_gpu else "CPU"
    spans = [
        (event.time_range.start * 1e-6, event.time_range.end * 1e-6)
        for event in profile.events()
        if event.device_type.name == wanted and not getattr(event, "is_user_annotation", False)
    ]
    busy, short = busy_seconds(spans)
    if busy == 0:
        raise RuntimeError("the profile has no kernels: this torch cannot trace this GPU (CUPTI)")
    if on_gpu:  # a CPU's operators are slower while they are profiled
        check_profile(busy / steps, max(walls))
    shares = [100 * max(0.0, 1 - busy / steps / wall) for wall in walls]
    long_gaps = [100 * max(0.0, 1 - (busy + short) / steps / wall) for wall in walls]
    detail = {
        "wall_seconds_per_step": walls, "kernel_seconds_per_step": busy / steps, "kernels_per_step": len(spans) / steps,
        "short_gaps_seconds_per_step": short / steps, "requests": size, "steps": steps, "executor": statistics_of(llm),
    }  # fmt: skip
    yield Row(
        IDLE_ROWS[0], "%", harness.spread(shares), less_is_better=True,
        note="1 - time of kernels in a profile / a step by the clock", detail=detail,
    )  # fmt: skip
    yield Row(
        IDLE_ROWS[1], "%", harness.spread(long_gaps), less_is_better=True, note="the same, without gaps below 5 µs"
    )
    yield Row(
        IDLE_ROWS[2], "µs", harness.spread([1e6 * seconds for seconds in host]), less_is_better=True,
        note="a step by the clock less the time in executor.collect",
    )  # fmt: skip


@contextlib.contextmanager
def waiting(llm: LLM) -> Iterator[list[float]]:
    """Seconds of each call of executor.collect: where the host waits for the device, and nowhere else."""
    executor, seconds = llm.engine.executor, list[float]()
    collect = executor.collect

    def timed(ticket: Any) -> Any:
        began = time.perf_counter()
        try:
            return collect(ticket)
        finally:
            seconds.append(time.perf_counter() - began)

    executor.collect = timed  # type: ignore[method-assign]
    try:
        yield seconds
    finally:
        del executor.collect


def busy_seconds(spans: list[tuple[float, float]]) -> tuple[float, float]:
    """(time in which at least one kernel runs, sum of the gaps of at most LONG_GAP between kernels)."""
    busy = short = 0.0
    until = None
    for start, end in sorted(spans):
        if until is None or start > until:
            if until is not None and start - until <= LONG_GAP:
                short += start - until
            busy += end - start
            until = end
        elif end > until:
            busy += end - until
            until = end
    return busy, short


def _limit(bench: Bench, llm: LLM, found: Steady) -> float | None:
    """Tokens/s of steps in which every request has the mean context."""
    contexts = [found.context] * found.requests
    return bench.limit(lambda limits: found.requests / bench.work(llm).decode_seconds(contexts, limits))


def _detail(found: Steady, llm: LLM) -> dict[str, Any]:
    return {"step_seconds": found.step_seconds, "contexts": found.contexts, "executor": statistics_of(llm)}
