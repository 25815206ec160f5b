"""How many guesses pay, on a simulated GPU whose clock is virtual: so that what is best is known."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from reference_impl.annexes.speculative.adapting import (
    OFF_STEPS,
    TRIAL_AFTER,
    TRIAL_STEPS,
    Acceptance,
    Adapting,
    Payoff,
    StepCosts,
)
from reference_impl.annexes.speculative.scheduling import Drafting
from reference_impl.assembly.config import EngineConfig
from reference_impl.interfaces import Reply, Row, Step, StepOutput, StepPlan
from reference_impl.observe.trace import DraftUse, StepDone, Trace
from reference_impl.simulation.executor import SimulatedGPU
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


def run(
    cost: Roofline, adaptive: str, k: int, acceptance: float, num_requests: int, tokens: int = 400, every: float = 0.0,
    **seconds: float,
) -> Replica:  # fmt: skip
    """every: seconds between arrivals. seconds: of a model that guesses, as of `SimulatedGPU`."""
    config = EngineConfig(num_blocks=4000, max_num_seqs=64, num_drafts=k, adaptive_drafts=adaptive)  # type: ignore[arg-type]
    replica = Replica(cost, config, acceptance=acceptance, **seconds)  # type: ignore[arg-type]
    for i in range(num_requests):
        replica.offer(request(str(i), every * i, 10, tokens), every * i)
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


@pytest.mark.parametrize("num_requests", [1, 24])
@pytest.mark.parametrize("compute", [0.0, 0.0005])
@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.6, 0.9])
def test_a_model_that_guesses_and_takes_time_in_every_step_never_makes_it_much_slower(
    acceptance: float, compute: float, num_requests: int
) -> None:
    """It takes a third of a step to keep up, and a fifth for each guess."""
    cost, model = Roofline(compute=compute), {"keep_up_seconds": 0.003, "draft_seconds": 0.002}
    seconds = {k: run(cost, "off", k, acceptance, num_requests, **model).gpu.time for k in (1, 3, 6)}
    plain = run(cost, "off", 0, acceptance, num_requests).gpu.time
    adapted = run(cost, "on", 6, acceptance, num_requests, **model).gpu.time
    assert adapted <= 1.03 * plain
    assert adapted <= 1.12 * min(plain, *seconds.values())


def test_what_a_model_saves_decides_not_how_often_it_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same guesses pay where a step is long, and do not where it is short."""
    model = {"keep_up_seconds": 0.003, "draft_seconds": 0.001}
    fast = steps_of(monkeypatch, Roofline(read=0.002), "on", 4, acceptance=0.7, num_requests=1, **model)
    slow = steps_of(monkeypatch, Roofline(read=0.020), "on", 4, acceptance=0.7, num_requests=1, **model)
    assert DraftUse.of(fast).num_drafts <= TRIAL_STEPS
    assert DraftUse.of(fast).num_steps_off > 300
    assert DraftUse.of(slow).num_steps_off == 0


def test_a_model_that_lost_is_tried_again_with_new_requests_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """And each time later. What it has not kept up with gets no guesses: they would be of a text with holes."""
    model = {"keep_up_seconds": 0.010, "draft_seconds": 0.001}
    submit, kept_up = SimulatedGPU.submit, dict[int, bool]()

    def watched(gpu: SimulatedGPU, step: Step) -> Reply:
        kept_up[step.step_id] = step.keeps_up
        return submit(gpu, step)

    monkeypatch.setattr(SimulatedGPU, "submit", watched)
    cost = Roofline(read=0.002)
    steps = steps_of(monkeypatch, cost, "on", 4, acceptance=0.7, num_requests=60, tokens=200, every=0.1, **model)
    with_guesses = [n for n, step in enumerate(steps) if any(row.num_drafts for row in step.rows)]
    trials = [b for a, b in itertools.pairwise((-OFF_STEPS, *with_guesses)) if b - a >= OFF_STEPS]
    waits = [b - a for a, b in itertools.pairwise(trials)]
    assert len(waits) >= 2
    assert waits == sorted(waits)
    assert sum(kept_up.values()) < len(steps) / 4
    whole = dict[str, bool]()  # by request, whether all of it was kept up with
    for step in steps:
        for row in step.rows:
            whole[row.request_id] = whole.get(row.request_id, True) and kept_up[step.step_id]
            assert whole[row.request_id] or not row.num_drafts


@pytest.mark.parametrize("adaptive", ["on", "off"])
def test_how_many_guesses_a_row_gets_is_asked_once_a_step_also_beside_chunks_of_prompts(
    monkeypatch: pytest.MonkeyPatch, adaptive: str
) -> None:
    steps, of_step = list[Counter[str]](), Counter[str]()
    asked, schedule = Drafting._useful_drafts, Drafting.schedule

    def planned(scheduler: Drafting, now: float) -> StepPlan:
        of_step.clear()
        plan = schedule(scheduler, now)
        assert all(of_step[row.request_id] for row in plan.rows if row.num_drafts)
        steps.append(Counter({row.request_id: row.num_tokens for row in plan.rows}))
        assert not of_step or max(of_step.values()) == 1
        return plan

    monkeypatch.setattr(Drafting, "schedule", planned)
    monkeypatch.setattr(Drafting, "_useful_drafts", lambda s, r: (of_step.update([r.id]), asked(s, r))[1])
    config = EngineConfig(num_blocks=400, max_num_batched_tokens=16, num_drafts=3, adaptive_drafts=adaptive)  # type: ignore[arg-type]
    replica = Replica(Roofline(), config, acceptance=0.5)
    for i in range(4):
        replica.offer(request(str(i), 0.05 * i, 100, 30), 0.05 * i)
    replica.run()
    assert any(min(step.values()) == 1 < max(step.values()) for step in steps if step)


def test_time_of_the_draft_that_unfollowed_requests_take_is_not_held_against_it() -> None:
    alone, among = Payoff(), Payoff()
    for _ in range(TRIAL_STEPS):
        for payoff, rows in ((alone, 2), (among, 8)):
            payoff.target.seconds |= {1: 0.010, 20: 0.010}
            payoff.add(rows, rows + 4, rows + 2, 0.012, 0.002 * 2 / rows)
    assert alone.on
    assert among.on
    losing = Payoff()
    for _ in range(TRIAL_STEPS):
        losing.target.seconds |= {1: 0.010, 20: 0.010}
        losing.add(8, 12, 10, 0.015, 0.005)
    assert not losing.on
    for _ in range(OFF_STEPS):
        assert not losing.on
        losing.wait()
    assert losing.on


def test_of_what_a_model_takes_the_share_of_what_it_follows_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, found = object.__new__(Adapting), list[tuple[float, ...]]()
    scheduler.payoff, scheduler._behind = Payoff(), {"a", "b", "c"}
    monkeypatch.setattr(scheduler.payoff, "add", lambda *values: found.append(values))
    plan = StepPlan(1, tuple(Row(name, 9, 1, True, 2 * (name == "d")) for name in "abcd"))
    scheduler._judge(plan, 5, StepOutput({}, {}, 1.0, 1.5, drafting=0.25))
    assert found == [(4, 6, 5, 0.5, 0.0625)]
