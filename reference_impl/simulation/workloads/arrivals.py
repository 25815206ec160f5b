"""When requests come. Open processes have a rate, whatever the server does; a closed loop waits for its answers.

Open times are whole microseconds from the start of the stream, generated BLOCK at a time and never kept.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field

from reference_impl.simulation.workloads.distributions import Floats, NotNegative, Positive, standard_gamma

BLOCK = 4096
DAY = 86_400.0
DEFAULT_CV = 2.0  # the median of ServeGen's "m-mid" clients by requests: 2.04 (datasets/traces/README.md)
DEFAULT_AMPLITUDE = 0.6  # our choice: the busiest hour has about 4 times the requests of the quietest
DEFAULT_USERS = 16  # our choice: what a laptop can answer


class Process(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    process: str
    source: str = ""
    because: str = ""


class Open(Process):
    """Arrivals that do not wait for answers. rate: mean requests per second."""

    rate: Positive

    @abstractmethod
    def microseconds(self, rng: np.random.Generator) -> Iterator[int]:
        """Times of arrival without end, never decreasing."""


class Poisson(Open):
    """Independent users: exponential gaps, coefficient of variation 1."""

    process: Literal["poisson"] = "poisson"

    def microseconds(self, rng: np.random.Generator) -> Iterator[int]:
        return _times(self._gaps, rng)

    def _gaps(self, rng: np.random.Generator) -> Floats:
        found: Floats = -np.log1p(-rng.random(BLOCK)) / self.rate
        return found


class Bursty(Open):
    """Arrivals with gamma gaps. cv: their standard deviation over their mean; the shape is 1 / cv^2.

    At 1 the process is Poisson; above it requests come in clusters with pauses between. vLLM's `burstiness` is this
    shape: 0.25 is cv 2. Gaps are independent: nothing is remembered from cluster to cluster.
    """

    process: Literal["bursty"] = "bursty"
    cv: Annotated[float, Field(ge=0.1, le=20)] = DEFAULT_CV

    def microseconds(self, rng: np.random.Generator) -> Iterator[int]:
        return _times(self._gaps, rng)

    def _gaps(self, rng: np.random.Generator) -> Floats:
        shape = self.cv**-2
        return standard_gamma(rng, shape, BLOCK) / (shape * self.rate)


class Diurnal(Open):
    """Poisson with rate(t) = rate * (1 + amplitude * sin(2 pi (t / period + phase))), drawn by thinning.

    Lewis and Shedler (1979): candidates come at the highest rate, and one at t is kept with probability
    rate(t) / highest. rate: the mean over a period of `period` seconds. phase: part of a period; at 0 the stream
    starts at the mean and rises, at 0.75 at the lowest.
    """

    process: Literal["diurnal"] = "diurnal"
    amplitude: Annotated[float, Field(ge=0, le=1)] = DEFAULT_AMPLITUDE
    period: Positive = DAY
    phase: NotNegative = 0.0

    def rate_at(self, seconds: Floats) -> Floats:
        found: Floats = self.rate * (1 + self.amplitude * np.sin(2 * np.pi * (seconds / self.period + self.phase)))
        return found

    def microseconds(self, rng: np.random.Generator) -> Iterator[int]:
        highest = self.rate * (1 + self.amplitude)
        for block in _blocks(Poisson(rate=highest).microseconds(rng)):
            stays = rng.random(len(block)) * highest < self.rate_at(block / 1e6)
            yield from block[stays].tolist()


class ClosedLoop(Process):
    """num_users users: each sends one request, waits for the answer, thinks, and sends the next.

    think: mean seconds of an exponential pause; 0: none; None: the workload's own think times.
    """

    process: Literal["closed_loop"] = "closed_loop"
    num_users: Annotated[int, Field(ge=1)] = DEFAULT_USERS
    think: NotNegative | None = None


Arrivals = Annotated[Poisson | Bursty | Diurnal | ClosedLoop, Field(discriminator="process")]


def choose(
    own: Open | ClosedLoop, arrivals: str | Open | ClosedLoop | None = None, rate: float | None = None
) -> Open | ClosedLoop:
    """A workload's own arrivals, or others by name or of these classes. ValueError says what is missing.

    rate: of an open process, in place of its own. By name, an open process takes over the workload's own rate.
    """
    chosen = own if arrivals is None else arrivals
    if isinstance(chosen, str):
        kinds: dict[str, type[Open]] = {"poisson": Poisson, "bursty": Bursty, "diurnal": Diurnal}
        if chosen == own.process:
            chosen = own
        elif chosen == "closed_loop":
            chosen = ClosedLoop()
        elif chosen in kinds:
            rate = rate if rate is not None or isinstance(own, ClosedLoop) else own.rate
            if rate is None:
                raise ValueError(f"arrivals {chosen!r} need a rate: this workload's own are a closed loop")
            return kinds[chosen].model_validate({"rate": float(rate)})
        else:
            raise ValueError(f"arrivals: expected {', '.join(kinds)} or closed_loop, got {chosen!r}")
    if rate is None:
        return chosen
    if isinstance(chosen, ClosedLoop):
        raise ValueError("a closed loop has no rate: it is as fast as the answers; name an open process (poisson)")
    return type(chosen).model_validate(chosen.model_dump() | {"rate": float(rate)})


def _times(gaps: Callable[[np.random.Generator], Floats], rng: np.random.Generator) -> Iterator[int]:
    """Times of arrival in microseconds. gaps: seconds between the next BLOCK arrivals, independent of those before."""
    now = 0
    while True:
        times = now + np.cumsum(np.floor(gaps(rng) * 1e6 + 0.5).astype(np.int64))
        now = int(times[-1])
        yield from times.tolist()


def _blocks(times: Iterator[int]) -> Iterator[npt.NDArray[np.int64]]:
    while True:
        yield np.fromiter(times, dtype=np.int64, count=BLOCK)
