"""What happened, as typed events; every metric, widget and test reads this one stream.

Times are seconds on the engine's clock. A step is recorded once; per-token times are derived from it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from reference_impl.interfaces import Row


@dataclass(frozen=True)
class RequestArrived:
    time: float
    request_id: str
    num_prompt_tokens: int


@dataclass(frozen=True)
class RequestFinished:
    time: float
    request_id: str
    reason: str  # stop | length | abort
    num_output_tokens: int


@dataclass(frozen=True)
class StepDone:
    """One forward pass: who computed what, who got a token, and what was left."""

    step_id: int
    started_at: float
    finished_at: float
    rows: tuple[Row, ...]
    preempted: tuple[str, ...]
    num_waiting: int
    num_running: int
    num_free_blocks: int


Event = RequestArrived | RequestFinished | StepDone


@dataclass
class Trace:
    events: list[Event] = field(default_factory=list)

    def add(self, event: Event) -> None:
        self.events.append(event)

    def steps(self) -> list[StepDone]:
        return [e for e in self.events if isinstance(e, StepDone)]

    def token_times(self, request_id: str) -> list[float]:
        """When each output token of the request came out."""
        return [s.finished_at for s in self.steps() for r in s.rows if r.request_id == request_id and r.samples]

    def arrival(self, request_id: str) -> float:
        for event in self.events:
            if isinstance(event, RequestArrived) and event.request_id == request_id:
                return event.time
        raise KeyError(f"request {request_id!r} is not in this trace")

    def metrics(self, request_id: str) -> RequestMetrics:
        return RequestMetrics.of(self.arrival(request_id), self.token_times(request_id))


@dataclass(frozen=True)
class RequestMetrics:
    """Latency of one request, in seconds. Waiting in the queue counts: times start at arrival.

    ttft: arrival to first token. itl: the N - 1 gaps between N tokens.
    tpot: mean of those gaps; None with fewer than two tokens, since there is no gap to average.
    """

    num_output_tokens: int
    ttft: float | None
    itl: tuple[float, ...]
    tpot: float | None
    latency: float | None

    @classmethod
    def of(cls, arrival: float, token_times: list[float]) -> RequestMetrics:
        if not token_times:
            return cls(0, None, (), None, None)
        gaps = tuple(b - a for a, b in pairwise(token_times))
        tpot = sum(gaps) / len(gaps) if gaps else None
        return cls(
            len(token_times),
            token_times[0] - arrival,
            gaps,
            tpot,
            token_times[-1] - arrival,
        )

    @property
    def tokens_per_second(self) -> float | None:
        """Output tokens over the whole time from arrival to the last one."""
        return self.num_output_tokens / self.latency if self.latency else None
