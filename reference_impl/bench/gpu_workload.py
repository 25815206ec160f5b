"""The 256 requests of nano-vllm's benchmark, with its seed and its lengths; and prefill alone.

The workload is that of `bench.py` in nano-vllm: prompts of 100 to 1,024 random ids, outputs of 100 to 1,024 tokens,
temperature 0.6, no request stops early, one run after a short warm-up; tokens of output over the seconds of generate().
"""

from __future__ import annotations

import contextlib
import gc
import random
import time
from collections.abc import Iterator
from typing import Any

from reference_impl.assembly.llm import LLM
from reference_impl.bench import harness
from reference_impl.bench.gpu_decode import prompts_of
from reference_impl.bench.gpu_engines import Bench, statistics_of
from reference_impl.bench.gpu_rows import Row
from reference_impl.interfaces import SamplingParams

REQUESTS, LONGEST_PROMPT, LONGEST_OUTPUT = 256, 1024, 1024


def requests(
    count: int = REQUESTS, longest_prompt: int = LONGEST_PROMPT, longest_output: int = LONGEST_OUTPUT
) -> tuple[list[list[int]], list[int]]:
    """(prompts as token ids, tokens of output each), drawn in the order in which nano-vllm draws them."""
    draw = random.Random(0)
    shortest = min(100, longest_prompt // 2), min(100, longest_output // 2)
    prompts = [
        [draw.randint(0, 10_000) for _ in range(draw.randint(shortest[0], longest_prompt))] for _ in range(count)
    ]
    return prompts, [draw.randint(shortest[1], longest_output) for _ in range(count)]


def workload(bench: Bench, name: str, **options: Any) -> Iterator[Row]:
    llm = bench.llm("qwen3-0.6b", **options)
    prompts, outputs = requests(*bench.pick((REQUESTS, LONGEST_PROMPT, LONGEST_OUTPUT), (6, 24, 8)))
    sampling = [SamplingParams(max_tokens=n, temperature=0.6, ignore_eos=True, seed=i) for i, n in enumerate(outputs)]
    llm.engine.capture_graphs(LONGEST_PROMPT + LONGEST_OUTPUT)  # otherwise within what is timed
    llm.generate([[1, 2, 3, 4]], SamplingParams(max_tokens=16, temperature=0.6, ignore_eos=True))  # their warm-up
    rates, seconds, collected = list[float](), list[float](), list[dict[str, float]]()
    for turn in range(bench.pick(3, 1)):
        if turn and bench.left < 2 * max(seconds):
            break
        with collecting() as pauses:
            taken, given = timed(bench, llm, prompts, sampling)
        collected.append({"seconds": sum(pauses), "longest": max(pauses, default=0.0), "runs": len(pauses)})
        if given != sum(outputs):
            raise RuntimeError(f"expected {sum(outputs)} tokens of output, got {given}")
        seconds.append(taken)
        rates.append(given / taken)
    work, lengths = bench.work(llm), [len(p) for p in prompts]
    limit = bench.limit(lambda limits: sum(outputs) / work.workload_seconds(lengths, outputs, limits))
    yield Row(
        name, "tokens/s", harness.spread(rates), limit,
        note=f"{sum(map(len, prompts)):,} tokens in, {sum(outputs):,} out; prefix cache off",
        detail={
            "seconds": seconds, "steps": steps_of(llm), "executor": statistics_of(llm),
            "garbage_collector": collected,
        },
    )  # fmt: skip


def timed(bench: Bench, llm: LLM, prompts: list[list[int]], sampling: list[SamplingParams]) -> tuple[float, int]:
    """(seconds of generate, tokens of output)."""
    bench.wait()
    began = time.perf_counter()
    outputs = llm.generate(prompts, sampling)
    return time.perf_counter() - began, sum(len(output.token_ids) for output in outputs)


@contextlib.contextmanager
def collecting() -> Iterator[list[float]]:
    """Seconds of each run of Python's garbage collector meanwhile: the host does nothing else during one."""
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


def steps_of(llm: LLM) -> dict[str, float]:
    """How many steps the trace holds, and how many of them preempted a request: 0 where the cache has room for all."""
    steps = llm.engine.trace.steps()
    return {"steps": len(steps), "preempting": sum(bool(step.preempted) for step in steps)}


def prefill(bench: Bench, name: str, count: int, length: int) -> Iterator[Row]:
    """Prompts computed in one step, until each has its first token."""
    llm = bench.llm("llama-3-8b")
    count, length = bench.pick((count, length), (count, 100))
    prompts = prompts_of(count, length)
    sampling = [SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)] * count
    seconds = [timed(bench, llm, prompts, sampling)[0] for _ in range(bench.pick(bench.rounds, 1) + 1)][1:]
    tokens, flops = count * length, count * bench.work(llm).prefill_flops(length)
    rates = harness.spread([tokens / s for s in seconds])
    yield Row(
        name, "tokens/s", rates, bench.limit(lambda limits: tokens * limits.matrix / flops),
        note=f"{flops * rates['median'] / tokens / 1e12:.0f} TFLOP/s of the model's operations",
        detail={"seconds": seconds, "flops": flops},
    )  # fmt: skip
