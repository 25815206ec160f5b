"""How many of a draft model's tokens are kept of requests with a seed, where both models draw with the same numbers.

    inferlab bench coupling [--target FOLDER] [--draft FOLDER] [--num 32] [--tokens 48]

Two ways to draw (`EngineConfig.sampling_noise`) and, for requests without a seed, rejection. Beside what an engine
kept, one draft token at a time, stands what the two distributions say, on average over the same texts' positions:

    rejection    sum_i min(p_i, q_i), the most that any rule can keep
    gumbel       sum_i 1 / sum_j max(p_j / p_i, q_j / q_i): token i wins both draws (Daliri et al. 2024)
    one-number   the lengths of [0, 1) which both cumulative distributions give to the same token

Nothing here depends on a machine's speed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reference_impl.assembly.config import course_model
from reference_impl.assembly.llm import LLM
from reference_impl.bench.quality import logits
from reference_impl.bench.speculative import workload
from reference_impl.interfaces import SamplingParams
from reference_impl.observe.trace import DraftUse

Floats = NDArray[np.float64]


def rejection(p: Floats, q: Floats) -> float:
    """The share that rejection keeps: sum min(p, q). p, q [vocab_size]: sums are 1."""
    return float(np.minimum(p, q).sum())


def gumbel(p: Floats, q: Floats) -> float:
    """The share that coupled Gumbel draws keep; p, q as in `rejection`. Tokens are sorted by p / q: from token i on p_j
    / p_i is larger, before it q_j / q_i."""
    both = (p > 0) & (q > 0)
    rest_p, rest_q = p[~both].sum(), q[~both].sum()  # of tokens that one of the two never draws: they win nothing twice
    p, q = p[both], q[both]
    order = np.argsort(p / q, kind="stable")
    p, q = p[order], q[order]
    from_here, before = p[::-1].cumsum()[::-1], q.cumsum() - q
    return float((1 / ((from_here + rest_p) / p + (before + rest_q) / q)).sum())


def one_number(p: Floats, q: Floats) -> float:
    """The share that draws with one number keep; p, q as in `rejection`."""
    a, b = p.cumsum(), q.cumsum()
    return float(np.maximum(0, np.minimum(a, b) - np.maximum(a - p, b - q)).sum())


FORMULAS: dict[str, Callable[[Floats, Floats], float]] = {
    "one-number": one_number, "gumbel": gumbel, "rejection": rejection,
}  # fmt: skip


def measure(target: str | Path, draft: str | Path, num: int, tokens: int) -> list[Any]:
    """Measures `num` requests of so many tokens each: (way, drafts, share kept, share by the formula over its
    texts)."""
    prompts = workload("code", 8)
    found = []
    for way, formula in FORMULAS.items():
        noise = "gumbel" if way == "gumbel" else "one-number"
        options: dict[str, Any] = {"dtype": "float32", "num_drafts": 1, "adaptive_drafts": "off", "seed": 1}
        llm = LLM(target, draft_model=draft, sampling_noise=noise, max_model_len=512, **options)
        asked = [
            SamplingParams(max_tokens=tokens, temperature=1.0, seed=None if way == "rejection" else i, ignore_eos=True)
            for i in range(num)
        ]
        outputs = llm.generate([prompts[i % len(prompts)] for i in range(num)], asked)
        use = DraftUse.of(llm.engine.trace.steps())
        texts = [[*o.prompt_token_ids, *o.outputs[0].token_ids] for o in outputs]
        engine: Any = llm.engine
        shares = []
        for text, output in zip(texts, outputs, strict=True):
            by_model = [
                logits(model, text[:-1], len(output.prompt_token_ids) - 1).cpu().double()
                for model in (engine.model, engine.executor.draft.model)
            ]
            of_target, of_draft = (each.softmax(-1).numpy() for each in by_model)
            shares += [formula(p, q) for p, q in zip(of_target, of_draft, strict=True)]
        found.append((way, use.num_draft_tokens, use.acceptance, float(np.mean(shares))))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="inferlab bench coupling", description=__doc__)
    parser.add_argument("--target", default=str(course_model("target")))
    parser.add_argument("--draft", default=str(course_model("draft")))
    parser.add_argument("--num", type=int, default=32, help="requests")
    parser.add_argument("--tokens", type=int, default=48, help="of each request")
    asked = parser.parse_args(arguments)
    print(f"{asked.num} requests of {asked.tokens} tokens at temperature 1, one draft token in a step")
    for way, drafts, kept, expected in measure(asked.target, asked.draft, asked.num, asked.tokens):
        print(f"{way:10} {kept:.3f} of {drafts} draft tokens kept; by the formula {expected:.3f}")
    return 0
