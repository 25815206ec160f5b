"""A target and a draft model of your own: acceptance, what steps and drafts cost, and the speed-up beside the formula.

    inferlab bench draft_pair --target FOLDER --draft FOLDER [--dtype bfloat16] [--num-drafts 1 2 4 8]

Folders as `LLM` takes them, of one vocabulary; a 1B and a 7B on one GPU are what it is for. Without them the course
models, which any CPU runs. One request at a time (`--batch` for more), greedy, on text that goes on as code does. The
decoding steps are timed; c holds all that the draft computes, as in `bench.speculative`.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Sequence
from typing import Any

import torch

from reference_impl.assembly.config import course_model
from reference_impl.assembly.llm import LLM
from reference_impl.bench.speculative import _Measured, workload


def measure(
    target: Any, draft: Any, num_drafts: Sequence[int], batch: int = 1, rounds: int = 2, **options: Any
) -> list[dict[str, Any]]:
    """What `_Measured.against` finds for each k, and "speed_up", the ratio of the seconds of a whole run with its
    prompts and its host work, which the formula leaves out. The plain engine stays in memory, and beside it one with
    drafts, a k at a time. On a GPU the draft's passes are waited for, so that c is theirs. options: LLM's."""
    prompts = workload("code", batch)

    def served(k: int) -> tuple[_Measured, float]:
        drafting = {"draft_model": draft, "num_drafts": k, "adaptive_drafts": "off"} if k else {}
        one = _Measured(LLM(target, prefix_cache="off", max_model_len=1024, **drafting, **options))
        for _ in range(rounds):  # the first warms up; the trace and the seconds of the last are what counts
            one.forget()
            began = time.perf_counter()
            one.serve(prompts)
            seconds = time.perf_counter() - began
        return one, seconds

    plain, without = served(0)
    found = []
    for k in num_drafts:
        one, seconds = served(k)
        same = sum(a == b for a, b in zip(one.texts, plain.texts, strict=True))
        found.append(one.against(plain) | {"k": k, "speed_up": without / seconds, "same_texts": same})
        del one
        gc.collect()
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="inferlab bench draft_pair", description=__doc__)
    parser.add_argument("--target", default=str(course_model("target")))
    parser.add_argument("--draft", default=str(course_model("draft")))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--num-drafts", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--batch", type=int, default=1)
    asked = parser.parse_args(arguments)
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"{asked.target} with drafts of {asked.draft}, {asked.dtype}, batch {asked.batch}, on {where}")
    for row in measure(asked.target, asked.draft, asked.num_drafts, asked.batch, dtype=asked.dtype):
        print(
            f"k = {row['k']}: {row['acceptance']:.0%} of {row['guesses']} draft tokens kept, "
            f"{row['tokens_per_row']:.2f} tokens a step, v {row['v']:.2f}, c {row['c']:.3f}: "
            f"{row['speed_up']:.2f}x, by formula {row['bound']:.2f}x; "
            f"{row['same_texts']} of {asked.batch} texts the same"
        )
    return 0
