"""The exercise of chapter 06, cells as they stand: what its check says to a stub, to half a router, to a whole one."""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest

from grader.chapter_source import chapter_notebook
from reference_impl.simulation import Result, simulate_replicas
from reference_impl.simulation.workloads import WorkloadRequest, workload
from reference_impl.theory.deployment import Deployment
from reference_impl.theory.hardware import device
from reference_impl.theory.model_shapes import model

CHAPTER = Path(__file__).parents[2] / "chapters/06_prefix_caching/a_prefixes.py"
Router = Callable[[int], Callable[[WorkloadRequest], int | None]]


@functools.cache
def simulated_once(replicas: int, router: str) -> list[Result]:
    """A router of the course on the calls of the check: the check simulates it again for every answer."""
    return simulate_replicas(
        workload("agents", seed=1, rate=16, num_requests=500), replicas,
        Deployment(model("llama-3-8b"), device("H100"), mfu=0.5, mbu=0.8), router=router,
    )  # fmt: skip


def simulate(calls: Iterator[WorkloadRequest], replicas: int, deployment: Deployment, **options: Any) -> list[Result]:
    """What the cells get for `simulate_replicas`."""
    router = options["router"]
    if not isinstance(router, str):
        if chosen(router, replicas) != chosen(in_turn, replicas):
            return simulate_replicas(calls, replicas, deployment, **options)
        router = "round_robin"
    assert deployment == Deployment(model("llama-3-8b"), device("H100"), mfu=0.5, mbu=0.8)
    same = workload("agents", seed=1, rate=16, num_requests=500)
    assert all(a == b for a, b in zip(calls, same, strict=True)), "the check has changed: so must this"
    return simulated_once(replicas, router)


def chosen(router: Router, replicas: int) -> list[int | None]:
    return list(map(router(replicas), workload("agents", seed=1, rate=16, num_requests=500)))


def verdict(router: Router | None, capsys: pytest.CaptureFixture[str]) -> str:
    """What the check prints about a router in place of the stub, or about the stub."""
    cells = {cell["id"]: cell["source"] for cell in chapter_notebook(CHAPTER, "inferlab")["cells"]}
    names: dict[str, Any] = {
        "np": np, "Result": Result, "simulate_replicas": simulate, "Deployment": Deployment,
        "workload": workload, "llama": model("llama-3-8b"), "h100": device("H100"),
    }  # fmt: skip
    exec(cells["router-exercise"], names)
    if router is not None:
        names["my_router"] = router
    exec(cells["router-served"], names)
    exec(cells["router-check"], names)
    return capsys.readouterr().out


def in_turn(replicas: int) -> Callable[[WorkloadRequest], int]:
    numbers = iter(range(10**6))
    return lambda request: next(numbers) % replicas


def by_session(replicas: int) -> Callable[[WorkloadRequest], int]:
    return lambda request: crc32(request.session.encode()) % replicas


def by_match_and_load(replicas: int) -> Callable[[WorkloadRequest], int]:
    homes: dict[int, int] = {}
    sent = [0] * replicas

    def choose(request: WorkloadRequest) -> int:
        new = [page for page in request.pages if page not in homes]
        known = len(request.pages) - len(new)
        chosen = homes[request.pages[known - 1]] if known else sent.index(min(sent))
        if sent[chosen] > min(sent) + 20_000:
            chosen = sent.index(min(sent))
        homes.update(dict.fromkeys(request.pages, chosen))
        sent[chosen] += request.num_prompt_tokens - 64 * known
        return chosen

    return choose


def test_the_check_tells_a_stub_from_half_a_router_and_from_a_whole_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert "not written yet" in verdict(None, capsys)
    assert "little more is found" in verdict(in_turn, capsys)
    half = verdict(by_session, capsys)
    assert "slowest wait longer" in half
    whole = verdict(by_match_and_load, capsys)
    assert "that is it" in whole
    assert "the course's router" in whole
    assert "the course's router" not in half
