"""Speculative decoding against plain decoding: the same requests, model and kernels, with and without guesses.

With k guesses a step gives E tokens, takes v(k) times as long as one without, and the proposer takes c for each guess,
all in steps without guesses: so the text comes E / (v(k) + k c) times as fast (Leviathan et al. 2023, who take v(k) for
1; it is not). E, v and c are measured in the run that is timed, with a fixed k and with what the engine chooses.

Workloads: "repeats" is a file that is written again with one name changed, so that most of it stands in the prompt;
"code" are functions to be continued, in which little repeats.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from reference_impl.assembly.config import course_model
from reference_impl.assembly.llm import LLM
from reference_impl.bench import harness
from reference_impl.interfaces import SamplingParams
from reference_impl.observe.trace import DraftUse

METHODS, FIXED, BATCHES = ("ngram", "suffix"), (2, 4), (1, 8)
NEW_TOKENS, SEED = 96, 5


def workload(kind: str, num: int) -> list[str]:
    rng = random.Random(SEED)
    names = ["read_lines", "parse_header", "count_words", "find_prefix", "merge_sorted", "to_table", "is_valid", "walk"]
    rng.shuffle(names)
    if kind == "code":
        return [f'def {name}(path, limit=None):\n    """' for name in names[:num]]
    body = "    result = []\n    for item in items:\n        if item is not None:\n            result.append(item)\n"
    return ["".join(f"def {name}_{i}(items):\n{body}    return result\n\n\n" for i in range(4)) for name in names[:num]]


def run(rounds: int, model: str = "target") -> dict[str, Any]:
    """Interleaved; a stamped result."""
    found: dict[str, Any] = {"stamp": harness.stamp(), "rounds": rounds, "new_tokens": NEW_TOKENS, "cases": []}
    for kind in ("repeats", "code"):
        for batch in BATCHES:
            found["cases"].append(_case(model, kind, batch, rounds))
    return found


def _case(model: str, kind: str, batch: int, rounds: int) -> dict[str, Any]:
    prompts = workload(kind, batch)
    variants: dict[str, dict[str, Any]] = {"plain": {}}
    for method in METHODS:
        variants |= {
            f"{method} k={k}": {"speculative": method, "num_drafts": k, "adaptive_drafts": "off"} for k in FIXED
        }
        variants[f"{method} adaptive"] = {"speculative": method, "num_drafts": max(FIXED)}
    measured = {name: _Measured(LLM(course_model(model), **_COMMON, **options)) for name, options in variants.items()}
    work: dict[str, Callable[[], object]] = {name: partial(one.serve, prompts) for name, one in measured.items()}
    seconds = harness.interleave(work, rounds)
    texts = {name: one.texts for name, one in measured.items()}
    if any(text != texts["plain"] for text in texts.values()):
        raise RuntimeError(f"{kind}, {batch} requests: with guesses the text is another one")
    plain = measured["plain"]
    rows = {
        name: {"speedup": harness.ratio(seconds["plain"], seconds[name])} | measured[name].against(plain)
        for name in variants if name != "plain"
    }  # fmt: skip
    return {"workload": kind, "requests": batch, "plain_step_ms": plain.step * 1e3, "variants": rows}


_COMMON: dict[str, Any] = {"prefix_cache": "off", "max_model_len": 1024, "kv_cache_bytes": 64 << 20}


class _Measured:
    """One engine, and what was seen of its decoding steps."""

    def __init__(self, llm: LLM):
        self.llm, self.texts = llm, list[list[int]]()
        self.num_serves, self.proposing = 0, 0.0
        proposer = getattr(llm.engine.scheduler, "host_proposer", None)
        if proposer is not None:
            inner = proposer.propose

            def timed(*question: Any) -> Any:
                began = time.perf_counter()
                found = inner(*question)
                self.proposing += time.perf_counter() - began
                return found

            proposer.propose = timed

    def serve(self, prompts: list[str]) -> None:
        sampling = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)
        outputs = self.llm.generate(prompts, sampling)
        self.texts = [list(output.outputs[0].token_ids) for output in outputs]

    @property
    def decoding(self) -> list[Any]:
        return [step for step in self.llm.engine.trace.steps() if all(row.num_tokens == 1 for row in step.rows)]

    @property
    def step(self) -> float:
        """Seconds of a decoding step of the model, the mean: its work depends on how many guesses there were."""
        return statistics.fmean(step.finished_at - step.started_at for step in self.decoding)

    def against(self, plain: _Measured) -> dict[str, Any]:
        """E, v and c, and the speed-up that they give, of decoding alone."""
        steps, use = self.decoding, DraftUse.of(self.decoding)
        rows = sum(len(step.rows) for step in steps)
        tokens = sum(map(sum, (step.num_new_tokens for step in steps))) / rows
        guesses = use.num_draft_tokens / len(steps)
        v, c = self.step / plain.step, self.proposing / max(1, use.num_draft_tokens) / plain.step
        return {
            "guesses": use.num_draft_tokens, "acceptance": round(use.acceptance, 3), "steps": len(steps),
            "tokens_per_row": tokens, "v": v, "c": c, "bound": tokens / (v + guesses * c),
        }  # fmt: skip


def lines(found: dict[str, Any]) -> list[str]:
    """For a terminal."""
    said = []
    for case in found["cases"]:
        said.append(f"{case['workload']}, {case['requests']} requests, plain step {case['plain_step_ms']:.1f} ms")
        for name, row in case["variants"].items():
            speedup = row["speedup"]
            said.append(
                f"  {name:16} {speedup['median']:.2f}x ({speedup['min']:.2f} to {speedup['max']:.2f}), formula "
                f"{row['bound']:.2f}x: {row['tokens_per_row']:.2f} tokens a step, v {row['v']:.2f}, c {row['c']:.4f}, "
                f"{row['acceptance']:.0%} of {row['guesses']} guesses kept"
            )
    return said
