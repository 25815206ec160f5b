"""Requests for simulators, made by hand; the documented workloads are in reference_impl.simulation.workloads."""

from __future__ import annotations

import random

from reference_impl.simulation.workloads import PAGE_TOKENS, WorkloadRequest


def request(name: object, arrival: float, prompt: int, output: int, prefix: int = 0, **more: object) -> WorkloadRequest:
    """prefix: a text whose first pages the prompt begins with; 0: nobody else's."""
    seed = f"text {prefix}" if prefix else f"request {name}"
    rng = random.Random(seed)
    pages = tuple(rng.randrange(2**64) for _ in range(prompt // PAGE_TOKENS))
    return WorkloadRequest(str(name), arrival, prompt, output, pages, **more)  # type: ignore[arg-type]


def load(
    num: int, seed: int, rate: float, longest_prompt: int = 600, longest_output: int = 60
) -> list[WorkloadRequest]:
    """Poisson arrivals; half of the prompts begin like others."""
    rng, now, found = random.Random(seed), 0.0, []
    for i in range(num):
        now += rng.expovariate(rate)
        prompt, output = rng.randint(1, longest_prompt), rng.randint(1, longest_output)
        found.append(request(f"{seed}-{i}", now, prompt, output, rng.choice((0, 0, 0, 1, 2, 3))))
    return found
