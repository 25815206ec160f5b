"""What the GPU bench measures, the most important first: when the time is up, the last cases are left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from reference_impl.bench import gpu_decode as decode
from reference_impl.bench import gpu_dependent, gpu_kernels, gpu_peers
from reference_impl.bench import gpu_workload as workload
from reference_impl.bench.gpu_engines import Bench
from reference_impl.bench.gpu_rows import Row

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
STREAM = "one stream, context 1k, {}"
SWEEP = "decode, context 512, {}, B {{}}"
BATCH = "256 requests of nano-vllm, qwen3-0.6b {}"


@dataclass(frozen=True)
class Case:
    """rows: the metrics that `run` gives, one after another. seconds: how long it takes, with its kernels compiled
    ahead (an estimate, until a GPU has been measured); with less time left it does not begin.

    fresh: it begins with an empty GPU.
    """

    name: str
    rows: tuple[str, ...]
    seconds: float
    run: Callable[[Bench], Iterator[Row]]
    fresh: bool = False


def _stream(words: str, shape: str, seconds: float, **options: Any) -> Case:
    name = STREAM.format(f"{shape} {words}")
    return Case(name, (name,), seconds, lambda bench: decode.one_stream(bench, name, shape, **options))


def _workload(words: str, seconds: float, **options: Any) -> Case:
    name = BATCH.format(words)
    return Case(name, (name,), seconds, lambda bench: workload.workload(bench, name, **options))


def _sweep(shape: str, seconds: float, sizes: tuple[int, ...] = SIZES, fresh: bool = False) -> Case:
    metric = SWEEP.format(f"{shape} bf16")
    rows = tuple(metric.format(size) for size in sizes)
    return Case(metric.format("1-256"), rows, seconds, lambda b: decode.sweep(b, shape, sizes, metric), fresh)


def _prefill(words: str, count: int, length: int) -> Case:
    name = f"prefill, llama-3-8b bf16, {words}"
    return Case(name, (name,), 15, lambda b: workload.prefill(b, name, count, length))


CASES = [
    Case("dependent launches", gpu_dependent.ROWS, 30, gpu_dependent.dependent),
    _workload("bf16", 40),
    _stream("bf16", "llama-3-8b", 25),
    _stream("bf16", "qwen3-0.6b", 8),
    _stream("FP8 linears", "llama-3-8b", 22, quantization="fp8"),
    _stream("W4", "llama-3-8b", 22, quantization="int4"),
    _workload("FP8 KV", 32, kv_dtype="fp8"),
    Case("peers", gpu_peers.ROWS, 51, gpu_peers.peers),
    _prefill("8k", 1, 8128),
    _prefill("2 x 8k", 2, 8128),
    _sweep("qwen3-0.6b", 20),
    # After the peers: a profiler stays attached in part, which slows down cases that launch many kernels.
    Case("GPU idle", decode.IDLE_ROWS, 15, decode.idle),
    _sweep("llama-3-8b", 30),
    Case("kernels", gpu_kernels.ROWS, 20, gpu_kernels.kernels_with_goals),
    _sweep("qwen3-30b-a3b", 60, (1, 64), fresh=True),
]

TOKENS = "tokens/s"
# From the project's list of goals: goal, stretch, unit.
GOALS: dict[str, tuple[float, float | None, str]] = {
    BATCH.format("bf16"): (28_000, 31_000, TOKENS),
    BATCH.format("FP8 KV"): (40_000, 45_000, TOKENS),
    STREAM.format("llama-3-8b bf16"): (240, 262, TOKENS),
    STREAM.format("llama-3-8b FP8 linears"): (420, 480, TOKENS),
    STREAM.format("llama-3-8b W4"): (600, 700, TOKENS),
    STREAM.format("qwen3-0.6b bf16"): (1900, 2500, TOKENS),
    decode.IDLE_ROWS[0]: (2, None, "%"),
}


def with_goal(row: Row) -> Row:
    """The row with its goal, also where nothing was measured, so that missing figures show."""
    goal, stretch, unit = GOALS.get(row.metric, (row.goal, row.stretch, row.unit))
    return replace(row, goal=goal, stretch=stretch, unit=unit, less_is_better=row.less_is_better or unit == "%")
