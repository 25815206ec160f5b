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
from functools import partial
from typing import Any

import torch
from torch import Tensor

from reference_impl.assembly.llm import LLM, Generation
from reference_impl.bench import harness, kernel_cases, kernels
from reference_impl.bench.gpu_bounds import work_of
from reference_impl.bench.gpu_engines import TOKENS, Bench, Tokens, greedy, prompts_of, requests, statistics_of, timed
from reference_impl.bench.gpu_peers import peers
from reference_impl.bench.gpu_rows import Goal, Row
from reference_impl.bench.profiling.events import busy_seconds
from reference_impl.interfaces import SamplingParams

LONG_GAP = 5e-6  # seconds: longer than any gap between two kernels of one graph
GRAPH_KERNELS = 1000
Metrics = Sequence[str]  # of the rows that a case yields, in order


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


def decode(
    bench: Bench, metrics: Metrics, shape: str, sizes: Sequence[int], context: int, windows: int, steps: int,
    warm: int = 8, **options: Any,
) -> Iterator[Row]:  # fmt: skip
    """Measures windows of equal steps in which all requests decode, at each number of requests in `sizes`, after
    prompts of `context` tokens; the limit: steps in which each has the mean context."""
    windows, steps, warm = bench.pick((windows, steps, warm), (2, 2, 2))
    for metric, size in zip(metrics, sizes, strict=True):
        bench.need(3 + size / 40)
        llm, prompts = bench.llm(shape, **options), prompts_of(bench.pick(size, min(size, 4)), bench.pick(context, 12))
        with decoding(llm, prompts, windows * steps, warm) as running:
            marks, contexts = [time.perf_counter()], [running.context()]
            for _ in range(windows):
                for _ in range(steps):
                    running.step()
                marks.append(time.perf_counter())
                contexts.append(running.context())
        seconds = [(b - a) / steps for a, b in itertools.pairwise(marks)]
        means = [(a + b) / 2 for a, b in itertools.pairwise(contexts)]
        count, mean = len(prompts), statistics.median(means)
        step = bench.limit(partial(work_of(llm.engine).decode_seconds, [mean] * count))  # seconds
        yield Row(
            metric, TOKENS, harness.spread([count / s for s in seconds]), step and count / step,
            note=f"context {mean:.0f}",
            detail={"step_seconds": seconds, "contexts": means, "executor": statistics_of(llm)},
        )  # fmt: skip


one_stream = partial(decode, sizes=(1,), context=1024, windows=8, steps=32, warm=16)
sweep = partial(decode, context=512, windows=5, steps=16)


def idle(bench: Bench, metrics: Metrics, shape: str = "qwen3-0.6b") -> Iterator[Row]:
    """Steps of 256 requests, first by the clock, then under torch's profiler, which records when a kernel runs.

    idle = 1 - (time in which a kernel runs, per step, from the profile) / (a step by the clock, without the profiler).
    "Waits for the host" is the same without the short gaps, which lie between a graph's kernels.
    """
    size, steps, on_gpu = bench.pick(256, 4), bench.pick(16, 2), bench.device.type == "cuda"
    llm, kind = bench.llm(shape), "CUDA" if on_gpu else "CPU"
    with decoding(llm, prompts_of(size, bench.pick(512, 12)), (bench.rounds + 2) * steps) as running:
        walls, host, waited = [], [], waits(llm)
        for _ in range(bench.rounds):
            began = time.perf_counter()
            waited.clear()
            for _ in range(steps):
                running.step()
            walls.append((time.perf_counter() - began) / steps)
            host.append(walls[-1] - sum(waited) / steps)
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
    busy, short = (seconds / steps for seconds in busy_seconds(spans, LONG_GAP))
    if busy == 0:
        raise RuntimeError("the profile has no kernels: this torch cannot trace this GPU (CUPTI)")
    if on_gpu:  # a CPU's operators are slower while they are profiled
        check_profile(busy, max(walls))
    detail = {
        "wall_seconds_per_step": walls, "kernel_seconds_per_step": busy, "kernels_per_step": len(spans) / steps,
        "short_gaps_seconds_per_step": short, "requests": size, "steps": steps, "executor": statistics_of(llm),
    }  # fmt: skip
    figures = (
        ([100 * max(0.0, 1 - busy / s) for s in walls], "%", "1 - time of kernels in a profile / a step by the clock"),
        ([100 * max(0.0, 1 - (busy + short) / s) for s in walls], "%", "the same, without gaps below 5 µs"),
        ([1e6 * s for s in host], "µs", "a step by the clock less the time in executor.collect"),
    )
    for metric, (values, unit, note) in zip(metrics, figures, strict=True):
        yield Row(metric, unit, harness.spread(values), less_is_better=True, note=note, detail=detail)
        detail = {}


def check_profile(busy: float, wall: float) -> None:
    """Raises RuntimeError where kernels run for longer than the step that they are part of. Seconds per step."""
    if busy > 1.1 * wall:
        raise RuntimeError(
            f"kernels run for {1e6 * busy:.0f} µs of a step in the profile, and a step without it takes "
            f"{1e6 * wall:.0f} µs at most: the profile cannot be right"
        )


def waits(llm: LLM) -> list[float]:
    """A list that gets the seconds of each call of executor.collect from now on: there the host waits for the device,
    and nowhere else."""
    executor, seconds = llm.engine.executor, list[float]()
    collect = executor.collect

    def timed(ticket: Any) -> Any:
        began = time.perf_counter()
        reply = collect(ticket)
        seconds.append(time.perf_counter() - began)
        return reply

    executor.collect = timed  # type: ignore[method-assign]
    return seconds


# Whole requests: nano-vllm's benchmark, and prefill alone.


def workload(bench: Bench, metrics: Metrics, **options: Any) -> Iterator[Row]:
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
        with collecting() as marks:
            seconds.append(timed(bench, llm, prompts, sampling)[0])
        pauses = [end - start for start, end in zip(marks[::2], marks[1::2], strict=True)]
        collected.append({"seconds": sum(pauses), "longest": max(pauses, default=0.0), "runs": len(pauses)})
    work, lengths, steps = work_of(llm.engine), [len(p) for p in prompts], llm.engine.trace.steps()
    yield Row(
        metrics[0], TOKENS, harness.spread([sum(outputs) / s for s in seconds]),
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
    """Yields when each run of Python's garbage collector starts and ends: the host does nothing else between them."""
    marks = list[float]()

    def note(phase: str, info: dict[str, int]) -> None:
        marks.append(time.perf_counter())

    gc.callbacks.append(note)
    try:
        yield marks
    finally:
        gc.callbacks.remove(note)


def prefill(bench: Bench, metrics: Metrics, count: int, length: int) -> Iterator[Row]:
    """Measures prompts computed in one step, until each has its first token."""
    llm, length = bench.llm("llama-3-8b"), bench.pick(length, 100)
    runs = bench.pick(bench.rounds, 1) + 1  # the first warms up
    seconds = [timed(bench, llm, prompts_of(count, length), [greedy(1)] * count)[0] for _ in range(runs)][1:]
    tokens, flops = count * length, count * work_of(llm.engine).prefill_flops(length)
    rates = harness.spread([tokens / s for s in seconds])
    yield Row(
        metrics[0], TOKENS, rates, bench.limit(lambda limits: tokens * limits.matrix / flops),
        note=f"{flops * rates['median'] / tokens / 1e12:.0f} TFLOP/s of the model's operations",
        detail={"seconds": seconds, "flops": flops},
    )  # fmt: skip


# The machine, and its kernels.


def limits(bench: Bench, metrics: Metrics) -> Iterator[Row]:
    """Measures what this machine does at best; all other limits are counted from this.

    bench.limits: byte/s of copying (read and written), FLOP/s of a large product in 16 bits and in FP8 (0: torch
    cannot), seconds that two events see with nothing between them (every figure contains them), and seconds from the
    start of one kernel that does almost nothing to the next, in a graph of many.
    """
    bench.stamp = harness.stamp() | harness.gpu_state()
    n, source = bench.pick(8192, 64), torch.ones(bench.pick(2**30, 2**16), dtype=torch.int8, device=bench.device)
    target, a, b = torch.empty_like(source), bench.randn(n, n), bench.randn(n, n)
    codes, one = a.to(kernels.FP8), torch.ones((), device=bench.device)
    fp8 = partial(torch._scaled_mm, codes, codes.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)
    runs: dict[str, kernels.Run] = {"nothing": lambda: None, "copy": lambda: target.copy_(source)}
    runs |= {"16 bits": lambda: a @ b, "fp8": fp8, "launch_gap": launches(bench)}
    try:
        fp8()
    except Exception as error:  # an older GPU, say; the limit of such a case is then that of 16 bits
        print(f"torch has no product in FP8 here: {kernels.said(error)}")
        del runs["fp8"]
    seconds, _ = kernels.timed(runs, bench)
    gaps = [s / GRAPH_KERNELS for s in seconds.pop("launch_gap")]
    least = {name: statistics.median(values) for name, values in seconds.items()}
    work = {"copy": 2.0 * source.numel(), "16 bits": 2.0 * n**3, "fp8": 2.0 * n**3}
    bench.limits = {name: each / least[name] if name in least else 0.0 for name, each in work.items()}
    bench.limits |= {"nothing": least["nothing"], "launch_gap": statistics.median(gaps)}
    for metric, name, unit in zip(metrics, work, ("TB/s", "TFLOP/s", "TFLOP/s"), strict=False):
        found = harness.spread([1e-12 * bench.limits[name]])
        yield Row(metric, unit, found) if name in least else Row(metric, problem="torch has none here")
    yield Row(metrics[3], "µs", harness.spread([1e6 * gap for gap in gaps]), less_is_better=True,
              note="from one tiny kernel to the next, with the kernel")  # fmt: skip


def launches(bench: Bench) -> kernels.Run:
    """What launches a tiny kernel GRAPH_KERNELS times, on a GPU from a graph."""
    x = torch.zeros(1, device=bench.device)

    def run() -> None:
        for _ in range(GRAPH_KERNELS):
            x.add_(1)

    def replay() -> Tensor:
        graph.replay()
        return x  # which the graph writes, and does not keep

    if bench.device.type != "cuda":
        return run
    x.add_(1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return replay


def kernel_rows(bench: Bench, metrics: Metrics, seconds: float = float("inf"), dry: int | None = None) -> Iterator[Row]:
    """Measures kernels one after another, while there is time. seconds: of each, at most; with few no peer is compiled.
    dry: how many of them a dry run checks."""
    place = kernels.Place(bench.device, bench.pick(bench.dtype, torch.float16), bench.tiny)
    chosen = [case for case in kernel_cases.CASES if case.metric in metrics]
    for number, case in enumerate(chosen):
        if bench.left < 5 or number >= bench.pick(len(chosen), dry or len(chosen)):
            yield case.row("left out: `bench kernels` has them all, with more --seconds")
            continue
        try:
            yield kernels.measure(case, place, bench.limits, min(bench.deadline, time.monotonic() + seconds))
        except Exception as error:  # what stops one kernel must not hide the others
            yield case.row(kernels.said(error))


@dataclass(frozen=True)
class Case:
    """A case. metrics: those of the rows that `run` yields, in order. seconds: how long it takes, with its kernels
    compiled ahead (an estimate, until a GPU has been measured); with less time left it does not begin. goal: of the
    first row."""

    name: str
    metrics: tuple[str, ...]
    seconds: float
    run: Callable[[Bench, Metrics], Iterator[Row]]
    goal: Goal | None = None


def _one(name: str, seconds: float, run: Callable[..., Iterator[Row]], *goal: float, **options: Any) -> Case:
    return Case(name, (name,), seconds, partial(run, **options), Goal(goal[0], TOKENS, goal[1]) if goal else None)


def _sweep(shape: str, seconds: float, sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)) -> Case:
    metric = f"decode, context 512, {shape} bf16, B {{}}"
    metrics = tuple(metric.format(size) for size in sizes)
    return Case(metric.format("1-256"), metrics, seconds, partial(sweep, shape=shape, sizes=sizes))


STREAM, BATCH = "one stream, context 1k, {}", "256 requests of nano-vllm, qwen3-0.6b {}"
LIMIT_ROWS = ("copy bandwidth", "matrix products, 16 bits", "matrix products, FP8", "launch gap in a graph")
PEER_ROWS = ("generate, qwen3-0.6b bf16, 1,024 in and 128 out", "64 requests, qwen3-0.6b bf16, 128 out each")
IDLE_ROWS = ("GPU idle, qwen3-0.6b, B 256", "GPU waits for the host, same", "work of the host per step, same")
EVERY_KERNEL = Case("every kernel", tuple(k.metric for k in kernel_cases.CASES), 90, kernel_rows)  # `bench kernels`
WITH_GOALS = tuple(kernel.metric for kernel in kernel_cases.CASES if kernel.goal)
LIMITS = Case("limits", LIMIT_ROWS, 12, limits)
CASES = [
    _one(BATCH.format("bf16"), 40, workload, 28_000, 31_000),
    _one(STREAM.format("llama-3-8b bf16"), 25, one_stream, 240, 262, shape="llama-3-8b"),
    _one(STREAM.format("qwen3-0.6b bf16"), 8, one_stream, 1900, 2500, shape="qwen3-0.6b"),
    _one(STREAM.format("llama-3-8b FP8 linears"), 22, one_stream, 420, 480, shape="llama-3-8b", quantization="fp8"),
    _one(STREAM.format("llama-3-8b W4"), 22, one_stream, 600, 700, shape="llama-3-8b", quantization="int4"),
    _one(BATCH.format("FP8 KV"), 32, workload, 40_000, 45_000, kv_dtype="fp8"),
    Case("peers", PEER_ROWS, 51, peers),
    _one("prefill, llama-3-8b bf16, 8k", 15, prefill, count=1, length=8128),
    _one("prefill, llama-3-8b bf16, 2 x 8k", 15, prefill, count=2, length=8128),
    _sweep("qwen3-0.6b", 20),
    Case("GPU idle", IDLE_ROWS, 15, idle, Goal(2, "%")),
    _sweep("llama-3-8b", 30),
    Case("kernels", WITH_GOALS, 20, partial(kernel_rows, seconds=15, dry=2)),
    _sweep("qwen3-30b-a3b", 60, (1, 64)),
]
GOALS = {case.metrics[0]: case.goal for case in CASES if case.goal}


def with_goal(row: Row) -> Row:
    """The row with its goal, also where nothing was measured, so that missing figures show."""
    if (goal := GOALS.get(row.metric)) is None:
        return row
    less = row.less_is_better or goal.unit == "%"
    return replace(row, goal=goal.value, stretch=goal.stretch, unit=goal.unit, less_is_better=less)
