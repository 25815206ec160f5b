"""`python -m tests.bench.gpu_predictions`: what a GPU should reach, before anything is measured, for bench/NOTES.md.

A step takes the time of its bytes at the bandwidth of a copy, and a gap between any two of its kernels. Both rates are
those of one H200 as the project's goals assume them; bytes and launches are counted, and the counts are tested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from reference_impl.bench.gpu_bounds import Limits, Work
from reference_impl.bench.gpu_cases import BATCH, GOALS, STREAM
from reference_impl.bench.gpu_engines import requests
from reference_impl.bench.gpu_rows import number
from reference_impl.theory import kv_cache, latency
from reference_impl.theory.model_shapes import ModelShape, model

H200 = Limits(copy=4.3e12, matrix=790e12)
GAP = 1.3e-6  # seconds between two kernels of a graph
# Launches of a layer when few tokens are computed (up to FEW_TOKENS), by how the weights are stored; and with many.
PER_LAYER = {"none": 6, "fp8": 6, "int4": 6}
PER_LAYER_MANY, FEW_TOKENS = 9, 64
OUTSIDE = 10  # around the layers, about: embedding, last norm, logits, sampling

HEAD = (
    "| metric | GB a step | limit, tokens/s | launches a layer | gaps, ms a step | predicted, tokens/s | of the limit "
    "| goal |\n|---|---|---|---|---|---|---|---|"
)


def work(shape: ModelShape, weights: str = "none", kv_bytes: float = 2.0, kv_scale: float = 0.0) -> Work:
    """As `work_of` counts it in an engine, but from the shape alone."""
    params = shape.layers * shape.layer_params
    outputs = shape.layers * sum(out for _, out in shape.layer_matrices.values())
    stored = {"none": 2 * params, "fp8": params + 4 * outputs, "int4": params / 2 + 2 * params / 128}[weights]
    head = shape.vocab_size * shape.hidden_size
    return Work(
        shared=float(stored + 2 * head),
        kv=float(kv_cache.bytes_per_token(shape, kv_bytes) + 2 * shape.layers * shape.num_kv_heads * kv_scale),
        params=float(params), head=float(head), pair=float(latency.flops_per_pair(shape)[0]),
    )  # fmt: skip


def gaps(shape: ModelShape, weights: str, rows: int) -> float:
    """Seconds of a step in which no kernel runs."""
    per_layer = PER_LAYER_MANY if rows > FEW_TOKENS else PER_LAYER[weights]
    return GAP * (shape.layers * per_layer + OUTSIDE)


def stream(name: str, weights: str, context: int = 1024) -> tuple[float, float, float]:
    """(bytes, least seconds, seconds of gaps) of a step of one request."""
    shape = model(name)
    found = work(shape, weights)
    return found.shared + found.kv * context, found.decode_seconds([context], H200), gaps(shape, weights, 1)


def workload(kv_bytes: float, kv_scale: float) -> tuple[float, float, float]:
    """(bytes of a mean step, least seconds, seconds of gaps) of nano-vllm's 256 requests."""
    shape = model("qwen3-0.6b")
    found, (prompts, outputs) = work(shape, "none", kv_bytes, kv_scale), requests()
    lengths = [len(p) for p in prompts]
    steps = range(1, max(outputs))
    running = [int(np.sum(np.array(outputs) > i)) for i in steps]
    seen = sum(n * (m - 1) + m * (m - 1) / 2 for n, m in zip(lengths, outputs, strict=True))
    total_bytes = len(running) * found.shared + seen * found.kv
    least = found.workload_seconds(lengths, outputs, H200)
    return total_bytes / len(running), least, sum(gaps(shape, "none", n) for n in running)


def lines() -> Iterator[str]:
    yield HEAD
    cases: list[tuple[str, int, Callable[[], tuple[float, float, float]], str]] = [
        (STREAM.format("llama-3-8b bf16"), 1, lambda: stream("llama-3-8b", "none"), "6"),
        (STREAM.format("llama-3-8b FP8 linears"), 1, lambda: stream("llama-3-8b", "fp8"), "6"),
        (STREAM.format("llama-3-8b W4"), 1, lambda: stream("llama-3-8b", "int4"), "6"),
        (STREAM.format("qwen3-0.6b bf16"), 1, lambda: stream("qwen3-0.6b", "none"), "6"),
        (BATCH.format("bf16"), sum(requests()[1]), lambda: workload(2, 0), "9, then 6"),
        (BATCH.format("FP8 KV"), sum(requests()[1]), lambda: workload(1, 4), "9, then 6"),
    ]
    for name, tokens, count, launches in cases:
        num_bytes, least, lost = count()
        steps = 1 if tokens == 1 else max(requests()[1]) - 1
        goal = GOALS[name]
        yield (
            f"| {name} | {num_bytes / 1e9:.2f} | {number(tokens / least)} | {launches} | {1e3 * lost / steps:.2f} | "
            f"{number(tokens / (least + lost))} | {100 * least / (least + lost):.0f} % | "
            f"{number(goal.value)}, stretch {number(goal.stretch or 0)} |"
        )


if __name__ == "__main__":
    print("\n".join(lines()))
