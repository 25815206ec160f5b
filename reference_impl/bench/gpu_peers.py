"""The same weights and prompts in `transformers`, where it is installed."""

from __future__ import annotations

import importlib.util
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from reference_impl.bench import gpu_engines, harness, peer
from reference_impl.bench.gpu_engines import TINY, TOKENS, Bench, LeftOut, Tokens
from reference_impl.bench.gpu_rows import Row
from reference_impl.models.shapes import SHAPES

SPARE_SECONDS = 180.0  # with less left, the static cache, whose step `transformers` compiles, would cost later cases
Run = Callable[[Tokens], tuple[float, Tokens]]  # prompts -> (seconds, tokens of output)


def peers(bench: Bench, metrics: Sequence[str]) -> Iterator[Row]:
    """Rows of the same weights, drawn by `transformers` and loaded by both, the same prompts, as many greedy tokens.

    Without FlashAttention `transformers` runs its continuous batching on paged SDPA, about five times slower than its
    path through FlashAttention-3.
    """
    if importlib.util.find_spec("transformers") is None:
        raise LeftOut("left out: transformers is not installed here")
    with tempfile.TemporaryDirectory() as name:
        theirs = peer.random_transformers(bench.pick(SHAPES, TINY)["qwen3-0.6b"], Path(name), bench.dtype, bench.device)
        room = {"num_blocks": bench.pick(64 * 1152 // gpu_engines.BLOCK_SIZE + 256, 256), "max_num_seqs": 64}
        llm, new = bench.llm("qwen3-0.6b", folder=Path(name), **room), bench.pick(128, 6)

        def ours(prompts: Tokens) -> tuple[float, Tokens]:
            return gpu_engines.timed(bench, llm, prompts, [gpu_engines.greedy(new)] * len(prompts))

        def padded(cache: str, prompts: Tokens) -> tuple[float, Tokens]:
            began = time.perf_counter()
            tokens = theirs.padded(prompts, [new] * len(prompts), cache)
            return time.perf_counter() - began, tokens

        def continuous(prompts: Tokens) -> tuple[float, Tokens]:
            tokens = theirs.continuous(prompts, [new] * len(prompts), *bench.pick((256, 8192), (32, 512)))
            return theirs.seconds, tokens

        dynamic = partial(padded, "dynamic")
        one = gpu_engines.prompts_of(1, bench.pick(1024, 24))
        many = gpu_engines.requests(*bench.pick((64, 1024, 1024), (4, 24, 8)))[0]
        runs: dict[str, Run] = {"ours": ours, "generate, dynamic cache": dynamic}
        left_out = {"generate, static cache": "left out: no time to compile"}
        if bench.tiny or bench.left > SPARE_SECONDS:
            runs, left_out = runs | {"generate, static cache": partial(padded, "static")}, {}
        yield compared(bench, metrics[0], theirs, one, new, runs, left_out)
        runs = {"ours": ours, "padded generate": dynamic, "continuous batching, paged SDPA": continuous}
        yield compared(bench, metrics[1], theirs, many, new, runs, {})


def compared(
    bench: Bench, metric: str, theirs: peer.Transformers, prompts: Tokens, new: int,
    runs: Mapping[str, Run], left_out: Mapping[str, str],
) -> Row:  # fmt: skip
    """The row of us and our peers, measured in turns; the first round warms up. A peer that cannot run is named, with
    its reason. Where greedy tokens diverge, the two must be a near-tie."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    texts: dict[str, Tokens] = {}
    problems = dict(left_out)
    for turn, name in itertools.product(range(bench.pick(3, 1) + 1), runs):
        if name in problems or (turn > 1 and bench.left < 20):
            continue
        try:
            taken, texts[name] = runs[name](prompts)
        except Exception as error:
            if name == "ours":
                raise
            problems[name] = f"{type(error).__name__}: {error}"[:200]
            continue
        seconds[name] += [taken] * (turn > 0)
    same, differs = dict[str, Any](), list[str]()
    for name, tokens in texts.items():
        if [len(row) for row in tokens] != [new] * len(prompts):
            raise RuntimeError(f"{name}: expected {new} tokens for each prompt, got {[len(row) for row in tokens]}")
        try:
            same |= {} if name == "ours" else {name: peer.agreement(theirs, prompts, texts["ours"], tokens)}
        except RuntimeError as error:  # the times are measured, and worth keeping
            differs.append(f"{name}: {error}"[:300])
    rates = {name: [len(prompts) * new / s for s in taken] for name, taken in seconds.items() if taken}
    others = {name: statistics.median(values) for name, values in rates.items() if name != "ours"}
    best = max(others, key=others.__getitem__) if others else None
    notes = [f"{name} did not run: {problem}" for name, problem in problems.items()]
    return Row(
        metric, TOKENS, harness.spread(rates["ours"]), peer=None if best is None else (best, others[best]),
        note="; ".join(["with prefill", *notes]), problem="; ".join(sorted(differs)),
        detail={
            "seconds": seconds, "tokens_per_second": others, "same_tokens": same, "did_not_run": problems,
            "prompt_tokens": [len(p) for p in prompts], "new_tokens": new,
        },
    )  # fmt: skip
