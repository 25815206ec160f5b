"""Samples have the law they name, from uniform numbers only. Seeds are fixed."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from reference_impl.simulation.workloads.distributions import (
    Constant,
    Discrete,
    Drawn,
    Exponential,
    Geometric,
    Lognormal,
    bits,
    choices,
    standard_gamma,
    standard_normal,
    zipf_weights,
)

NUM = 50_000
WHY = {"because": "test"}


def test_normal_numbers_are_normal() -> None:
    assert stats.kstest(standard_normal(bits(1), NUM), "norm").pvalue > 0.01


@pytest.mark.parametrize("shape", [0.05, 0.25, 1.0, 7.5])
def test_gamma_numbers_are_gamma(shape: float) -> None:
    assert stats.kstest(standard_gamma(bits(1), shape, NUM), stats.gamma(shape).cdf).pvalue > 0.01


def test_lognormal_and_exponential_have_their_law() -> None:
    lognormal = Lognormal(distribution="lognormal", median=50, sigma=1.2, **WHY)
    assert stats.kstest(lognormal.sample(bits(2), NUM), stats.lognorm(1.2, scale=50).cdf).pvalue > 0.01
    exponential = Exponential(distribution="exponential", mean=3, **WHY)
    assert stats.kstest(exponential.sample(bits(3), NUM), stats.expon(scale=3).cdf).pvalue > 0.01


@pytest.mark.parametrize("mean", [1.0, 1.3, 8.0])
def test_geometric_counts_from_one(mean: float) -> None:
    found = Geometric(distribution="geometric", mean=mean, **WHY).sample(bits(4), NUM)
    if mean == 1.0:
        assert (found == 1).all()
        return
    edges = np.arange(1, 12)
    counts = [(found == k).sum() for k in edges] + [(found > 11).sum()]
    law = stats.geom(1 / mean)
    expected = NUM * np.array([*law.pmf(edges), law.sf(11)])
    kept = expected > 5
    assert stats.chi2(kept.sum() - 1).sf((((counts - expected) ** 2) / expected)[kept].sum()) > 0.01


def test_discrete_values_come_in_proportion_to_their_weights() -> None:
    found = Discrete(distribution="discrete", values=[0, 6, 9], weights=[1, 0, 3], **WHY).sample(bits(5), NUM)
    assert set(found) == {0, 9}
    assert (found == 9).mean() == pytest.approx(0.75, abs=5 * (0.75 * 0.25 / NUM) ** 0.5)


def test_the_rth_most_popular_is_drawn_in_proportion_to_its_rank() -> None:
    weights = zipf_weights(50, 0.9)
    counts = np.bincount(choices(bits(6), weights, NUM), minlength=50)
    expected = NUM * weights / weights.sum()
    assert stats.chi2(49).sf(((counts - expected) ** 2 / expected).sum()) > 0.01
    assert counts[0] / counts[9] == pytest.approx(10**0.9, rel=0.1)


def test_limits_are_values_and_not_drawn_again() -> None:
    found = Lognormal(distribution="lognormal", median=100, sigma=1, min=50, max=200, **WHY).sample(bits(7), NUM)
    assert (found.min(), found.max()) == (50, 200)
    # P(below 50) = P(above 200) = Phi(-ln 2) = 0.244
    assert (found == 50).mean() == pytest.approx(0.2441, abs=0.01)
    assert (found == 200).mean() == pytest.approx(0.2441, abs=0.01)


@pytest.mark.parametrize(
    "distribution",
    [
        Constant(distribution="constant", value=7, **WHY),
        Lognormal(distribution="lognormal", median=50, sigma=0.8, **WHY),
        Exponential(distribution="exponential", mean=3, **WHY),
        Geometric(distribution="geometric", mean=3.5, **WHY),
        Discrete(distribution="discrete", values=[1, 2, 5], weights=[3, 2, 1], **WHY),
    ],
)
def test_the_stated_mean_is_the_mean_of_the_samples(distribution: Drawn) -> None:
    found = distribution.sample(bits(8), NUM)
    assert found.mean() == pytest.approx(distribution.mean(), abs=5 * found.std() / NUM**0.5)


def test_randomness_is_pcg64_and_uniform_numbers_only() -> None:
    assert bits(1, 2).random(2).tolist() == GOLDEN_UNIFORM

    class Uniform:
        """A generator that has nothing but random(): what NumPy does not promise to keep must not be called."""

        def __init__(self) -> None:
            self._rng = bits(9)

        def random(self, size: object = None) -> object:
            return self._rng.random(size)  # type: ignore[call-overload]

    for drawn in (
        Lognormal(distribution="lognormal", median=50, sigma=0.8, **WHY),
        Exponential(distribution="exponential", mean=3, **WHY),
        Geometric(distribution="geometric", mean=3.5, **WHY),
        Discrete(distribution="discrete", values=[1, 2, 5], weights=[3, 2, 1], **WHY),
    ):
        assert len(drawn.sample(Uniform(), 10)) == 10  # type: ignore[arg-type]
    assert len(standard_gamma(Uniform(), 0.3, 10)) == 10  # type: ignore[arg-type]


GOLDEN_UNIFORM = [0.44841514333227195, 0.4308819875443376]
