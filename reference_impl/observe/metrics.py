"""Latency and throughput, defined once: TTFT, TPOT, ITL, end-to-end latency, throughput, goodput. Times in seconds.

The definitions are those of vLLM's serving benchmark (`vllm/benchmarks/serve.py`):
    TTFT     first token - arrival                 the wait in the queue belongs to it (erratum E01.8)
    ITL      the N - 1 gaps between N tokens        pooled over all tokens of a load
    TPOT     (latency - TTFT) / (N - 1)             one number per request; its mean weighs requests, not tokens
    latency  last token - arrival = TTFT + sum(ITL) = TTFT + (N - 1) * TPOT   (erratum E01.9)
The field uses TPOT and ITL for one another, so state the formula with the number.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np


@dataclass(frozen=True)
class RequestMetrics:
    """Latency of one request, in seconds from its arrival. None where there is nothing to measure.

    queue: arrival to the start of the first step that computes it. prefill: from there to the first token.
    ttft = queue + prefill. itl: the N - 1 gaps between N tokens. tpot: their mean; None with fewer than two tokens.
    """

    num_output_tokens: int
    ttft: float | None
    itl: tuple[float, ...]
    tpot: float | None
    latency: float | None
    queue: float | None = None
    prefill: float | None = None

    @classmethod
    def of(cls, arrival: float, token_times: Sequence[float], scheduled: float | None = None) -> RequestMetrics:
        """The metrics, from the times at which the request arrived, was first computed, and got each of its tokens."""
        queue = None if scheduled is None else scheduled - arrival
        if not token_times:
            return cls(0, None, (), None, None, queue)
        gaps = tuple(b - a for a, b in pairwise(token_times))
        return cls(
            num_output_tokens=len(token_times),
            ttft=token_times[0] - arrival,
            itl=gaps,
            tpot=(token_times[-1] - token_times[0]) / len(gaps) if gaps else None,
            latency=token_times[-1] - arrival,
            queue=queue,
            prefill=None if scheduled is None else token_times[0] - scheduled,
        )

    @property
    def tokens_per_second(self) -> float | None:
        """Output tokens over the whole time from arrival to the last one."""
        return self.num_output_tokens / self.latency if self.latency else None

    def meets(self, ttft: float, tpot: float) -> bool:
        """Whether both objectives hold. A request without a token meets none; a lone token has no TPOT to miss."""
        return self.ttft is not None and self.ttft <= ttft and (self.tpot is None or self.tpot <= tpot)


@dataclass(frozen=True)
class WorkloadMetrics:
    """Metrics of many requests together. duration: first arrival to last token, in seconds; 0 where no token came.

    Percentiles interpolate linearly between order statistics, as `numpy.percentile` does.
    """

    requests: tuple[RequestMetrics, ...]
    duration: float

    @classmethod
    def of(cls, arrivals_and_metrics: Iterable[tuple[float, RequestMetrics]]) -> WorkloadMetrics:
        """The metrics, from pairs (arrival, metrics) on one clock."""
        pairs = list(arrivals_and_metrics)
        ends = [arrival + m.latency for arrival, m in pairs if m.latency is not None]
        duration = max(ends) - min(arrival for arrival, _ in pairs) if ends else 0.0
        return cls(tuple(m for _, m in pairs), duration)

    @property
    def num_output_tokens(self) -> int:
        return sum(m.num_output_tokens for m in self.requests)

    @property
    def throughput(self) -> float:
        """Output tokens per second of all requests together; 0 where no time passed."""
        return self.num_output_tokens / self.duration if self.duration else 0.0

    @property
    def ttft(self) -> tuple[float, ...]:
        """Times to first token: one value per request that got a token."""
        return tuple(m.ttft for m in self.requests if m.ttft is not None)

    @property
    def tpot(self) -> tuple[float, ...]:
        """One value per request of at least two tokens, in seconds: a mean of these weighs every request alike."""
        return tuple(m.tpot for m in self.requests if m.tpot is not None)

    @property
    def itl(self) -> tuple[float, ...]:
        """All gaps of all requests: a mean of these weighs every token alike."""
        return tuple(gap for m in self.requests for gap in m.itl)

    @property
    def latency(self) -> tuple[float, ...]:
        """Times from arrival to last token: one value per request that got a token."""
        return tuple(m.latency for m in self.requests if m.latency is not None)

    def attainment(self, ttft: float, tpot: float) -> float:
        """Share of requests that met both objectives (seconds). Raises ValueError where there is no request."""
        if not self.requests:
            raise ValueError("expected at least one request, got none: the share of nothing is not defined")
        return sum(m.meets(ttft, tpot) for m in self.requests) / len(self.requests)

    def goodput(self, ttft: float, tpot: float) -> float:
        """Requests per second that met both objectives (Zhong et al. 2024, DistServe); 0 where no time passed."""
        return sum(m.meets(ttft, tpot) for m in self.requests) / self.duration if self.duration else 0.0


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which `percent` of the values lie. Raises ValueError where there are none."""
    if not values:
        raise ValueError("expected at least one value, got none: a percentile of nothing is not defined")
    return float(np.percentile(values, percent))
