"""What a simulation keeps: four floats for each request, some sums, and no events.

A trace of a million requests is hundreds of millions of rows. The ledger takes the same events, and folds each request
into its metrics when it finishes. Definitions are those of `reference_impl.observe.metrics`.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from reference_impl.observe.trace import Event, RequestArrived, RequestFinished, StepDone, Trace

Floats = npt.NDArray[np.float64]


@dataclass
class Result:
    """Figures of many requests together; per request in the order in which they finished. Seconds; tpot: NaN for one
    token.

    began, ended: first arrival and last end. busy_seconds: of all steps; request_steps: rows of all steps.
    waiting_seconds, running_seconds: of all requests, counted step by step as the scheduler saw its queue. refused:
    requests too long for the engine ever to serve; no other figure includes them.
    """

    arrival: Floats = field(default_factory=lambda: np.empty(0))
    queue: Floats = field(default_factory=lambda: np.empty(0))
    ttft: Floats = field(default_factory=lambda: np.empty(0))
    tpot: Floats = field(default_factory=lambda: np.empty(0))
    latency: Floats = field(default_factory=lambda: np.empty(0))
    began: float = math.inf
    ended: float = 0.0
    num_steps: int = 0
    request_steps: int = 0
    busy_seconds: float = 0.0
    waiting_seconds: float = 0.0
    running_seconds: float = 0.0
    num_output_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    refused: int = 0

    @property
    def num_requests(self) -> int:
        return len(self.latency)

    @property
    def duration(self) -> float:
        return max(0.0, self.ended - self.began)

    @property
    def throughput(self) -> float:
        """Output tokens per second; 0 where no time passed."""
        return self.num_output_tokens / self.duration if self.duration else 0.0

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that the prefix cache had when their request was first admitted."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def mean_in_system(self) -> float:
        """Requests waiting and running, mean over time, from the scheduler's own count at each step."""
        seconds = self.waiting_seconds + self.running_seconds
        return seconds / self.duration if self.duration else 0.0

    def attainment(self, ttft: float, tpot: float) -> float:
        """Share of requests that met both objectives, defined as in `metrics.WorkloadMetrics.attainment`."""
        if not self.num_requests:
            raise ValueError("expected at least one request, got none: the share of nothing is not defined")
        return float(np.mean(self._meets(ttft, tpot)))

    def goodput(self, ttft: float, tpot: float) -> float:
        """Requests per second that met both objectives; 0 where no time passed."""
        return float(self._meets(ttft, tpot).sum()) / self.duration if self.duration else 0.0

    def _meets(self, ttft: float, tpot: float) -> npt.NDArray[np.bool_]:
        return (self.ttft <= ttft) & (np.isnan(self.tpot) | (self.tpot <= tpot))

    def percentiles(self, percents: Iterable[float] = (50, 90, 99)) -> dict[str, list[float]]:
        """Percentiles of each latency, linear between order statistics. Empty lists where there is nothing."""
        percents, found = list(percents), {}
        for name in ("queue", "ttft", "tpot", "latency"):
            values = getattr(self, name)
            values = values[~np.isnan(values)]
            found[name] = [float(v) for v in np.percentile(values, percents)] if len(values) else []
        return found

    @classmethod
    def fold(cls, results: Iterable[Result]) -> Result:
        """The result of several replicas as one system."""
        parts = list(results) or [cls()]
        arrays: dict[str, Any] = {n: np.concatenate([getattr(p, n) for p in parts]) for n in _PER_REQUEST}
        sums: dict[str, Any] = {n: sum(getattr(p, n) for p in parts) for n in _SUMS}
        return cls(**arrays, **sums, began=min(p.began for p in parts), ended=max(p.ended for p in parts))


_PER_REQUEST = ("arrival", "queue", "ttft", "tpot", "latency")
_SUMS = (
    "num_steps", "request_steps", "busy_seconds", "waiting_seconds", "running_seconds", "num_output_tokens",
    "prompt_tokens", "cached_tokens", "preemptions", "refused",
)  # fmt: skip


class _Open:
    """A request that has not finished."""

    __slots__ = ("arrival", "cached", "first", "prompt", "scheduled")

    def __init__(self, arrival: float, prompt: int):
        self.arrival, self.prompt = arrival, prompt
        self.scheduled = self.first = math.nan
        self.cached = -1


class Ledger(Trace):
    """A trace for `Parts(trace=...)`. It keeps no events, so steps and token times cannot be read from it."""

    def __init__(self) -> None:
        super().__init__()
        self._open: dict[str, _Open] = {}
        self._tokenless: set[str] = set()  # admitted, and without a token yet
        self._per_request = {name: array("d") for name in _PER_REQUEST}
        self._total = Result()
        self.last_step: StepDone | None = None

    def add(self, event: Event) -> None:
        if isinstance(event, StepDone):
            self._step(event)
        elif isinstance(event, RequestFinished):
            self._finish(event)
        else:
            self._arrive(event)

    def leap(self, num_steps: int, num_rows: int, num_waiting: int, started_at: float, finished_at: float) -> None:
        """Books num_steps steps one after another, in which the same rows got a token each and nothing else
        happened."""
        total = self._total
        total.num_steps += num_steps
        total.request_steps += num_steps * num_rows
        total.busy_seconds += finished_at - started_at
        total.waiting_seconds += num_waiting * (finished_at - started_at)
        total.running_seconds += num_rows * (finished_at - started_at)

    def refuse(self) -> None:
        self._total.refused += 1

    def result(self) -> Result:
        """The figures of all requests that have finished."""
        for name, values in self._per_request.items():
            setattr(self._total, name, np.array(values))
        return self._total

    def _arrive(self, event: RequestArrived) -> None:
        self._open[event.request_id] = _Open(event.time, event.num_prompt_tokens)
        self._total.began = min(self._total.began, event.time)

    def _step(self, step: StepDone) -> None:
        total, started, finished = self._total, step.started_at, step.finished_at
        self.last_step = step
        total.num_steps += 1
        total.request_steps += len(step.rows)
        total.preemptions += len(step.preempted)
        total.busy_seconds += finished - started
        for request_id, cached in step.admitted:
            request = self._open[request_id]
            if request.cached < 0:
                request.cached = cached
                request.scheduled = started
                self._tokenless.add(request_id)
        if self._tokenless:
            for row in step.rows:
                if row.samples and row.request_id in self._tokenless:
                    self._tokenless.remove(row.request_id)
                    self._open[row.request_id].first = finished
        # In a step, requests with a row in it run, and those left in the queue wait.
        total.waiting_seconds += step.num_waiting * (finished - started)
        total.running_seconds += len(step.rows) * (finished - started)

    def _finish(self, event: RequestFinished) -> None:
        request, total = self._open.pop(event.request_id), self._total
        self._tokenless.discard(event.request_id)
        n = event.num_output_tokens
        per = self._per_request
        per["arrival"].append(request.arrival)
        per["queue"].append(request.scheduled - request.arrival)
        per["ttft"].append(request.first - request.arrival)
        per["tpot"].append((event.time - request.first) / (n - 1) if n > 1 else math.nan)
        per["latency"].append(event.time - request.arrival)
        total.num_output_tokens += n
        total.prompt_tokens += request.prompt
        total.cached_tokens += max(0, request.cached)
        total.ended = max(total.ended, event.time)
