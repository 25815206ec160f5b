"""The engine against `transformers` on the course model: one stream, 16 and 64 ragged requests; and what its
scheduler, prefix cache and host work are worth on the same engine (batching.py, prefix.py, host_work.py). Then one
stream of a larger model in 16, 8 and 4 bits (cpu_quantized.py).

Same weights, dtype, threads and greedy tokens per request; `transformers` in padded batches (peer.py) at the better
of its dynamic and static cache, and with its continuous batching. A padded batch runs until its longest output is
done, so with outputs of different lengths most of the ratio comes from the scheduler; with equal ones, from the step.
Texts are compared: where they diverge (bf16 only), the two tokens must be a near-tie in both.

With its default rounds it should take at most about eight minutes on two cores. So continuous batching, the slowest, is
run with 16 requests only, and 64 requests run in bf16 only on a CPU that multiplies bf16.
"""

from __future__ import annotations

import gc
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from reference_impl.assembly.config import course_model
from reference_impl.assembly.llm import LLM
from reference_impl.bench import batching, cpu_quantized, harness, host_work, prefix
from reference_impl.bench.peer import CACHES, Transformers, agreement
from reference_impl.features.cpu.processor import cpu_has_bf16
from reference_impl.interfaces import SamplingParams

NEW_TOKENS = 64
PROMPTS = (
    "def fibonacci(n):\n    ",
    "import os\nimport sys\n\n\nclass Reader:\n    def __init__(self, path):\n        self.path = path\n\n    "
    "def read(self):\n",
    "The for statement is used to iterate over the elements of a sequence",
    "class Queue:",
)


def ragged_prompts(llm: LLM, count: int) -> list[list[int]]:
    """`count` prompts of 8 to 158 tokens, lengths spread evenly."""
    text = llm.encode("\n\n\n".join(PROMPTS) * 6)
    return [text[i : i + 8 + 150 * i // (count - 1)] for i in range(count)]


def ragged_outputs(count: int) -> list[int]:
    """Output tokens of each of `count` requests: 8 to 120, evenly spread, mean 64, in a shuffled order."""
    lengths = [8 + 112 * i // (count - 1) for i in range(count)]
    random.Random(0).shuffle(lengths)
    return lengths


def _cases(llm: LLM, most: int) -> dict[str, tuple[list[list[int]], list[int]]]:
    """The prompts of each case and how many new tokens each gets; cases of up to `most` requests."""
    cases = {"one stream": ([llm.encode(PROMPTS[1])], [NEW_TOKENS])}
    prompts = ragged_prompts(llm, 16)
    cases["16 ragged prompts, equal outputs"] = prompts, [NEW_TOKENS] * 16
    cases["16 ragged prompts, ragged outputs"] = prompts, ragged_outputs(16)
    cases["64 ragged prompts, ragged outputs"] = ragged_prompts(llm, 64), ragged_outputs(64)
    return {name: case for name, case in cases.items() if len(case[0]) <= most}


def run(rounds: int) -> dict[str, Any]:
    """Makes all measurements; takes some minutes on two cores."""
    began = time.perf_counter()
    result: dict[str, Any] = {"stamp": harness.stamp(), "new_tokens": NEW_TOKENS, "rounds": rounds, "cases": {}}
    for dtype in ("float32", "bfloat16"):
        llm, peer = LLM(course_model("target"), dtype=dtype, prefix_cache="off"), Transformers(dtype)
        most = 64 if dtype == "float32" or cpu_has_bf16() else 16
        for name, (prompts, new_tokens) in _cases(llm, most).items():
            result["cases"][f"{name}, {dtype}"] = _compare(llm, peer, prompts, new_tokens, rounds)
        if dtype == "float32":
            result["batching"] = batching.run(llm.engine.model, rounds)
            result["prefix"] = prefix.run(llm.engine.model, rounds)
        del llm, peer
        gc.collect()
    result["quantized"] = cpu_quantized.run(rounds)
    result["host_work"] = host_work.run(rounds)
    result["import"] = import_seconds(rounds)
    result["peak_memory_mb"] = peak_memory_mb()
    result["seconds"] = round(time.perf_counter() - began)
    return result


def _compare(
    llm: LLM, peer: Transformers, prompts: list[list[int]], new_tokens: list[int], rounds: int
) -> dict[str, Any]:
    params = [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for n in new_tokens]
    texts: dict[str, list[list[int]]] = {}

    def ours() -> None:
        texts["ours"] = [o.token_ids for o in llm.generate(prompts, params)]

    def padded(cache: str) -> None:
        texts[cache] = peer.padded(prompts, new_tokens, cache)

    def continuous() -> None:
        texts["continuous"] = peer.continuous(prompts, new_tokens)

    candidates: dict[str, Callable[[], object]] = {"ours": ours, **{c: partial(padded, c) for c in CACHES}}
    if len(set(new_tokens)) > 1 and len(prompts) <= 16:  # with equal outputs it has little to gain
        candidates["continuous"] = continuous
    more = 4 if len(prompts) == 1 else 1  # rounds of half a second: a machine's speed may change between two of them
    seconds = harness.interleave(candidates, more * rounds)
    best = min(CACHES, key=lambda cache: statistics.median(seconds[cache]))
    result = {
        "prompt_tokens": [len(p) for p in prompts],
        "new_tokens": new_tokens,
        "speedup_over_padded": harness.ratio(seconds[best], seconds["ours"]),
        "padded_cache": best,
        "tokens_per_second": {name: sum(new_tokens) / statistics.median(s) for name, s in seconds.items()},
        "same_tokens": {name: agreement(peer, prompts, texts["ours"], texts[name]) for name in texts if name != "ours"},
    }
    if "continuous" in seconds:
        result["speedup_over_continuous"] = harness.ratio(seconds["continuous"], seconds["ours"])
    return result


def _python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def import_seconds(rounds: int) -> dict[str, Any]:
    """What importing the engine adds once torch is imported, in fresh interpreters."""
    module = "reference_impl.assembly.llm"
    code = f"import time, torch; t = time.perf_counter(); import {module}; print(time.perf_counter() - t)"
    return {"beyond_torch": harness.spread([float(_python(code)) for _ in range(rounds)])}


def peak_memory_mb() -> float:
    """Peak resident memory of a process that loads the course model and generates 64 tokens."""
    # On Linux ru_maxrss of a new program begins at the peak of the process that started it; VmHWM begins at zero.
    code = (
        "import pathlib, resource; from reference_impl import LLM, SamplingParams, course_model;"
        "LLM(course_model('target')).generate('import os', SamplingParams(max_tokens=64, temperature=0));"
        "status = pathlib.Path('/proc/self/status');"
        "lines = status.read_text().splitlines() if status.is_file() else ();"
        "linux = [int(line.split()[1]) for line in lines if line.startswith('VmHWM')];"
        "print((linux or [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss])[0] / 1024)"
    )
    return round(float(_python(code)), 1)


def markdown(result: dict[str, Any]) -> str:
    """The tables that a terminal and bench/README.md show: ratios with their spread, and where they were measured."""
    stamp = result["stamp"]
    instructions = f" ({stamp['instructions']})" if "instructions" in stamp else ""  # not in older files
    lines = [
        "| times as fast as `transformers` | padded `generate` | range | continuous batching | range |",
        "|---|---|---|---|---|",
    ]
    for name, case in result["cases"].items():
        cells = [case["speedup_over_padded"], case.get("speedup_over_continuous")]
        both = (harness.cells(s) if s else "- | -" for s in cells)
        lines.append(f"| {name} | {' | '.join(both)} |")
    if "quantized" in result:
        lines += ["", cpu_quantized.markdown(result["quantized"])]
    lines += _own_rows(result)
    alone = max(case["speedup_over_padded"]["runs"] for case in result["cases"].values())
    lines += [
        "",
        f"{result['rounds']} interleaved rounds (one stream, course model: {alone}) of "
        f"{result['new_tokens']} greedy tokens per request (ragged: 8 to 120; "
        f"a padded batch runs to the longest), prompts of 8 to 158 tokens, {stamp['cores']} cores of an "
        f"{stamp['cpu']}{instructions}, torch {stamp['versions']['torch']}, transformers "
        f"{stamp['versions']['transformers']} at the "
        f"better of its two caches, {stamp['date'].split()[0]}. Importing the engine adds "
        f"{result['import']['beyond_torch']['median']:.2f} s to importing torch; peak memory "
        f"{result['peak_memory_mb']:.0f} MB.",
    ]
    return "\n".join(lines)


def _own_rows(result: dict[str, Any]) -> list[str]:
    """Rows in which the engine is compared with itself under another scheduler, or without its prefix cache."""
    lines = ["", "| on the same engine | median | range |", "|---|---|---|"]
    b = result["batching"]
    for kind, case in b["workloads"].items():
        for name, r in case["faster_than"].items():
            what = f"continuous over {name}, {b['requests']} requests, {b['max_num_seqs']} seats, {kind} outputs"
            lines.append(f"| {what} | {harness.cells(r)} |")
    p, h = result["prefix"], result["host_work"]
    for kind, r in p["faster_than_off"].items():
        what = f"first token, {p['shared_tokens']:,} of {p['shared_tokens'] + p['own_tokens']:,} tokens shared ({kind})"
        lines.append(f"| {what} | {harness.cells(r, 1)} |")
    step = h["scheduler_step_ms"]["256"]
    lines.append(f"| scheduler, 256 running requests | {harness.cells(step, 2, ' ms')} |")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    return harness.in_rounds("cpu", 3, run, lambda result: [markdown(result)], arguments)
