"""Distributions that a workload file may name, drawn from uniform numbers only.

NumPy promises that a bit generator (here PCG64) gives the same numbers in every version and on every machine, but not
that its normal() or gamma() do (NEP 19). So only `Generator.random` is used, and the formulas stand here. Tokens are
rounded to integers, seconds to microseconds: a logarithm that differs in its last bit between two processors changes a
value only if it lies on a rounding boundary, about one draw in 10^9.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, model_validator

Floats = npt.NDArray[np.float64]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


def bits(*entropy: int) -> np.random.Generator:
    """The one source of randomness: PCG64, seeded with these integers."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(entropy)))


def standard_normal(rng: np.random.Generator, num: int) -> Floats:
    """Box and Muller (1958): two uniforms make one normal number."""
    u = rng.random((num, 2))
    found: Floats = np.sqrt(-2 * np.log1p(-u[:, 0])) * np.cos(2 * np.pi * u[:, 1])
    return found


def standard_gamma(rng: np.random.Generator, shape: float, num: int) -> Floats:
    """Marsaglia and Tsang (2000): a cubed normal number, accepted or drawn again; mean and variance are `shape`.

    Below 1: gamma(shape) = gamma(shape + 1) * U^(1 / shape).
    """
    d = (shape if shape >= 1 else shape + 1) - 1 / 3
    c = 1 / math.sqrt(9 * d)
    found = np.empty(0)
    while len(found) < num:
        x, u = standard_normal(rng, num), rng.random(num)
        v = (1 + c * x) ** 3
        positive = np.where(v > 0, v, 1.0)
        accepted = (v > 0) & (np.log1p(-u) < x * x / 2 + d * (1 - v + np.log(positive)))
        found = np.concatenate([found, d * v[accepted]])
    found = found[:num]
    return found if shape >= 1 else found * (1 - rng.random(num)) ** (1 / shape)


class Documented(BaseModel):
    """A number of a workload gives its origin: a published figure (source) or our choice (because)."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    source: str = ""
    because: str = ""

    @model_validator(mode="after")
    def _says_why(self) -> Documented:
        if not (self.source.strip() or self.because.strip()):
            raise ValueError("expected a source, or because: why this was chosen")
        return self


class Drawn(Documented):
    """A distribution. min, max: values beyond them are set to them, not drawn again."""

    min: NotNegative = 0.0
    max: Positive | None = None

    @model_validator(mode="after")
    def _ordered(self) -> Drawn:
        if self.max is not None and self.max < self.min:
            raise ValueError(f"expected min <= max, got {self.min:g} > {self.max:g}")
        return self

    def sample(self, rng: np.random.Generator, num: int) -> Floats:
        drawn = self._sample(rng, num)
        return np.clip(drawn, self.min, math.inf if self.max is None else self.max)

    @abstractmethod
    def _sample(self, rng: np.random.Generator, num: int) -> Floats:
        """`num` values before min and max apply."""

    @abstractmethod
    def mean(self) -> float:
        """The mean before min, max and rounding apply."""


class Constant(Drawn):
    distribution: Literal["constant"]
    value: NotNegative

    def _sample(self, rng: np.random.Generator, num: int) -> Floats:
        return np.full(num, self.value)

    def mean(self) -> float:
        return self.value


class Lognormal(Drawn):
    """exp(log(median) + sigma * normal); mean = median * exp(sigma^2 / 2)."""

    distribution: Literal["lognormal"]
    median: Positive
    sigma: NotNegative

    def _sample(self, rng: np.random.Generator, num: int) -> Floats:
        return np.exp(math.log(self.median) + self.sigma * standard_normal(rng, num))

    def mean(self) -> float:
        return self.median * math.exp(self.sigma**2 / 2)


class Exponential(Drawn):
    distribution: Literal["exponential"]
    mean_value: Positive = Field(alias="mean")

    def _sample(self, rng: np.random.Generator, num: int) -> Floats:
        return -self.mean_value * np.log1p(-rng.random(num))

    def mean(self) -> float:
        return self.mean_value


class Geometric(Drawn):
    """The numbers 1, 2, 3, ...: after each there is another with probability 1 - 1 / mean."""

    distribution: Literal["geometric"]
    mean_value: Annotated[float, Field(ge=1, allow_inf_nan=False)] = Field(alias="mean")

    def _sample(self, rng: np.random.Generator, num: int) -> Floats:
        u = rng.random(num)
        if self.mean_value == 1:
            return np.ones(num)
        return 1 + np.floor(np.log1p(-u) / math.log1p(-1 / self.mean_value))

    def mean(self) -> float:
        return self.mean_value


class Discrete(Drawn):
    """`values` with probabilities in proportion to `weights`."""

    distribution: Literal["discrete"]
    values: list[NotNegative] = Field(min_length=1)
    weights: list[NotNegative] = Field(min_length=1)

    @model_validator(mode="after")
    def _pairs(self) -> Discrete:
        if len(self.values) != len(self.weights):
            raise ValueError(f"expected a weight for each value, got {len(self.values)} and {len(self.weights)}")
        if sum(self.weights) <= 0:
            raise ValueError("expected a weight above 0")
        return self

    def _sample(self, rng: np.random.Generator, num: int) -> Floats:
        return np.array(self.values)[choices(rng, np.array(self.weights), num)]

    def mean(self) -> float:
        return float(np.average(self.values, weights=self.weights))


Distribution = Annotated[
    Constant | Lognormal | Exponential | Geometric | Discrete, Field(discriminator="distribution")
]  # fmt: skip


def zipf_weights(num: int, exponent: float) -> Floats:
    """Share of the r-th most popular of `num`: r^-exponent, not yet divided by the sum."""
    weights: Floats = np.arange(1, num + 1, dtype=np.float64) ** -exponent
    return weights


def choices(rng: np.random.Generator, weights: Floats, num: int) -> npt.NDArray[np.int64]:
    """Indices in proportion to the weights."""
    edges = np.cumsum(weights)
    found = np.searchsorted(edges, rng.random(num) * edges[-1], side="right")
    return np.minimum(found, len(weights) - 1)  # the product may round up to the last edge
