"""What adaptive drafts cost where none pay: methods whose drafts gain nothing with the course models, against plain
decoding, over many rounds of the requests of `bench speculative`.

Plain decoding runs beside itself, too: so far apart are two engines that do the same. The median of a few rounds
scatters by several per cent on a machine that does anything else; beside it stands the interval in which the median of
many more rounds lies with a probability of 95 % or more.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

from reference_impl.assembly.config import course_model
from reference_impl.assembly.llm import LLM
from reference_impl.bench import harness
from reference_impl.bench import speculative as bench

LOSING = ("draft", "medusa", "early-exit")
BESIDE = "plain beside plain"


def run(rounds: int, model: str = "target") -> dict[str, Any]:
    """Measures the variants interleaved; returns a stamped result."""
    return bench.each_case(_case, rounds, model)


def _case(model: str, kind: str, batch: int, rounds: int) -> dict[str, Any]:
    prompts = bench.workload(kind, batch)
    variants: dict[str, dict[str, Any]] = {"plain": {}, BESIDE: {}}
    for name in LOSING:
        variants[name] = {**bench.with_folder(bench.METHODS[name]), "num_drafts": max(bench.FIXED)}
    engines = {name: LLM(course_model(model), **bench.COMMON, **options) for name, options in variants.items()}
    seconds = harness.interleave({name: partial(bench.write, llm, prompts) for name, llm in engines.items()}, rounds)
    rows = {}
    for name, llm in engines.items():
        if name != "plain":
            ratios = [a / b for a, b in zip(seconds["plain"], seconds[name], strict=True)]
            drafts = sum(row.num_drafts for step in llm.engine.trace.steps() for row in step.rows)
            rows[name] = harness.spread(ratios) | {"of_the_median": interval_of_median(ratios), "guesses": drafts}
    return {"workload": kind, "requests": batch, "variants": rows}


def interval_of_median(values: list[float]) -> tuple[float, float]:
    """The interval of the median by order statistics: of n values fewer than j are below the true median with the
    probability of fewer than j heads of n coins. It is the narrowest that holds the median with 95 % or more; all
    values where there are fewer than six."""
    ordered, num, beyond, rank = sorted(values), len(values), 0.0, 0
    while beyond + math.comb(num, rank) / 2**num <= 0.025:
        beyond += math.comb(num, rank) / 2**num
        rank += 1
    first = max(0, rank - 1)
    return ordered[first], ordered[num - 1 - first]


def lines(found: dict[str, Any]) -> list[str]:
    """The figures as lines for a terminal."""
    said = []
    for case in found["cases"]:
        said.append(f"{case['workload']}, {case['requests']} requests")
        for name, row in case["variants"].items():
            low, high = row["of_the_median"]
            said.append(f"  {name:20} {row['median']:.3f}x (median: {low:.3f} to {high:.3f}), {row['guesses']} drafts")
    worst = min(row["median"] for case in found["cases"] for name, row in case["variants"].items() if name != BESIDE)
    beside = statistics.fmean(case["variants"][BESIDE]["median"] for case in found["cases"])
    return [*said, f"the slowest {worst:.3f}x; plain beside plain {beside:.3f}x, in the mean"]


def main(arguments: Sequence[str] | None = None) -> int:
    return harness.in_rounds("adaptive", 20, run, lines, arguments)
