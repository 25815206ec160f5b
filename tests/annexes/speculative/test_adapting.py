"""How many guesses pay, on a simulated GPU whose clock is virtual: so that what is best is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from reference_impl.annexes.speculative.adapting import TRIAL_AFTER, Acceptance, StepCosts
from reference_impl.assembly.config import EngineConfig
from reference_impl.observe.trace import DraftUse, StepDone, Trace
from reference_impl.simulation.ledger import Ledger
from reference_impl.simulation.replica import Replica
from tests.simulation.loads import request


@dataclass(frozen=True)
class Roofline:
    """Steps take what their weights take to read, or what their tokens take to compute."""

    read: float = 0.010
    compute: float = 0.0
    bytes_per_token: float = 1000.0
    longest: int = 4096

    def step_seconds(self, new_tokens: Sequence[int], past_tokens: Sequence[int]) -> float:
        return self.read + self.compute * sum(new_tokens)


def run(cost: Roofline, adaptive: str, k: int, acceptance: float, num_requests: int, tokens: int = 400) -> Replica:
    config = EngineConfig(num_blocks=4000, max_num_seqs=64, num_drafts=k, adaptive_drafts=adaptive)  # type: ignore[arg-type]
    replica = Replica(cost, config, acceptance=acceptance)  # type: ignore[arg-type]
    for i in range(num_requests):
        replica.offer(request(str(i), 0.0, 10, tokens), 0.0)
    replica.run()
    return replica


@pytest.mark.parametrize("num_requests", [1, 24])
@pytest.mark.parametrize("compute", [0.0, 0.0005, 0.02])
@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.6, 0.9, 1.0])
def test_it_is_about_as_fast_as_the_best_number_and_never_much_slower_than_none(
    acceptance: float, compute: float, num_requests: int
) -> None:
    cost = Roofline(compute=compute)
    seconds = {k: run(cost, "off", k, acceptance, num_requests).gpu.time for k in (0, 1, 3, 6)}
    adapted = run(cost, "on", 6, acceptance, num_requests).gpu.time
    assert adapted <= 1.03 * seconds[0]
    assert adapted <= 1.12 * min(seconds.values())


def test_the_price_is_what_a_token_more_costs_in_tokens() -> None:
    costs = StepCosts()
    assert costs.price() is None
    for _ in range(50):
        costs.add(4, 4, 1.0)
    assert costs.price() is None  # of one size nothing follows
    for _ in range(50):
        costs.add(8, 8, 1.4)  # 0.1 s for each token more, at 8 / 1.4 tokens a second
    assert costs.price() == pytest.approx(0.1 * 8 / 1.4, rel=0.01)
    for _ in range(200):
        costs.add(12, 6, 1.4)
    assert 0 <= (costs.price() or 0) < 0.1 * 8 / 1.4
    for size in range(100, 200):
        costs.add(size, 1, 1.0)
    assert len(costs.seconds) == 16


def test_a_time_that_falls_with_size_is_taken_for_noise() -> None:
    costs = StepCosts()
    costs.add(1, 1, 2.0)
    costs.add(5, 1, 1.0)
    assert costs.price() == 0


@pytest.mark.parametrize(("num_drafts", "kept", "chance"), [(4, 4, 1.0), (4, 0, 0.0), (1, 0, 0.0), (3, 2, 2 / 3)])
def test_acceptance_is_that_of_the_rows_seen_and_is_forgotten(num_drafts: int, kept: int, chance: float) -> None:
    found = Acceptance()
    assert found.chance(0.3, 8) == 0.3
    for _ in range(1000):
        found.add(num_drafts, kept)
    assert found.chance(chance, 8) == pytest.approx(chance, abs=1e-6)
    assert abs(found.chance(0.5, 8) - chance) < 0.06
    for _ in range(1000):
        found.add(0, 0)
    assert found.chance(0.3, 8) == pytest.approx(0.3, abs=0.01)


def test_a_trial_that_fails_makes_the_next_one_wait_twice_as_long() -> None:
    found, waits = Acceptance(), []
    for kept in (0, 0, 0, 1, 0):
        waits.append(found.patience)
        found.add(0, 0)
        found.add(1, kept)
    assert waits == [TRIAL_AFTER * n for n in (1, 2, 4, 8, 1)]


def steps_of(monkeypatch: pytest.MonkeyPatch, *args: Any, **options: Any) -> list[StepDone]:
    """Of a `run`."""
    trace, add = Trace(), Ledger.add
    monkeypatch.setattr(Ledger, "add", lambda ledger, event: (trace.add(event), add(ledger, event))[1])
    run(*args, **options)
    monkeypatch.undo()
    return trace.steps()


def test_the_trace_says_in_which_steps_guesses_would_have_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong guesses that cost much are tried, and then off but for trials; those that cost nothing never are."""
    steps = steps_of(monkeypatch, Roofline(compute=0.02), "on", 4, acceptance=0.0, num_requests=3)
    use = DraftUse.of(steps)
    decoding = [step for step in steps if all(row.num_tokens == 1 for row in step.rows)]
    off = [step for step in decoding if not any(row.num_drafts for row in step.rows)]
    assert 0 < use.num_drafts < use.num_steps_off <= len(off)
    assert len(off) - use.num_steps_off <= 10, "measured first, and the last token needs no guess"
    assert max(step.num_undrafted for step in steps) == 3
    for step in steps:
        assert step.num_undrafted <= sum(row.num_drafts == 0 for row in step.rows)
    free = steps_of(monkeypatch, Roofline(), "on", 4, acceptance=0.9, num_requests=3)
    assert DraftUse.of(free).num_steps_off == 0 < DraftUse.of(free).num_drafts
    fixed = steps_of(monkeypatch, Roofline(compute=0.02), "off", 4, acceptance=0.0, num_requests=3)
    assert DraftUse.of(fixed).num_steps_off == 0 < DraftUse.of(fixed).num_drafts
