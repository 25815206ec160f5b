"""Waiting under load: every control at both ends, formulas where they hold, and the picture says where they do not."""

import re
from collections.abc import Sequence
from typing import Any

import pytest

from chapters.widgets import under_load
from chapters.widgets.under_load import MEASURES, STATISTICS, draw, formula
from reference_impl.bench.under_load import ARRIVALS, OUTPUTS, SEATS, Line, alone, recorded, short_run
from reference_impl.theory import queueing
from reference_impl.theory.units import format_seconds

KEYS = list(recorded())
RANDOM = ("Poisson", "exponential, mean 100")


def shown(seats: str = "1 seat", measure: str = "wait for the first step", statistic: str = "p99", **more: Any) -> str:
    chosen = {"arrivals": RANDOM[0], "outputs": RANDOM[1], "load": 0.9, "seed": 0} | more
    return draw(recorded(), short_run, alone(), seats, measure=measure, statistic=statistic, **chosen).alt


def ends(control: Any) -> Sequence[Any]:
    values = [value for _, value in control._options_full]
    return values[0], values[-1]


@pytest.mark.usefixtures("painted")
def test_every_control_works_at_both_ends() -> None:
    view = under_load(recorded(), short_run, alone())
    for control in view.controls.values():
        before = control.value
        for value in ends(control):
            control.value = value
            assert re.search(r'<img [^>]*alt="[^"]{20,}"', view.picture.value), (control.description, value)
            assert "nan" not in view.shown.alt.lower()
        control.value = before
    for low_or_high in (0, 1):
        for control in view.controls.values():
            control.value = ends(control)[low_or_high]
    assert "a run of 100 requests says" in view.shown.alt


@pytest.mark.parametrize("statistic", STATISTICS)
@pytest.mark.parametrize("measure", MEASURES)
def test_every_measure_and_statistic_is_drawn_for_every_setting(measure: str, statistic: str) -> None:
    for seats, arrivals, outputs in KEYS[::5]:
        assert f"{statistic} of the {measure} at 90%" in shown(
            seats, measure, statistic, arrivals=arrivals, outputs=outputs
        )


def test_the_recorded_settings_are_all_of_them() -> None:
    assert [(seats, a, o) for seats in SEATS for a in ARRIVALS for o in OUTPUTS] == KEYS


@pytest.mark.parametrize("outputs", OUTPUTS)
@pytest.mark.parametrize("share", [0.2, 0.4, 0.6, 0.7])
def test_with_one_seat_and_random_arrivals_the_formula_is_right(outputs: str, share: float) -> None:
    """18,000 requests: nearer to saturation their mean still strays further."""
    line = recorded()["1 seat", "Poisson", outputs]
    found = next(p for p in line.points if p.load == share).wait["mean"][0]
    assert formula(line, 1, share, "mean") == pytest.approx(found, rel=0.15)
    assert formula(line, 1, share, "mean") == pytest.approx(
        queueing.mg1_wait_seconds(1 / line.capacity, share, line.scv)
    )


def test_with_many_seats_neither_one_server_nor_many_describes_the_engine() -> None:
    for seats, too_short in (("8 seats", False), ("256 seats", True)):
        line = recorded()[seats, *RANDOM]
        for point in line.points:
            if 0.4 <= point.load <= 0.8:
                one, many = (formula(line, servers, point.load, "mean") for servers in (1, round(line.servers)))
                assert point.wait["mean"][0] < one / 2, (seats, point.load)
                assert (2 * many < point.wait["mean"][0]) == too_short, (seats, point.load)


def test_service_slows_down_as_others_join_and_no_formula_knows() -> None:
    """TPOT at 90 % of the capacity over that of an idle engine: the same with one seat, far more with 256."""
    idle = alone()["tpot"]
    slower = {seats: recorded()[seats, *RANDOM].points[-1].tpot["mean"][0] / idle for seats in SEATS}
    assert slower["1 seat"] == pytest.approx(1, abs=0.01)
    assert 1.1 < slower["8 seats"] < 0.5 * slower["256 seats"]
    assert "a server as fast as when idle 5.65 ms" in shown("256 seats", "time per output token", "mean")


def test_the_knee_is_where_seats_or_blocks_are_full() -> None:
    full: dict[str, Line] = {seats: recorded()[seats, *RANDOM] for seats in SEATS}
    assert full["1 seat"].servers == pytest.approx(1, abs=0.02)
    assert full["8 seats"].servers == pytest.approx(8, abs=0.2)
    assert 12 < full["256 seats, cache of 16,000 tokens"].servers < 16_000 / 1001
    assert sum(p.preempted for p in full["256 seats"].points) == 0
    assert full["256 seats, cache of 16,000 tokens"].points[-1].preempted > 0
    assert full["256 seats, cache of 16,000 tokens"].capacity < 0.6 * full["256 seats"].capacity


def test_a_formula_for_a_percentile_says_what_it_assumes() -> None:
    assert "formula, if waits are exponential: one server" in shown(statistic="p99")
    assert "formula: one server" in shown(statistic="mean")
    assert "formula: a server" in shown(measure="time per output token", statistic="p99")


def test_no_wait_is_said_and_drawn_at_the_floor() -> None:
    assert "p50 of the wait for the first step at 20%" in (alt := shown(statistic="p50", load=0.2))
    assert "engine none" in alt
    assert "one server none" in alt
    assert "engine's" not in alt


def test_a_short_run_is_simulated_for_the_load_that_is_chosen_and_differs_from_seed_to_seed() -> None:
    said = {re.search(r"100 requests says ([\d.]+ m?s)", shown(seed=seed)).group(1) for seed in (1, 2, 3)}  # type: ignore[union-attr]
    assert len(said) == 3
    assert "100 requests" not in shown(seed=0)
    assert shown(seed=1) == shown(seed=1)


def test_long_outputs_make_others_wait_with_one_seat_and_not_with_many() -> None:
    waits = {
        seats: [recorded()[seats, "Poisson", outputs].points[-3].wait["mean"][0] for outputs in OUTPUTS]
        for seats in ("1 seat", "256 seats")
    }
    assert max(waits["1 seat"]) > 3 * min(waits["1 seat"])
    assert max(waits["256 seats"]) < 1.1 * min(waits["256 seats"])


def test_bursts_raise_the_wait_and_their_formula_is_one_for_high_loads() -> None:
    line = recorded()["1 seat", "bursty, CV 3", RANDOM[1]]
    ratios = [formula(line, 1, p.load, "mean") / p.wait["mean"][0] for p in line.points]
    assert ratios == sorted(ratios)
    assert ratios[0] < 0.5
    assert 0.8 < ratios[-1] < 1.25
    for bursty, random in zip(line.points, recorded()["1 seat", *RANDOM].points, strict=True):
        assert bursty.wait["mean"][0] > 3 * random.wait["mean"][0]


def test_the_time_to_the_first_token_is_the_wait_and_one_prefill() -> None:
    seconds = formula(recorded()["1 seat", *RANDOM], 1, 0.2, "mean") + alone()["ttft"]
    assert f"one server {format_seconds(seconds)}" in shown(measure="time to first token", statistic="mean", load=0.2)
