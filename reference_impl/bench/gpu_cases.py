"""The table of the GPU bench (at the end), and how each case is measured: the most important first, since when the time
is up the last cases are left out.

Decoding is timed by the host's clock, from the moment a step's tokens are there to the same moment some steps later:
what a user sees, with whatever the host and the GPU do at the same time.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from reference_impl.assembly.llm import LLM, Generation
from reference_impl.bench import harness, kernel_cases, kernels
from reference_impl.bench.gpu_bounds import work_of
from reference_impl.bench.gpu_engines import TOKENS, Bench, Tokens, greedy, prompts_of, requests, statistics_of, timed
from reference_impl.bench.gpu_peers import PEER_ROWS, peers
from reference_impl.bench.gpu_rows import Row
from reference_impl.interfaces import SamplingParams

LONG_GAP = 5e-6  # seconds: longer than any gap between two kernels of one graph
GRAPH_KERNELS = 1000


# Decoding: one stream, a sweep of batch sizes, experts, and how long the GPU is idle.


@dataclass(frozen=True)
class Decoding:
    """Requests of an engine that all decode."""

    llm: LLM
    running: list[Generation]

    def step(self) -> None:
        """Runs a step. Raises RuntimeError if a request got no token: then the window would time something else."""
        got = len(self.llm.step().tokens)
        if got != len(self.running):
            raise RuntimeError(f"a decoding step gave {got} tokens to {len(self.running)} requests")

    def context(self) -> float:
        return statistics.mean(generation.request.num_computed_tokens for generation in self.running)


@contextlib.contextmanager
def decoding(llm: LLM, prompts: Tokens, steps: int, warm: int = 8) -> Iterator[Decoding]:
    """Computes all prompts, and yields when all requests decode, for at least `steps` steps after `warm` others."""
    sampling = greedy(steps + warm + 8 + len(prompts))
    running: list[Generation] = []
    try:
        running += (llm.start(prompt, sampling) for prompt in prompts)
        waits_for = {generation.request.id for generation in running}
        while waits_for:
            waits_for.difference_update(llm.step().tokens)
        found = Decoding(llm, running)
        for _ in range(warm):
            found.step()
        yield found
    finally:
        for generation in running:
            llm.leave(generation)


def steady(
    bench: Bench, name: str, llm: LLM, prompts: Tokens, windows: int, steps: int, warm: int = 8
) -> Row:  # fmt: skip
    """A row of windows of equal steps in which all requests decode; the limit: steps in which each has the mean
    context."""
    windows, steps = bench.pick((windows, steps), (2, 2))
    with decoding(llm, prompts, windows * steps, bench.pick(warm, 2)) as running:
        marks, contexts = [time.perf_counter()], [running.context()]
        for _ in range(windows):
            for _ in range(steps):
                running.step()
            marks.append(time.perf_counter())
            contexts.append(running.context())
    seconds = [(b - a) / steps for a, b in itertools.pairwise(marks)]
    means = [(a + b) / 2 for a, b in itertools.pairwise(contexts)]
    count, context, work = len(prompts), statistics.median(means), work_of(llm.engine)
    return Row(
        name, TOKENS, harness.spread([count / s for s in seconds]),
        bench.limit(lambda limits: count / work.decode_seconds([context] * count, limits)),
        note=f"context {context:.0f}",
        detail={"step_seconds": seconds, "contexts": means, "executor": statistics_of(llm)},
    )  # fmt: skip


def one_stream(bench: Bench, name: str, shape: str, **options: Any) -> Iterator[Row]:
    """Measures a prompt of 1,024 tokens, then 8 windows of 32 greedy tokens."""
    yield steady(bench, name, bench.llm(shape, **options), prompts_of(1, bench.pick(1024, 24)), 8, 32, 16)


def sweep(bench: Bench, shape: str, sizes: tuple[int, ...], metric: str) -> Iterator[Row]:
    """Measures windows of 16 steps at each batch size, contexts of 512 and a few more."""
    for size in sizes:
        bench.need(3 + size / 40)
        prompts = prompts_of(bench.pick(size, min(size, 4)), bench.pick(512, 12))
        yield steady(bench, metric.format(size), bench.llm(shape), prompts, 5, 16)


def idle(bench: Bench, shape: str = "qwen3-0.6b") -> Iterator[Row]:
    """Steps of 256 requests, first by the clock, then under torch's profiler, which records when a kernel runs.

    idle = 1 - (time in which a kernel runs, per step, from the profile) / (a step by the clock, without the profiler).
    "Waits for the host" is the same without the short gaps, which lie between a graph's kernels.
    """
    size, steps, on_gpu = bench.pick(256, 4), bench.pick(16, 2), bench.device.type == "cuda"
    llm, kind = bench.llm(shape), "CUDA" if on_gpu else "CPU"
    with decoding(llm, prompts_of(size, bench.pick(512, 12)), (bench.rounds + 2) * steps) as running:
        walls, host = [], []
        with waiting(llm) as waited:
            for _ in range(bench.rounds):
                began, before = time.perf_counter(), sum(waited)
                for _ in range(steps):
                    running.step()
                walls.append((time.perf_counter() - began) / steps)
                host.append(walls[-1] - (sum(waited) - before) / steps)
        bench.wait()
        with torch.profiler.profile(activities=[getattr(torch.profiler.ProfilerActivity, kind)]) as profile:
            for _ in range(steps):
                running.step()
            bench.wait()
    spans = [
        (event.time_range.start * 1e-6, event.time_range.end * 1e-6)
        for event in profile.events()
        if event.device_type.name == kind and not getattr(event, "is_user_annotation", False)
    ]
    busy, short = (seconds / steps for seconds in busy_seconds(spans))
    if busy == 0:
        raise RuntimeError("the profile has no kernels: this torch cannot trace this GPU (CUPTI)")
    if on_gpu:  # a CPU's operators are slower while they are profiled
        check_profile(busy, max(walls))
    detail = {
        "wall_seconds_per_step": walls, "kernel_seconds_per_step": busy, "kernels_per_step": len(spans) / steps,
        "short_gaps_seconds_per_step": short, "requests": size, "steps": steps, "executor": statistics_of(llm),
    }  # fmt: skip
    for name, values, unit, note in (
        (IDLE_ROWS[0], [100 * max(0.0, 1 - busy / s) for s in walls], "%",
         "1 - time of kernels in a profile / a step by the clock"),
        (IDLE_ROWS[1], [100 * max(0.0, 1 - (busy + short) / s) for s in walls], "%",
         "the same, without gaps below 5 µs"),
        (IDLE_ROWS[2], [1e6 * s for s in host], "µs", "a step by the clock less the time in executor.collect"),
    ):  # fmt: skip
        yield Row(name, unit, harness.spread(values), less_is_better=True, note=note, detail=detail)
        detail = {}


def check_profile(busy: float, wall: float) -> None:
    """Raises RuntimeError where kernels run for longer than the step that they are part of. Seconds per step."""
    if busy > 1.1 * wall:
        raise RuntimeError(
            f"kernels run for {1e6 * busy:.0f} µs of a step in the profile, and a step without it takes "
            f"{1e6 * wall:.0f} µs at most: the profile cannot be right"
        )


def busy_seconds(spans: list[tuple[float, float]]) -> tuple[float, float]:
    """(time in which at least one kernel runs, sum of the gaps of at most LONG_GAP between kernels)."""
    busy = short = 0.0
    until = float("-inf")
    for start, end in sorted(spans):
        short += start - until if 0 < start - until <= LONG_GAP else 0.0
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    return busy, short


@contextlib.contextmanager
def waiting(llm: LLM) -> Iterator[list[float]]:
    """Yields the seconds of each call of executor.collect, where the host waits for the device, and nowhere else."""
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


# Whole requests: nano-vllm's benchmark, prefill alone, `transformers`.


def workload(bench: Bench, name: str, **options: Any) -> Iterator[Row]:
    """nano-vllm's workload: temperature 0.6, no request stops early, after a short warm-up; output over seconds of
    generate."""
    llm, longest = bench.llm("qwen3-0.6b", **options), bench.pick((256, 1024, 1024), (6, 24, 8))
    prompts, outputs = requests(*longest)
    sampling = [SamplingParams(max_tokens=n, temperature=0.6, ignore_eos=True, seed=i) for i, n in enumerate(outputs)]
    llm.engine.capture_graphs(2048)  # otherwise within what is timed
    llm.generate([[1, 2, 3, 4]], SamplingParams(max_tokens=16, temperature=0.6, ignore_eos=True))  # their warm-up
    seconds, collected = list[float](), list[dict[str, float]]()
    for turn in range(bench.pick(3, 1)):
        if turn and bench.left < 2 * max(seconds):
            break
        with collecting() as pauses:
            seconds.append(timed(bench, llm, prompts, sampling)[0])
        collected.append({"seconds": sum(pauses), "longest": max(pauses, default=0.0), "runs": len(pauses)})
    work, lengths, steps = work_of(llm.engine), [len(p) for p in prompts], llm.engine.trace.steps()
    yield Row(
        name, TOKENS, harness.spread([sum(outputs) / s for s in seconds]),
        bench.limit(lambda limits: sum(outputs) / work.workload_seconds(lengths, outputs, limits)),
        note=f"{sum(lengths):,} tokens in, {sum(outputs):,} out; prefix cache off",
        detail={
            # Preempting: 0 where the cache has room for all.
            "seconds": seconds, "steps": {"steps": len(steps), "preempting": sum(bool(s.preempted) for s in steps)},
            "executor": statistics_of(llm), "garbage_collector": collected,
        },
    )  # fmt: skip


@contextlib.contextmanager
def collecting() -> Iterator[list[float]]:
    """Yields the seconds of each run of Python's garbage collector meanwhile: the host does nothing else during one."""
    seconds, began = list[float](), [0.0]

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            began[0] = time.perf_counter()
        else:
            seconds.append(time.perf_counter() - began[0])

    gc.callbacks.append(note)
    try:
        yield seconds
    finally:
        gc.callbacks.remove(note)


def prefill(bench: Bench, name: str, count: int, length: int) -> Iterator[Row]:
    """Measures prompts computed in one step, until each has its first token."""
    llm, length = bench.llm("llama-3-8b"), bench.pick(length, 100)
    runs = bench.pick(bench.rounds, 1) + 1  # the first warms up
    seconds = [timed(bench, llm, prompts_of(count, length), [greedy(1)] * count)[0] for _ in range(runs)][1:]
    tokens, flops = count * length, count * work_of(llm.engine).prefill_flops(length)
    rates = harness.spread([tokens / s for s in seconds])
    yield Row(
        name, TOKENS, rates, bench.limit(lambda limits: tokens * limits.matrix / flops),
        note=f"{flops * rates['median'] / tokens / 1e12:.0f} TFLOP/s of the model's operations",
        detail={"seconds": seconds, "flops": flops},
    )  # fmt: skip


# The machine, and its kernels.


def limits(bench: Bench) -> Iterator[Row]:
    """Measures what this machine does at best, as in the bench of kernels; all other limits are counted from this."""
    bench.stamp = harness.stamp() | harness.gpu_state()
    bench.raw_limits = kernels.limits(bench)
    for metric, name, unit in zip(LIMIT_ROWS, ("copy", "16 bits", "fp8"), ("TB/s", *["TFLOP/s"] * 2), strict=False):
        value = bench.raw_limits[name] * 1e-12
        yield Row(metric, unit, harness.spread([value])) if value else Row(metric, problem="torch has none here")
    gaps = launch_gap(bench)
    bench.raw_limits["launch_gap"] = statistics.median_high(gaps)
    yield Row(LIMIT_ROWS[3], "µs", harness.spread([1e6 * gap for gap in gaps]), less_is_better=True,
              note="from one tiny kernel to the next, with the kernel")  # fmt: skip


def launch_gap(bench: Bench) -> list[float]:
    """Seconds from the start of one kernel that does almost nothing to the next, in a graph of many."""
    x = torch.zeros(1, device=bench.device)

    def launch() -> None:
        for _ in range(GRAPH_KERNELS):
            x.add_(1)

    run = launch
    if bench.device.type == "cuda":
        x.add_(1)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launch()
        run = graph.replay
    return [seconds / GRAPH_KERNELS for seconds in kernels.timed({"launches": run}, bench, rounds=5)[0]["launches"]]


def kernels_with_goals(bench: Bench) -> Iterator[Row]:
    """Measures kernels that have a goal, in so short a time that no peer is compiled. A dry run checks two."""
    return kernel_rows(bench, KERNELS, bench.pick(len(KERNELS), 2), 15)


def every_kernel(bench: Bench) -> Iterator[Row]:
    """Measures all kernels, of whose names `bench.only` is a part, beside peers that are compiled, too."""
    chosen = [case for case in kernel_cases.CASES if bench.only in kernels.METRIC.format(case.name)]
    return kernel_rows(bench, chosen, len(chosen), bench.left)


def kernel_rows(bench: Bench, cases: Sequence[kernels.Case], count: int, seconds: float) -> Iterator[Row]:
    """Measures the first `count` kernels one after another, while there is time; each has `seconds` at most."""
    place = kernels.Place(bench.device, bench.pick(bench.dtype, torch.float16), bench.tiny)
    for number, case in enumerate(cases):
        if bench.left < 5 or number >= count:
            yield case.row("left out: `bench kernels` has them all, with more --seconds")
            continue
        deadline = min(bench.deadline, time.monotonic() + seconds)
        try:
            yield kernels.measure(case, place, bench.raw_limits, deadline)
        except Exception as error:  # what stops one kernel must not hide the others
            yield case.row(kernels.said(error))


@dataclass(frozen=True)
class Case:
    """A case. rows: the metrics that `run` gives, one after another. seconds: how long it takes, with its kernels
    compiled ahead (an estimate, until a GPU has been measured); with less time left it does not begin."""

    name: str
    rows: tuple[str, ...]
    seconds: float
    run: Callable[[Bench], Iterator[Row]]


def _one(name: str, seconds: float, run: Callable[..., Iterator[Row]], *given: Any, **options: Any) -> Case:
    return Case(name, (name,), seconds, lambda bench: run(bench, name, *given, **options))


def _sweep(shape: str, seconds: float, sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)) -> Case:
    metric = f"decode, context 512, {shape} bf16, B {{}}"
    rows = tuple(metric.format(size) for size in sizes)
    return Case(metric.format("1-256"), rows, seconds, lambda bench: sweep(bench, shape, sizes, metric))


def _metrics(cases: Sequence[kernels.Case]) -> tuple[str, ...]:
    return tuple(kernels.METRIC.format(case.name) for case in cases)


STREAM, BATCH = "one stream, context 1k, {}", "256 requests of nano-vllm, qwen3-0.6b {}"
LIMIT_ROWS = ("copy bandwidth", "matrix products, 16 bits", "matrix products, FP8", "launch gap in a graph")
IDLE_ROWS = ("GPU idle, qwen3-0.6b, B 256", "GPU waits for the host, same", "work of the host per step, same")
KERNELS = [case for case in kernel_cases.CASES if case.goal is not None]
LIMITS = Case("limits", LIMIT_ROWS, 12, limits)
EVERY_KERNEL = Case("every kernel", _metrics(kernel_cases.CASES), 90, every_kernel)  # `bench kernels`
CASES = [
    _one(BATCH.format("bf16"), 40, workload),
    _one(STREAM.format("llama-3-8b bf16"), 25, one_stream, "llama-3-8b"),
    _one(STREAM.format("qwen3-0.6b bf16"), 8, one_stream, "qwen3-0.6b"),
    _one(STREAM.format("llama-3-8b FP8 linears"), 22, one_stream, "llama-3-8b", quantization="fp8"),
    _one(STREAM.format("llama-3-8b W4"), 22, one_stream, "llama-3-8b", quantization="int4"),
    _one(BATCH.format("FP8 KV"), 32, workload, kv_dtype="fp8"),
    Case("peers", PEER_ROWS, 51, peers),
    _one("prefill, llama-3-8b bf16, 8k", 15, prefill, 1, 8128),
    _one("prefill, llama-3-8b bf16, 2 x 8k", 15, prefill, 2, 8128),
    _sweep("qwen3-0.6b", 20),
    Case("GPU idle", IDLE_ROWS, 15, idle),
    _sweep("llama-3-8b", 30),
    Case("kernels", _metrics(KERNELS), 20, kernels_with_goals),
    _sweep("qwen3-30b-a3b", 60, (1, 64)),
]

# From the project's list of goals: goal, stretch, unit.
GOALS: dict[str, tuple[float, float | None, str]] = {
    BATCH.format("bf16"): (28_000, 31_000, TOKENS),
    BATCH.format("FP8 KV"): (40_000, 45_000, TOKENS),
    STREAM.format("llama-3-8b bf16"): (240, 262, TOKENS),
    STREAM.format("llama-3-8b FP8 linears"): (420, 480, TOKENS),
    STREAM.format("llama-3-8b W4"): (600, 700, TOKENS),
    STREAM.format("qwen3-0.6b bf16"): (1900, 2500, TOKENS),
    IDLE_ROWS[0]: (2, None, "%"),
}


def with_goal(row: Row) -> Row:
    """The row with its goal, also where nothing was measured, so that missing figures show."""
    goal, stretch, unit = GOALS.get(row.metric, (row.goal, row.stretch, row.unit))
    return replace(row, goal=goal, stretch=stretch, unit=unit, less_is_better=row.less_is_better or unit == "%")
