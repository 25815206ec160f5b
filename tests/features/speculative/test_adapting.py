"""How many drafts pay, on a simulated GPU whose clock is virtual: so that what is best is known."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from reference_impl.assembly.config import EngineConfig
from reference_impl.features.speculative.adapting import PLAIN_AFTER, TRIAL_AFTER, Acceptance, Adapting
from reference_impl.features.speculative.payoff import (
    COLD_STEPS,
    LEAST_SEEN,
    LEAST_WON,
    MEMORY,
    MOST_LOST,
    MOST_UNUSED,
    OFF_STEPS,
    RECENTLY_OFF,
    TRIAL_STEPS,
    Payoff,
)
from reference_impl.features.speculative.scheduling import Drafting
from reference_impl.features.speculative.step_costs import (
    FORGOTTEN_AFTER,
    NUM_SEEN,
    NUM_SIZES,
    NUM_TIMES,
    StepCosts,
    Times,
)
from reference_impl.interfaces import Reply, Row, SamplingParams, Step, StepOutput, StepPlan
from reference_impl.observe.trace import DraftUse, StepDone, Trace
from reference_impl.simulation.executor import SimulatedGPU
from reference_impl.simulation.ledger import Ledger
from reference_impl.simulation.replica import Replica
from tests.engine.conftest import some
from tests.simulation.loads import request


@dataclass(frozen=True)
class Roofline:
    """Steps take what their weights take to read, or what their tokens take to compute."""

    read: float = 0.010
    compute: float = 0.0
    first: float = 0.0  # more, of a step in which some row has more than one token
    bytes_per_token: float = 1000.0
    longest: int = 4096

    def step_seconds(self, new_tokens: Sequence[int], past_tokens: Sequence[int]) -> float:
        return self.read + self.compute * sum(new_tokens) + self.first * (max(new_tokens) > 1)


def run(
    cost: Roofline, adaptive: str, k: int, acceptance: float, num_requests: int, tokens: int = 400, every: float = 0.0,
    **seconds: float,
) -> Replica:  # fmt: skip
    """every: seconds between arrivals. seconds: of a draft model, as of `SimulatedGPU`."""
    config = EngineConfig(num_blocks=4000, max_num_seqs=64, num_drafts=k, adaptive_drafts=adaptive)  # type: ignore[arg-type]
    replica = Replica(cost, config, acceptance=acceptance, **seconds)  # type: ignore[arg-type]
    for i in range(num_requests):
        replica.offer(request(str(i), every * i, 10, tokens), every * i)
    replica.run()
    return replica


LOADS = list(itertools.product((0.0, 0.3, 0.6, 0.9, 1.0), (0.0, 0.0005, 0.02)))


@pytest.mark.parametrize(
    ("acceptance", "compute", "num_requests"),
    some(
        [*((*load, 1) for load in LOADS), (0.0, 0.0, 24), (0.6, 0.0005, 24), (1.0, 0.02, 24)],
        [(*load, num) for load in LOADS for num in (1, 24)],
    ),
)
def test_it_is_about_as_fast_as_the_best_number_and_never_much_slower_than_none(
    acceptance: float, compute: float, num_requests: int
) -> None:
    cost = Roofline(compute=compute)
    seconds = {k: run(cost, "off", k, acceptance, num_requests).gpu.time for k in (0, 1, 3, 6)}
    adapted = run(cost, "on", 6, acceptance, num_requests).gpu.time
    assert adapted <= 1.03 * seconds[0]
    assert adapted <= 1.12 * min(seconds.values())


@pytest.mark.parametrize("model", [{}, {"keep_up_seconds": 0.0001, "draft_seconds": 0.0002}])
@pytest.mark.parametrize("acceptance", [0.1, 0.2, 0.3, 0.8])
def test_the_first_draft_of_a_step_may_cost_more_than_all_that_follow(
    acceptance: float, model: dict[str, float]
) -> None:
    """So that the price of one more is next to nothing, and all of them lose where they are seldom kept."""
    cost = Roofline(first=0.004, compute=0.00001)
    plain = run(cost, "off", 0, acceptance, 1, tokens=1000).gpu.time
    fixed = [run(cost, "off", k, acceptance, 1, tokens=1000, **model).gpu.time for k in (1, 4)]
    adapted = run(cost, "on", 4, acceptance, 1, tokens=1000, **model).gpu.time
    assert adapted <= 1.03 * plain
    assert adapted <= 1.05 * min(plain, *fixed)


def test_two_steps_in_about_fifty_have_no_drafts_so_that_what_they_cost_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = steps_of(monkeypatch, Roofline(), "on", 4, acceptance=1.0, num_requests=3, tokens=1000)
    assert DraftUse.of(steps).num_steps_off == 0, "drafts would have paid there, too"
    without = [n for n, step in enumerate(steps) if not any(row.num_drafts for row in step.rows)][2 + NUM_SEEN : -1]
    assert len(without) >= 6
    assert {b - a for a, b in itertools.pairwise(without)} == {1, PLAIN_AFTER + 1}


def decoding(*drafts: int) -> StepPlan:
    """Of a row for each."""
    return StepPlan(1, tuple(Row(str(i), 9, 1, True, num) for i, num in enumerate(drafts)))


def costs_of(
    *depths: int, num_rows: int = 4, first: float = 0.0, drafting: tuple[float, float] = (0.0, 0.0)
) -> StepCosts:
    """After steps in which each row has so many drafts: a second for a step, 0.01 for a draft token, `first` for the
    first of a step; of a model a part for each step and one for each draft token of a row."""
    costs = StepCosts()
    for depth in depths:
        spent = drafting[0] + drafting[1] * depth
        costs.add(decoding(*[depth] * num_rows), 10, 1 + first * (depth > 0) + 0.01 * num_rows * depth + spent, spent)
    return costs


def test_what_a_draft_costs_is_known_when_steps_with_some_and_without_were_seen() -> None:
    assert costs_of().slope(4) is None
    assert costs_of(0, 0, 0, 0, 1).slope(4) is None
    assert costs_of(0, 0, 1, 1, 1).slope(4) is None
    assert costs_of(0, 0, 0, 0, 1, 1, 1).slope(4) == pytest.approx(0.01), "between a step without and one with"
    assert costs_of(0, 0, 0, 0, 1, 1, 1, 3, 3, 3).slope(4) == pytest.approx(0.01)
    assert costs_of(0, 0, 0, 0, 1, 1, 1, first=0.5).slope(4) == pytest.approx(0.135)
    assert costs_of(0, 0, 0, 0, 1, 1, 1, 3, 3, 3, first=0.5).slope(4) == pytest.approx(0.01)


def test_seconds_are_those_of_steps_of_the_size_or_what_follows_from_others() -> None:
    costs = costs_of(*(0, 0, 1, 2, 3) * NUM_TIMES, first=0.3, drafting=(0.5, 0.2))
    for depth in range(6):
        expected = 1.5 + 0.3 * (depth > 0) + (0.04 + 0.2) * depth
        assert costs.seconds(4, 4 * depth, depth) == pytest.approx(expected), depth
    assert costs.seconds(6, 0, 0) == pytest.approx(1.5 + 0.02), "of rows not seen: as if each were one draft more"
    assert costs.seconds(6, 6, 1) == pytest.approx(1.3 + 0.01 * 8 + 0.7)


def test_a_step_without_drafts_counts_only_behind_one_without() -> None:
    costs = costs_of(*(0, 1) * 9)
    assert not costs.plain.seconds
    for _ in range(NUM_SEEN):
        costs.add(decoding(0, 0, 0, 0), 4, 9.0)
        costs.add(decoding(0, 0, 0, 0), 4, 1.0)
        costs.interrupt()
    assert costs.plain.seconds == {4: 1.0}


def test_the_rate_is_that_of_the_newest_steps() -> None:
    costs = costs_of(*[1] * 50)
    assert costs.rate == pytest.approx(10 / 1.04, rel=0.001)
    for _ in range(50):
        costs.add(decoding(2, 2, 2, 2), 6, 2.0)
    assert costs.rate == pytest.approx(6 / 2.0, rel=0.001)


def test_steps_without_a_model_are_known_by_how_many_rows_they_have() -> None:
    costs = costs_of(*(0, 0, 1, 2) * 9)
    assert costs.seconds_alone(4) is None
    for _ in range(1 + NUM_SEEN):
        costs.add_alone(4, 0.9)
    assert costs.seconds_alone(4) == pytest.approx(0.9)
    assert costs.seconds_alone(6) == pytest.approx(0.92)
    assert costs.seconds_alone(9) is None
    assert costs.plain.seconds == {4: 1.0}


def times_of(*seen: tuple[int, float]) -> Times:
    times = Times()
    for now, (size, seconds) in enumerate(seen):
        times.add(size, seconds, now)
    return times


def test_times_are_of_the_newest_steps_and_of_the_sizes_seen_lately() -> None:
    assert times_of().at(3) is None
    assert times_of(*[(3, 1.0)] * (NUM_SEEN - 1)).at(3) is None, "the first steps of a kind may say nothing"
    assert times_of(*[(3, 1.0)] * NUM_SEEN).at(3) == times_of(*[(3, 1.0)] * NUM_SEEN).at(5) == 1
    falls = times_of(*[(1, 2.0)] * NUM_SEEN, *[(5, 1.0)] * NUM_SEEN)
    assert falls.line() == (0, 3, 1.5), "a time that falls with size is noise"
    times = times_of(*[(size, 1.0) for size in range(8, 16) for _ in range(NUM_SEEN)])
    assert [*times.seconds] == [*range(8, 16)]
    for now in range(100, 100 + FORGOTTEN_AFTER + NUM_SIZES):
        times.add(7, 1.0, now)
    assert [*times.seconds] == [7]
    for seconds in [1.0] * 20 + [2.0] * (NUM_TIMES // 2 + 1):
        times.add(7, seconds, now)
    assert times.seconds == {7: 2.0}


def test_behind_a_jump_no_step_is_expected_to_take_no_time() -> None:
    """16 tokens have a kernel that takes five times as long as that for 8: a line through both is below 0 at 5."""
    times = times_of(*[(8, 0.010)] * NUM_SEEN, *[(16, 0.050)] * NUM_SEEN)
    assert times.at(12) == pytest.approx(0.030)
    assert times.at(6) == pytest.approx(0.030 * 6 / 12)
    assert times.at(1) == pytest.approx(0.030 / 12)
    assert times_of(*[(16, 0.050)] * NUM_SEEN).at(1, slope=0.01) == pytest.approx(0.050 / 16)


@pytest.mark.parametrize("acceptance", [0.2, 0.9])
@pytest.mark.parametrize("model", [{}, {"keep_up_seconds": 0.001, "draft_seconds": 0.001}])
@pytest.mark.parametrize("cost", [Roofline(read=0.0), Roofline(read=0.0, compute=0.001), Roofline(read=0.0, first=0.1)])
def test_steps_that_take_no_time_on_a_coarse_clock_end_like_others(
    monkeypatch: pytest.MonkeyPatch, cost: Roofline, model: dict[str, float], acceptance: float
) -> None:
    steps = steps_of(monkeypatch, cost, "on", 3, acceptance, 3, tokens=100, **model)
    assert sum(map(sum, (step.num_new_tokens for step in steps))) == 3 * 100


def test_sizes_near_one_another_show_no_slope() -> None:
    """126 tokens count as 120: beside 128 they seem to cost a quarter of what they do, and all drafts next to
    nothing."""
    costs = StepCosts()
    for drafts in ([0] * 64, [1] * 64, [1] * 62 + [0] * 2):
        for _ in range(1 + NUM_SEEN):
            costs.add(decoding(*drafts), 100, 0.01 + 0.0004 * (64 + sum(drafts)))
    assert costs.slope(64) == pytest.approx(0.0004)
    assert costs.seconds(64, 64 * 6, 6) == pytest.approx(0.01 + 0.0004 * 64 * 7, rel=0.1)


def test_a_line_that_is_too_steep_ends_nowhere_below_zero() -> None:
    """Two steps with drafts took forty times as long, since their kernels were made: one row still takes time."""
    costs = costs_of(*[0] * (1 + NUM_SEEN), *[1] * NUM_SEEN, num_rows=8)
    for _ in range(NUM_SEEN):
        costs.add(decoding(*[3] * 8), 10, 40.0)
    assert costs.seconds(1, 0, 0) == pytest.approx(1 / 8)


def test_large_sizes_count_together_and_the_number_of_sizes_is_limited() -> None:
    """Of 64 rows with drafts hardly two steps have as many tokens."""
    times = times_of(*[(size, size / 1000) for size in range(64, 320)] * 2)
    assert len(times.seconds) <= NUM_SIZES
    line = times.line()
    assert line is not None
    assert line.slope == pytest.approx(0.001, rel=0.1)
    for size in (64, 100, 200, 319):
        assert times.at(size) == pytest.approx(size / 1000, rel=0.13)


@pytest.mark.parametrize("stalls", [1, 3])
def test_a_step_that_took_fifty_times_as_long_changes_no_time(stalls: int) -> None:
    times = times_of(
        *[(size, 50.0 if size == 5 and turn < stalls else 1 + size / 20) for turn in range(8) for size in (1, 5)]
    )
    assert times.at(3) == pytest.approx(1.15)


@pytest.mark.parametrize("k", [1, 4])
def test_a_first_step_of_a_kind_that_takes_fifty_times_as_long_stops_no_drafts(
    monkeypatch: pytest.MonkeyPatch, k: int
) -> None:
    """What is computed for the first time may be made then: its buffers, its code."""

    @dataclass(frozen=True)
    class Cold(Roofline):
        seen: set[int] = field(default_factory=set)

        def step_seconds(self, new_tokens: Sequence[int], past_tokens: Sequence[int]) -> float:
            cold = sum(new_tokens) not in self.seen
            self.seen.add(sum(new_tokens))
            return super().step_seconds(new_tokens, past_tokens) * (50 if cold else 1)

    use = DraftUse.of(steps_of(monkeypatch, Cold(compute=0.0001), "on", k, 0.9, 1, tokens=600))
    assert use.num_steps_off < 10
    assert use.num_draft_tokens > 250


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
        for _ in range(found.patience):
            found.add(0, 0)
        found.add(1, kept)
    found.add(0, 0)
    found.add(1, 0)
    assert found.patience == 2 * TRIAL_AFTER, "a step without drafts between others is no trial"
    assert waits == [TRIAL_AFTER * n for n in (1, 2, 4, 8, 1)]


def steps_of(monkeypatch: pytest.MonkeyPatch, *args: Any, **options: Any) -> list[StepDone]:
    """Of a `run`."""
    trace, add = Trace(), Ledger.add
    monkeypatch.setattr(Ledger, "add", lambda ledger, event: (trace.add(event), add(ledger, event))[1])
    run(*args, **options)
    monkeypatch.undo()
    return trace.steps()


def test_the_trace_says_in_which_steps_drafts_would_have_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong drafts that cost much are tried, and then off but for trials; those that cost nothing never are."""
    steps = steps_of(monkeypatch, Roofline(compute=0.02), "on", 4, acceptance=0.0, num_requests=3)
    use = DraftUse.of(steps)
    decoding = [step for step in steps if all(row.num_tokens == 1 for row in step.rows)]
    off = [step for step in decoding if not any(row.num_drafts for row in step.rows)]
    assert 0 < use.num_drafts < use.num_steps_off <= len(off)
    assert len(off) - use.num_steps_off <= 10, "measured first, and the last token needs no draft"
    assert max(step.num_undrafted for step in steps) == 3
    for step in steps:
        assert step.num_undrafted <= sum(row.num_drafts == 0 for row in step.rows)
    free = steps_of(monkeypatch, Roofline(), "on", 4, acceptance=0.9, num_requests=3)
    assert DraftUse.of(free).num_steps_off == 0 < DraftUse.of(free).num_drafts
    fixed = steps_of(monkeypatch, Roofline(compute=0.02), "off", 4, acceptance=0.0, num_requests=3)
    assert DraftUse.of(fixed).num_steps_off == 0 < DraftUse.of(fixed).num_drafts


@pytest.mark.parametrize(
    ("acceptance", "compute", "num_requests"),
    some(
        [*((acceptance, compute, 1) for acceptance in (0.0, 0.3, 0.6, 0.9) for compute in (0.0, 0.0005)),
         (0.3, 0.0005, 24), (0.9, 0.0, 24)],
        list(itertools.product((0.0, 0.3, 0.6, 0.9), (0.0, 0.0005), (1, 24))),
    ),
)  # fmt: skip
def test_a_model_that_drafts_and_takes_time_in_every_step_never_makes_it_much_slower(
    acceptance: float, compute: float, num_requests: int
) -> None:
    """It takes a third of a step to keep up, and a fifth for each draft token."""
    cost, model = Roofline(compute=compute), {"keep_up_seconds": 0.003, "draft_seconds": 0.002}
    seconds = {k: run(cost, "off", k, acceptance, num_requests, **model).gpu.time for k in (1, 3, 6)}
    plain = run(cost, "off", 0, acceptance, num_requests).gpu.time
    adapted = run(cost, "on", 6, acceptance, num_requests, **model).gpu.time
    assert adapted <= 1.03 * plain
    assert adapted <= 1.12 * min(plain, *seconds.values())


def test_what_pays_for_one_request_is_not_taken_to_pay_for_many() -> None:
    """Tokens are free up to a size, and beyond it hardly a step is all decoding, so that none shows what it takes."""

    @dataclass(frozen=True)
    class Bound(Roofline):
        def step_seconds(self, new_tokens: Sequence[int], past_tokens: Sequence[int]) -> float:
            return max(self.read, 0.001 * sum(new_tokens))

    seconds = {}
    for adaptive, k in (("on", 3), ("off", 3), ("off", 0)):
        config = EngineConfig(num_blocks=4000, max_num_seqs=64, num_drafts=k, adaptive_drafts=adaptive)  # type: ignore[arg-type]
        replica = Replica(Bound(), config, acceptance=0.5)
        for i in range(100):
            replica.offer(request(str(i), 0.0, 10, 20), 0.0 if i == 0 else 0.1 + 0.002 * i)
        replica.run()
        seconds[adaptive, k] = replica.gpu.time
    assert seconds["off", 3] > 1.4 * seconds["off", 0]
    assert seconds["on", 3] <= 1.05 * seconds["off", 0]


def test_what_a_model_saves_decides_not_how_often_it_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same drafts pay where a step is long, and do not where it is short."""
    model = {"keep_up_seconds": 0.003, "draft_seconds": 0.001}
    fast = steps_of(monkeypatch, Roofline(read=0.002), "on", 4, acceptance=0.7, num_requests=1, **model)
    slow = steps_of(monkeypatch, Roofline(read=0.020), "on", 4, acceptance=0.7, num_requests=1, **model)
    assert DraftUse.of(fast).num_drafts <= COLD_STEPS + TRIAL_STEPS
    assert DraftUse.of(fast).num_steps_off > 300
    assert DraftUse.of(slow).num_steps_off == 0


def test_a_model_that_lost_is_tried_again_with_new_requests_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """And late, since a trial loses much here. What it has not kept up with gets no drafts: they would be of a text
    with holes."""
    model = {"keep_up_seconds": 0.005, "draft_seconds": 0.001}
    submit, kept_up = SimulatedGPU.submit, dict[int, bool]()

    def watched(gpu: SimulatedGPU, step: Step) -> Reply:
        kept_up[step.step_id] = step.keeps_up
        return submit(gpu, step)

    monkeypatch.setattr(SimulatedGPU, "submit", watched)
    cost = Roofline(read=0.002)
    steps = steps_of(monkeypatch, cost, "on", 4, acceptance=0.7, num_requests=250, tokens=200, every=0.1, **model)
    with_drafts = [n for n, step in enumerate(steps) if any(row.num_drafts for row in step.rows)]
    trials = [b for a, b in itertools.pairwise((-OFF_STEPS, *with_drafts)) if b - a >= OFF_STEPS]
    waits = [b - a for a, b in itertools.pairwise(trials)]
    assert len(waits) >= 2
    assert min(waits) > OFF_STEPS
    assert waits[0] > 8 * OFF_STEPS  # of trials, the one that lost most
    assert sum(kept_up.values()) < len(steps) / 4
    whole = dict[str, bool]()  # by request, whether all of it was kept up with
    for step in steps:
        for row in step.rows:
            whole[row.request_id] = whole.get(row.request_id, True) and kept_up[step.step_id]
            assert whole[row.request_id] or not row.num_drafts


def test_a_model_whose_drafts_were_all_wrong_drafts_in_a_later_trial() -> None:
    """What was seen before it was switched off says that no draft pays: a trial without any would lose again."""
    config = EngineConfig(num_blocks=400, max_num_seqs=4, num_drafts=4, adaptive_drafts="on")
    replica = Replica(Roofline(), config, acceptance=0.0, keep_up_seconds=0.0015, draft_seconds=0.0015)
    for i in range(40):
        replica.offer(request(str(i), 0.0, 10, 100), 0.0)
    replica.run(until=2.0)
    replica.gpu.acceptance = 0.9
    replica.run()
    assert replica.gpu.time < 8.0, "ten times a hundred steps of 0.010 s, where nothing is drafted"


@pytest.mark.parametrize("adaptive", ["on", "off"])
def test_how_many_drafts_a_row_gets_is_asked_once_a_step_also_beside_chunks_of_prompts(
    monkeypatch: pytest.MonkeyPatch, adaptive: str
) -> None:
    steps, of_step = list[Counter[str]](), Counter[str]()
    asked, schedule = Drafting.useful_drafts, Drafting.schedule

    def planned(scheduler: Drafting, now: float) -> StepPlan:
        of_step.clear()
        plan = schedule(scheduler, now)
        assert all(of_step[row.request_id] for row in plan.rows if row.num_drafts)
        steps.append(Counter({row.request_id: row.num_tokens for row in plan.rows}))
        assert not of_step or max(of_step.values()) == 1
        return plan

    monkeypatch.setattr(Drafting, "schedule", planned)
    monkeypatch.setattr(Drafting, "useful_drafts", lambda s, r: (of_step.update([r.id]), asked(s, r))[1])
    config = EngineConfig(num_blocks=400, max_num_batched_tokens=16, num_drafts=3, adaptive_drafts=adaptive)  # type: ignore[arg-type]
    replica = Replica(Roofline(), config, acceptance=0.5)
    for i in range(4):
        replica.offer(request(str(i), 0.05 * i, 100, 30), 0.05 * i)
    replica.run()
    assert any(min(step.values()) == 1 < max(step.values()) for step in steps if step)


@pytest.mark.parametrize(("budget", "most"), [(16, 0), (160, 5)])
def test_drafts_take_little_of_a_budget_that_prompts_could_use(
    monkeypatch: pytest.MonkeyPatch, budget: int, most: int
) -> None:
    """Every token of a prompt counts; of seven drafts some are in vain, and they would take half of a small budget."""
    trace, add = Trace(), Ledger.add
    config = EngineConfig(num_blocks=4000, max_num_batched_tokens=budget, num_drafts=7, adaptive_drafts="on")
    replica = Replica(Roofline(), config, acceptance=0.95)
    monkeypatch.setattr(Ledger, "add", lambda ledger, event: (trace.add(event), add(ledger, event))[1])
    replica.offer(request("decodes", 0.0, 10, 500), 0.0)
    replica.offer(request("prompt", 0.3, budget * 20, 1), 0.3)
    replica.run()
    drafts = [(max(row.num_drafts for row in step.rows), len(step.rows) > 1) for step in trace.steps()]
    beside = [num for num, is_beside in drafts if is_beside]
    assert len(beside) >= 20
    assert beside.count(most) >= 15
    assert max(num for num, _ in drafts) == 7


def test_what_loses_is_off_for_so_long_that_its_trials_take_a_small_share_of_the_time() -> None:
    losing = Payoff()
    lost = waited = 0.0
    for _ in range(20_000):
        if losing.on:
            losing.add(8, 8 + 2, 0.010, 0.020)
            lost += 0.020 / 0.010 - 2 / 8
        else:
            losing.wait()
            waited += 1
    assert 0 < lost <= MOST_LOST * waited + 2 * (COLD_STEPS + TRIAL_STEPS)  # the newest wait has just begun


def test_a_model_that_pays_stays_on_and_one_that_no_longer_does_is_switched_off() -> None:
    payoff = Payoff()
    for turn in range(2000):
        payoff.add(1, 1 + (turn % 3), 0.010, 0.005 if turn % 97 else 0.5)
        assert payoff.on
    for turn in range(2 * OFF_STEPS):
        if payoff.on:
            payoff.add(1, 1 + (turn % 5 == 0), 0.010, 0.005)
    assert not payoff.on


def test_the_first_steps_of_a_trial_do_not_count() -> None:
    """A model's first steps may take ten times as long as those that follow."""
    payoff = Payoff()
    for turn in range(COLD_STEPS + 4 * TRIAL_STEPS):
        payoff.add(1, 4, 0.005, 0.050 if turn < COLD_STEPS else 0.010)
        assert payoff.on


def test_what_is_lost_counts_for_all_rows_of_a_step() -> None:
    """Two of eight have drafts: what their drafts take is a small part of the step."""
    payoff = Payoff()
    for _ in range(COLD_STEPS + TRIAL_STEPS):
        payoff.add(8, 10, 0.010, 0.0005)
    assert payoff.on
    losing = Payoff()
    for _ in range(COLD_STEPS + TRIAL_STEPS):
        losing.add(8, 10, 0.010, 0.005)
    assert not losing.on
    for _ in range(OFF_STEPS - 1):
        losing.wait()
        assert not losing.on
    while not losing.on:
        losing.wait()
    assert losing.num_steps == 0


@pytest.mark.parametrize("model", [{}, {"keep_up_seconds": 0.002, "draft_seconds": 0.0005}])
def test_a_machine_that_stalls_now_and_then_drafts_as_much(
    monkeypatch: pytest.MonkeyPatch, model: dict[str, float]
) -> None:
    """A step in fifty takes fifty times as long, as on a machine whose memory or cores others took."""

    @dataclass(frozen=True)
    class Stalls(Roofline):
        every: list[int] = field(default_factory=list)

        def step_seconds(self, new_tokens: Sequence[int], past_tokens: Sequence[int]) -> float:
            self.every.append(1)
            usual = super().step_seconds(new_tokens, past_tokens)
            return usual * (50 if len(self.every) % 50 == 7 else 1)

    used = [
        DraftUse.of(steps_of(monkeypatch, cost, "on", 4, 0.9, 1, tokens=1500, **model)).num_drafts
        for cost in (Roofline(compute=0.0005), Stalls(compute=0.0005))
    ]
    assert used[1] >= 0.95 * used[0] > 300


def test_what_a_model_takes_for_rows_that_it_is_behind_with_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, found = object.__new__(Adapting), list[tuple[float, ...]]()
    scheduler.payoff, scheduler._behind, scheduler.costs = Payoff(), {"a", "b", "c"}, StepCosts()
    scheduler._prompts, scheduler._lengths = {}, deque()
    scheduler._judge(decoding(0, 0, 0, 2), 5, 0.5, 0.25)
    monkeypatch.setattr(scheduler.payoff, "add", lambda *values: found.append(values))
    scheduler._judge(decoding(0, 0, 0, 2), 5, 0.5, 0.25)
    assert not found, "what a step without drafts takes is not known"
    for _ in range(NUM_SEEN):
        scheduler.costs.plain.add(4, 0.2, 1)
    scheduler._judge(decoding(0, 0, 0, 2), 5, 0.5, 0.25)
    scheduler._behind = {"0", "1", "2"}
    scheduler._judge(decoding(0, 0, 0, 2), 5, 0.5, 0.25)
    for _ in range(NUM_SEEN):
        scheduler.costs.alone.add(4, 0.1, 1)
    scheduler._judge(decoding(0, 0, 0, 2), 5, 0.5, 0.25)
    scheduler.payoff.num_steps = RECENTLY_OFF
    scheduler._judge(decoding(0, 0, 0, 2), 5, 0.5, 0.25)
    behind = 0.25 * 3 / 4
    assert found == [
        (4, 5, 0.2, pytest.approx(0.3), LEAST_SEEN), (4, 5, 0.2, pytest.approx(0.3 - behind), LEAST_SEEN),
        (4, 5, 0.1, pytest.approx(0.4 - behind), LEAST_WON), (4, 5, 0.2, pytest.approx(0.3 - behind), LEAST_SEEN),
    ]  # fmt: skip


def test_a_model_is_not_judged_by_steps_that_take_no_time_on_a_coarse_clock() -> None:
    scheduler = object.__new__(Adapting)
    scheduler.payoff, scheduler._behind, scheduler.costs = Payoff(), set(), StepCosts()
    scheduler._prompts, scheduler._lengths = {}, deque()
    for _ in range(NUM_SEEN):
        scheduler.costs.plain.add(4, 0.0, 1)
    for _ in range(COLD_STEPS + TRIAL_STEPS):
        scheduler._judge(decoding(0, 0, 0, 2), 5, 0.5, 0.25)
    assert scheduler.payoff.on


@pytest.mark.parametrize("tokens", [20, 400])
def test_what_a_model_takes_for_prompts_counts_over_the_tokens_that_requests_give(
    monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:
    """Its drafts win an eighth of each step. Where the target computes a text of twenty tokens in ten steps, a prompt
    that takes the model six of them is not paid back."""
    model = {"keep_up_seconds": 0.060, "draft_seconds": 0.001}
    submit = SimulatedGPU.submit

    def prompts_alone(gpu: SimulatedGPU, step: Step) -> Reply:
        gpu.keep_up_seconds = 0.060 if any(row.num_tokens > 1 for row in step.rows) else 0.002
        return submit(gpu, step)

    monkeypatch.setattr(SimulatedGPU, "submit", prompts_alone)
    steps = steps_of(monkeypatch, Roofline(), "on", 1, 0.6, 4000 // tokens, tokens=tokens, every=10.0, **model)
    assert (DraftUse.of(steps).num_steps_off > len(steps) / 2) == (tokens == 20)


def test_a_model_that_drafts_nothing_since_every_step_has_a_prompt_is_switched_off() -> None:
    """No such step shows what drafts cost, and in each the model takes time to keep up."""
    config = EngineConfig(num_blocks=4000, max_num_batched_tokens=64, num_drafts=4, adaptive_drafts="on")
    replica = Replica(Roofline(), config, acceptance=0.9, keep_up_seconds=0.002, draft_seconds=0.0005)
    for i in range(20):
        replica.offer(request(str(i), 0.0, 2000, 10), 0.0)
    replica.run(until=4.0)
    scheduler = replica.engine.scheduler
    assert isinstance(scheduler, Adapting)
    assert not scheduler.payoff.on
    step = replica.ledger.last_step
    assert step is not None
    assert step.num_undrafted == sum(row.num_tokens == 1 for row in step.rows) < len(step.rows), "prompts get none"
    for i in range(20, 60):  # prompts are short, and many steps all decode
        replica.offer(request(str(i), 10.0 + i, 10, 100), 10.0 + i)
    replica.run(until=60.0)
    assert scheduler.payoff.on


def test_a_draft_in_between_keeps_a_model_on() -> None:
    payoff = Payoff()
    for turn in range(3 * MOST_UNUSED):
        payoff.pass_over(turn % MOST_UNUSED == 0)
        assert payoff.on


def test_what_wins_next_to_nothing_is_switched_off() -> None:
    winning, even = Payoff(), Payoff()
    for _ in range(2 * MEMORY):
        if even.on:
            even.add(10, 14, 0.010, 0.0035)
        winning.add(10, 14, 0.010, 0.0028)
    assert winning.on
    assert not even.on


def test_a_request_that_is_aborted_while_its_prompt_is_computed_leaves_nothing() -> None:
    config = EngineConfig(num_blocks=400, num_drafts=2, adaptive_drafts="on")
    engine = Replica(Roofline(), config, acceptance=0.9, keep_up_seconds=0.001, draft_seconds=0.001).engine
    scheduler = engine.scheduler
    assert isinstance(scheduler, Adapting)
    for name in ("stays", "goes"):
        engine.add(list(range(10)), SamplingParams(max_tokens=20, ignore_eos=True), request_id=name)
    plan = scheduler.schedule(0.0)
    scheduler.abort("goes")
    scheduler.update(plan, StepOutput({row.request_id: (7,) for row in plan.rows}, {}, 0.0, 0.02, drafting=0.01))
    assert {*scheduler._prompts} == {"stays"}
    plan = scheduler.schedule(0.02)
    scheduler.update(plan, StepOutput({"stays": (7,)}, {}, 0.02, 0.04, drafting=0.01))
    scheduler.abort("stays")
    assert not scheduler._prompts
