"""The recorded points are those that the simulation gives, and one seat is the queue that the formulas speak of."""

import json
from dataclasses import asdict

import numpy as np
import pytest

from reference_impl.bench import under_load
from reference_impl.bench.under_load import LOADS, NUM, OUTPUTS, SEEDS, Result, point, recorded, run, saturated

AGAIN = "run: inferlab bench under_load"


@pytest.mark.parametrize(
    ("seats", "arrivals", "outputs", "load"),
    [
        pytest.param("8 seats", "bursty, CV 3", "40 tokens, one in ten 640", 0.9, marks=pytest.mark.slow),
        pytest.param("256 seats", "Poisson", "exponential, mean 100", 0.6, marks=pytest.mark.slow),
        ("256 seats, cache of 16,000 tokens", "Poisson", "all of 100 tokens", 0.85),
    ],
)
def test_a_recorded_point_is_what_the_simulation_gives(seats: str, arrivals: str, outputs: str, load: float) -> None:
    line = recorded()[seats, arrivals, outputs]
    full = saturated(seats, arrivals, outputs, 4000)
    assert (full.capacity, full.service, full.scv, full.servers) == pytest.approx(
        (line.capacity, line.service, line.scv, line.servers), rel=1e-5
    ), AGAIN
    there = next(p for p in line.points if p.load == load)
    again = point(seats, arrivals, outputs, load, full.capacity)
    for of in ("wait", "ttft", "tpot"):
        for statistic, values in getattr(again, of).items():
            assert getattr(there, of)[statistic] == pytest.approx(values, rel=1e-4, abs=1e-9), AGAIN
    assert (again.running, again.preempted) == (pytest.approx(there.running, rel=1e-4), there.preempted), AGAIN


def test_one_seat_is_a_queue_to_the_last_digit() -> None:
    """Lindley's recursion over the engine's own service times gives the engine's waits."""
    for outputs in OUTPUTS:
        r = run("1 seat", "bursty, CV 3", outputs, 1.2, 300, 0)
        order = np.argsort(r.arrival)
        gaps, served = np.diff(r.arrival[order]), (r.latency - r.queue)[order]
        wait = [0.0]
        for gap, before in zip(gaps, served, strict=False):
            wait.append(max(0.0, wait[-1] + before - gap))
        assert max(wait) > 0
        np.testing.assert_allclose(r.queue[order], wait, atol=1e-9)


def test_arrivals_and_outputs_are_what_their_names_say() -> None:
    for arrivals, cv in under_load.ARRIVALS.items():
        r: Result = run("256 seats", arrivals, "all of 100 tokens", 5.0, 3000, 1)
        gaps = np.diff(np.sort(r.arrival))
        assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.15)
        assert 1 / gaps.mean() == pytest.approx(5, rel=0.15)
    u = under_load.bits(3).random(100_000)
    for draw in OUTPUTS.values():
        assert np.mean(draw(u)) == pytest.approx(under_load.OUTPUT, rel=0.02)
        assert np.min(draw(u)) >= 1


def test_the_file_holds_every_load_and_says_when_and_where() -> None:
    raw = json.loads(under_load.RECORD.read_text())
    assert {"date", "commit", "cpu"} <= set(raw["stamp"])
    for line in recorded().values():
        assert tuple(p.load for p in line.points) == LOADS
        for found in (asdict(p)[of] for p in line.points for of in ("wait", "ttft", "tpot")):
            assert all(low <= high for _, low, high in found.values())
    assert SEEDS * NUM >= 1000, "a p99 needs thousands"
