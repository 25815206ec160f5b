"""Arrivals have the law they name. Seeds are fixed: a test here fails or passes for good."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
from scipy import stats

from reference_impl.simulation.workloads.arrivals import (
    DEFAULT_CV,
    DEFAULT_USERS,
    Bursty,
    ClosedLoop,
    Diurnal,
    Open,
    Poisson,
    choose,
)
from reference_impl.simulation.workloads.distributions import Drawn, bits

NUM = 50_000


def times(process: Open, num: int = NUM, seed: int = 0) -> np.ndarray:
    return np.array(list(islice(process.microseconds(bits(seed)), num))) / 1e6


def gaps(process: Open) -> np.ndarray:
    return np.diff(times(process), prepend=0.0)


def unrounded(process: Open) -> np.ndarray:
    """Most gaps of a very bursty process are below a microsecond; rounded, they are no gamma numbers any more."""
    rng = bits(0)
    return np.concatenate([process._gaps(rng) for _ in range(12)])


@pytest.mark.parametrize("rate", [0.02, 4.0, 1000.0])
def test_poisson_gaps_are_exponential(rate: float) -> None:
    # At 1000/s a microsecond is 1/1000 of the mean gap: far below what 50,000 gaps can tell.
    assert stats.kstest(gaps(Poisson(rate=rate)), stats.expon(scale=1 / rate).cdf).pvalue > 0.01


@pytest.mark.parametrize("cv", [0.5, 1.0, 2.0, 4.0])
def test_bursty_gaps_are_gamma_with_this_coefficient_of_variation(cv: float) -> None:
    assert stats.kstest(unrounded(Bursty(rate=0.1, cv=cv)), stats.gamma(cv**-2, scale=cv**2 / 0.1).cdf).pvalue > 0.01
    found = gaps(Bursty(rate=0.1, cv=cv))
    assert found.mean() == pytest.approx(10.0, rel=5 * cv / NUM**0.5)
    assert found.std() / found.mean() == pytest.approx(cv, rel=0.1)


def test_the_test_of_gamma_can_tell_a_wrong_one() -> None:
    assert stats.kstest(unrounded(Bursty(rate=0.1, cv=2.0)), stats.gamma(2.1**-2, scale=2.1**2 / 0.1).cdf).pvalue < 0.01
    assert stats.kstest(gaps(Poisson(rate=4.0)), stats.expon(scale=1 / 4.1).cdf).pvalue < 0.01


def test_a_cv_of_one_is_poisson() -> None:
    assert stats.ks_2samp(gaps(Bursty(rate=4.0, cv=1.0)), gaps(Poisson(rate=4.0))).pvalue > 0.01


@pytest.mark.parametrize("phase", [0.0, 0.25, 0.75])
def test_diurnal_arrivals_follow_the_sine(phase: float) -> None:
    process = Diurnal(rate=5.0, amplitude=0.8, period=600.0, phase=phase)
    found = times(process)
    edges = np.linspace(0, 600, 13)
    whole = found[found < found[-1] // 600 * 600]
    periods = found[-1] // 600
    counts = np.histogram(whole % 600, edges)[0]
    # Integral of rate * (1 + a sin(2 pi (t / T + phase))) over each twelfth.
    wave = -0.8 * 600 / (2 * np.pi) * np.cos(2 * np.pi * (edges / 600 + phase))
    expected = periods * 5.0 * (np.diff(edges) + np.diff(wave))
    chi2 = ((counts - expected) ** 2 / expected).sum()
    assert stats.chi2(12).sf(chi2) > 0.01
    assert counts.max() > 4 * counts.min()


def test_a_day_without_amplitude_is_poisson() -> None:
    assert stats.kstest(gaps(Diurnal(rate=4.0, amplitude=0.0)), stats.expon(scale=1 / 4).cdf).pvalue > 0.01


def test_diurnal_arrivals_have_the_rate_as_their_mean() -> None:
    found = times(Diurnal(rate=5.0, amplitude=1.0, period=100.0))
    assert NUM / found[-1] == pytest.approx(5.0, rel=5 / NUM**0.5)


@pytest.mark.parametrize("process", [Poisson(rate=3.0), Bursty(rate=3.0, cv=5.0), Diurnal(rate=3.0, period=50.0)])
def test_times_never_fall_and_depend_on_the_seed_only(process: Open) -> None:
    found = times(process)
    assert (np.diff(found) >= 0).all()
    assert (found == times(process)).all()
    assert (found != times(process, seed=1)).any()


def test_a_name_takes_over_the_rate_of_the_workload() -> None:
    assert choose(Poisson(rate=3.0), "bursty") == Bursty(rate=3.0, cv=DEFAULT_CV)
    assert choose(Poisson(rate=3.0), "diurnal", rate=7) == Diurnal(rate=7.0)
    assert choose(Bursty(rate=3.0, cv=5.0), "bursty") == Bursty(rate=3.0, cv=5.0)
    assert choose(Bursty(rate=3.0, cv=5.0), rate=7) == Bursty(rate=7.0, cv=5.0)
    assert choose(Poisson(rate=3.0), "closed_loop") == ClosedLoop(num_users=DEFAULT_USERS)
    assert choose(ClosedLoop(num_users=5), "poisson", rate=2.0) == Poisson(rate=2.0)


@pytest.mark.parametrize(
    ("arrivals", "rate", "said"),
    [
        ("poisson", None, "arrivals 'poisson' need a rate"),
        (None, 2.0, "a closed loop has no rate"),
        ("closed_loop", 2.0, "a closed loop has no rate"),
        ("weekly", None, "expected poisson, bursty, diurnal or closed_loop, got 'weekly'"),
    ],
)
def test_what_is_missing_or_unknown_is_said(arrivals: str | None, rate: float | None, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        choose(ClosedLoop(num_users=5), arrivals, rate)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Poisson(rate=0.0),
        lambda: Poisson(rate=float("inf")),
        lambda: Poisson(rate=float("nan")),
        lambda: Bursty(rate=1.0, cv=0.0),
        lambda: Bursty(rate=1.0, cv=50.0),
        lambda: Diurnal(rate=1.0, amplitude=1.1),
        lambda: Diurnal(rate=1.0, period=0.0),
        lambda: ClosedLoop(num_users=0),
        lambda: ClosedLoop(num_users=1, think=-1.0),
        lambda: choose(Poisson(rate=1.0), rate=-1.0),
    ],
)
def test_impossible_arrivals_are_refused(make: object) -> None:
    with pytest.raises(ValueError, match="validation error"):
        make()  # type: ignore[operator]


def test_an_open_process_or_a_distribution_of_no_kind_cannot_be_made() -> None:
    with pytest.raises(TypeError, match="abstract method.*microseconds"):
        Open(process="none", rate=1.0)  # type: ignore[abstract]
    with pytest.raises(TypeError, match="abstract method.*_sample.*mean"):
        Drawn(because="a test")  # type: ignore[abstract]
