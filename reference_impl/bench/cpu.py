"""The engine against `transformers.generate` on the course model: one stream, 16 and 64 ragged requests; and what its
scheduler, prefix cache and host work are worth on the same engine (batching.py, prefix.py, host_work.py).

Same weights, dtype, threads and number of greedy tokens; `transformers` at the better of its dynamic and
static cache, its batch padded on the left. Texts are compared: where they part (bf16 only), the two tokens
must be a near-tie in both.
"""

from __future__ import annotations

import gc
import statistics
import subprocess
import sys
from typing import Any

import torch

from reference_impl.bench import batching, harness, host_work, prefix
from reference_impl.config import course_model
from reference_impl.interfaces import SamplingParams
from reference_impl.llm import LLM

NEW_TOKENS = 64
PROMPTS = (
    "def fibonacci(n):\n    ",
    "import os\nimport sys\n\n\nclass Reader:\n    def __init__(self, path):\n        self.path = path\n\n    "
    "def read(self):\n",
    "The for statement is used to iterate over the elements of a sequence",
    "class Queue:",
)


def ragged_prompts(llm: LLM, count: int) -> list[list[int]]:
    """count prompts of 8 to 158 tokens, lengths spread evenly."""
    text = llm.encode("\n\n\n".join(PROMPTS) * 6)
    return [text[i : i + 8 + 150 * i // (count - 1)] for i in range(count)]


def run(rounds: int) -> dict[str, Any]:
    """All measurements; takes a few minutes on two cores."""
    result: dict[str, Any] = {"stamp": harness.stamp(), "new_tokens": NEW_TOKENS, "rounds": rounds, "cases": {}}
    for dtype in ("float32", "bfloat16"):
        llm, peer = LLM(course_model("target"), dtype=dtype, prefix_cache="off"), _Peer(dtype)
        cases = {"one stream": [llm.encode(PROMPTS[1])]}
        cases |= {f"{n} ragged requests": ragged_prompts(llm, n) for n in (16, 64)}
        for name, prompts in cases.items():
            result["cases"][f"{name}, {dtype}"] = _compare(llm, peer, prompts, rounds)
        if dtype == "float32":
            result["batching"] = batching.run(llm.engine.model, rounds)
            result["prefix"] = prefix.run(llm.engine.model, rounds)
        del llm, peer
        gc.collect()
    result["host_work"] = host_work.run(rounds)
    result["import"] = import_seconds(rounds)
    result["peak_memory_mb"] = peak_memory_mb()
    return result


class _Peer:
    """transformers, greedy, a fixed number of new tokens."""

    def __init__(self, dtype: str):
        try:
            import transformers
        except ImportError:
            raise SystemExit("inferlab bench cpu compares with transformers: pip install 'inferlab[test]'") from None
        transformers.logging.set_verbosity_error()
        folder = str(course_model("target"))
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
        # Its own stopping would make the work unequal.
        self.model.generation_config.eos_token_id = None

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]], cache: str) -> list[list[int]]:
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        out = self.model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            pad_token_id=0,
            cache_implementation=cache,
        )
        return [row[longest:].tolist() for row in out]

    @torch.inference_mode()
    def next_logits(self, tokens: list[int]) -> torch.Tensor:
        return self.model(torch.tensor([tokens])).logits[0, -1].float()


def _compare(llm: LLM, peer: _Peer, prompts: list[list[int]], rounds: int) -> dict[str, Any]:
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)
    texts: dict[str, list[list[int]]] = {}

    def ours() -> None:
        texts["ours"] = [o.token_ids for o in llm.generate(prompts, params)]

    def theirs(cache: str) -> None:
        texts[cache] = peer.generate(prompts, cache)

    seconds = harness.interleave(
        {"ours": ours, "dynamic": lambda: theirs("dynamic"), "static": lambda: theirs("static")}, rounds
    )
    best = min(("dynamic", "static"), key=lambda cache: statistics.median(seconds[cache]))
    tokens = NEW_TOKENS * len(prompts)
    return {
        "prompt_tokens": [len(p) for p in prompts],
        "speedup_over_transformers": harness.ratio(seconds[best], seconds["ours"]),
        "transformers_cache": best,
        "tokens_per_second": {name: tokens / statistics.median(s) for name, s in seconds.items()},
        "same_tokens": _agreement(peer, prompts, texts["ours"], texts[best]),
    }


def _agreement(peer: _Peer, prompts: list[list[int]], ours: list[list[int]], theirs: list[list[int]]) -> dict[str, Any]:
    """Rows that are equal; where a row parts, how far apart the two tokens' logits are. RuntimeError if far."""
    equal, gaps = 0, []
    for prompt, a, b in zip(prompts, ours, theirs, strict=True):
        if a == b:
            equal += 1
            continue
        i = next(i for i in range(NEW_TOKENS) if a[i] != b[i])
        logits = peer.next_logits(prompt + a[:i])
        gap = float((logits[a[i]] - logits[b[i]]).abs() / logits.abs().max())
        gaps.append(gap)
        if gap > 0.03:
            raise RuntimeError(f"texts part at token {i} with a relative logit gap of {gap:.3f}: not a near-tie")
    return {"rows_equal": equal, "rows": len(prompts), "largest_gap_where_rows_part": max(gaps, default=0.0)}


def _python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def import_seconds(rounds: int) -> dict[str, Any]:
    """What importing the engine adds once torch is imported, in fresh interpreters."""
    code = "import time, torch; t = time.perf_counter(); import reference_impl.llm; print(time.perf_counter() - t)"
    return {"beyond_torch": harness.spread([float(_python(code)) for _ in range(rounds)])}


def peak_memory_mb() -> float:
    """Peak resident memory of a process that loads the course model and generates 64 tokens."""
    code = (
        "import resource; from reference_impl import LLM, SamplingParams, course_model;"
        "LLM(course_model('target')).generate('import os', SamplingParams(max_tokens=64, temperature=0));"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)"
    )
    return round(float(_python(code)), 1)


def markdown(result: dict[str, Any]) -> str:
    """The table that README.md shows: ratios with their spread, and where they were measured."""
    stamp = result["stamp"]
    lines = ["| against `transformers.generate` | median | range |", "|---|---|---|"]
    for name, case in result["cases"].items():
        s = case["speedup_over_transformers"]
        lines.append(f"| {name} | {s['median']:.2f}x | {s['min']:.2f}-{s['max']:.2f} |")
    lines += _own_rows(result) if "batching" in result else []
    lines += [
        "",
        f"{result['rounds']} interleaved rounds of {result['new_tokens']} greedy tokens, {stamp['cores']} cores of an "
        f"{stamp['cpu']}, torch {stamp['versions']['torch']}, transformers {stamp['versions']['transformers']} at the "
        f"better of its two caches, {stamp['date'].split()[0]}. Importing the engine adds "
        f"{result['import']['beyond_torch']['median']:.2f} s to importing torch; peak memory "
        f"{result['peak_memory_mb']:.0f} MB.",
    ]
    return "\n".join(lines)


def _own_rows(result: dict[str, Any]) -> list[str]:
    """The same engine with another scheduler, or without its prefix cache."""
    lines = ["", "| on the same engine | median | range |", "|---|---|---|"]
    b = result["batching"]
    for kind, case in b["workloads"].items():
        for name, r in case["faster_than"].items():
            what = f"continuous over {name}, {b['requests']} requests, {b['max_num_seqs']} seats, {kind} outputs"
            lines.append(f"| {what} | {r['median']:.2f}x | {r['min']:.2f}-{r['max']:.2f} |")
    p, h = result["prefix"], result["host_work"]
    for kind, r in p["faster_than_off"].items():
        what = f"first token, {p['shared_tokens']:,} of {p['shared_tokens'] + p['own_tokens']:,} tokens cached ({kind})"
        lines.append(f"| {what} | {r['median']:.1f}x | {r['min']:.1f}-{r['max']:.1f} |")
    step = h["scheduler_step_ms"]["256"]
    lines.append(f"| scheduler, 256 running requests | {step['median']:.2f} ms | {step['min']:.2f}-{step['max']:.2f} |")
    return lines


def table(result: dict[str, Any]) -> str:
    lines = []
    for name, case in result["cases"].items():
        s, t = case["speedup_over_transformers"], case["tokens_per_second"]
        lines.append(
            f"{name:32s} {s['median']:.2f}x ({s['min']:.2f}-{s['max']:.2f})  ours {t['ours']:.0f} tok/s, "
            f"transformers {t['dynamic']:.0f} dynamic / {t['static']:.0f} static, "
            f"{case['same_tokens']['rows_equal']}/{case['same_tokens']['rows']} rows equal"
        )
    for kind, case in result["batching"]["workloads"].items():
        for name, r in case["faster_than"].items():
            lines.append(
                f"continuous over {name}, {kind} outputs: {r['median']:.2f}x ({r['min']:.2f}-{r['max']:.2f}), "
                f"{case['steps']['continuous']} against {case['steps'][name]} steps"
            )
    p = result["prefix"]
    for kind, r in p["faster_than_off"].items():
        lines.append(
            f"first token, {p['shared_tokens']} of {p['shared_tokens'] + p['own_tokens']} tokens cached ({kind}): "
            f"{r['median']:.1f}x ({r['min']:.1f}-{r['max']:.1f})"
        )
    h = result["host_work"]
    for n, ms in h["scheduler_step_ms"].items():
        us = h["scheduler_us_per_request"][n]["median"]
        lines.append(f"scheduler, {n} running requests: {ms['median']:.3f} ms a step, {us:.2f} us a request")
    for n, us in h["block_operation_us"].items():
        lines.append(f"allocate and free one of {n:,} blocks: {us['median']:.2f} us")
    lines.append(
        f"import beyond torch {result['import']['beyond_torch']['median']:.3f} s, "
        f"peak memory {result['peak_memory_mb']} MB"
    )
    return "\n".join(lines)
