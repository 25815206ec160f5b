"""What happened, as typed events (`interfaces/events.py`); every metric, widget and test reads this one stream."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from reference_impl.interfaces import Event, RequestArrived, RequestFinished, StepDone
from reference_impl.observe.metrics import RequestMetrics, WorkloadMetrics

__all__ = ["DraftUse", "Event", "PrefixCacheUse", "RequestArrived", "RequestFinished", "StepDone", "Trace"]


@dataclass(frozen=True)
class PrefixCacheUse:
    """What the prefix cache saved. prompt_tokens: of the requests let in. cached_tokens: of these, not computed again.
    evicted_blocks: blocks whose contents were forgotten."""

    prompt_tokens: int
    cached_tokens: int
    evicted_blocks: int

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that were found; 0 without prompts."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


@dataclass(frozen=True)
class DraftUse:
    """What became of verified drafts. num_drafts: rows with drafts; num_draft_tokens: the draft tokens in them.
    accepted_per_position[i]: how many rows kept more than i of them; those of a tree lie on one path, so it has as many
    entries as the tree has levels, and for chains as many as there are drafts. num_steps_off: steps without drafts
    though there could have been some, because they would have lost time (`adaptive_drafts`). num_lossy: of the rows
    with drafts, those whose drafts were kept by a lossy rule (`EngineConfig.acceptance`).

    A request that has ended before its row came back counts as one that kept none.
    """

    num_drafts: int
    num_draft_tokens: int
    accepted_per_position: tuple[int, ...]
    num_steps_off: int = 0
    num_lossy: int = 0

    @classmethod
    def of(cls, steps: Iterable[StepDone]) -> DraftUse:
        steps = list(steps)
        num_steps_off = sum(step.num_undrafted > 0 and not any(row.num_drafts for row in step.rows) for step in steps)
        drafted = [
            (row.num_drafts, min(row.num_drafts, step.num_draft_levels or row.num_drafts), max(0, new - 1))
            for step in steps
            for row, new in zip(step.rows, step.num_new_tokens, strict=True)
            if row.num_drafts
        ]
        longest = max((most for _, most, _ in drafted), default=0)
        kept = tuple(sum(accepted > i for *_, accepted in drafted) for i in range(longest))
        lossy = sum(row.num_drafts > 0 for step in steps if step.acceptance != "exact" for row in step.rows)
        return cls(len(drafted), sum(num for num, *_ in drafted), kept, num_steps_off, lossy)

    @property
    def num_accepted_tokens(self) -> int:
        return sum(self.accepted_per_position)

    @property
    def acceptance(self) -> float:
        """Share of the draft tokens that were kept; 0 without any."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0


def idle_share(steps: Iterable[StepDone]) -> float:
    """The share of all ranks' time, from the first start of these steps to their last end, in which ranks computed
    nothing: they had no step, or waited for others. Of p stages that get m equal steps, all at the start, it is
    (p - 1) / (m + p - 1), the bubble (Huang et al. 2019, GPipe). 0 without ranks."""
    times = [step.ranks for step in steps if step.ranks]
    if not times:
        return 0.0
    every = [time for ranks in times for time in ranks]
    span = max(time.finished_at for time in every) - min(time.started_at for time in every)
    busy = sum(time.finished_at - time.started_at - time.waited for time in every)
    return 1 - busy / (span * len(times[0])) if span else 0.0


@dataclass
class Trace:
    """The events in order, and an index by request so that its metrics cost no search.

    It grows with every step, unless `keep` says how many of the last events are enough (up to twice as many are kept):
    a server runs for months. A request is forgotten with the event of its end. An id that is used again stands for the
    request that arrived last.
    """

    events: list[Event] = field(default_factory=list)
    keep: int | None = None
    _arrivals: dict[str, float] = field(default_factory=dict, init=False, repr=False)
    _scheduled: dict[str, float] = field(default_factory=dict, init=False, repr=False)
    _token_times: dict[str, list[float]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.keep is not None and self.keep < 1:
            raise ValueError(f"keep: expected None or at least 1 event, got {self.keep}")
        given, self.events = self.events, []
        for event in given:
            self.add(event)

    def add(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, StepDone):
            for row in event.rows:
                self._scheduled.setdefault(row.request_id, event.started_at)
                if row.samples and not event.num_sampled:
                    self._token_times.setdefault(row.request_id, []).append(event.finished_at)
            for row, num_new in zip(event.rows, event.num_sampled, strict=False):
                self._token_times.setdefault(row.request_id, []).extend([event.finished_at] * num_new)
        elif isinstance(event, RequestArrived):
            self._arrivals[event.request_id] = event.time
            self._token_times[event.request_id] = []
            self._scheduled.pop(event.request_id, None)
        elif event.request_id in self._token_times:
            del self._token_times[event.request_id][event.num_output_tokens :]
        if self.keep is not None and len(self.events) >= 2 * self.keep:
            self._forget(len(self.events) - self.keep)

    def _forget(self, num_events: int) -> None:
        old, self.events = self.events[:num_events], self.events[num_events:]
        gone: set[str] = set()
        for event in old:
            if isinstance(event, RequestFinished):
                gone.add(event.request_id)
            elif isinstance(event, RequestArrived):
                gone.discard(event.request_id)
        again = {event.request_id for event in self.events if isinstance(event, RequestArrived)}
        for request_id in gone - again:
            for index in (self._arrivals, self._scheduled, self._token_times):
                index.pop(request_id, None)

    def amend(self, request_id: str, reason: str, num_output_tokens: int) -> None:
        """Moves a request's end to an earlier token: it was booked with the last step, before the text showed its
        end."""
        for at in range(len(self.events) - 1, -1, -1):
            event = self.events[at]
            if isinstance(event, StepDone):
                return
            if isinstance(event, RequestFinished) and event.request_id == request_id:
                self.events[at] = replace(event, reason=reason, num_output_tokens=num_output_tokens)
                del self._token_times.get(request_id, [])[num_output_tokens:]

    def request_ids(self) -> list[str]:
        """The ids of requests that arrived and are not forgotten."""
        return list(self._arrivals)

    def steps(self) -> list[StepDone]:
        return [e for e in self.events if isinstance(e, StepDone)]

    def token_times(self, request_id: str) -> list[float]:
        """The times at which the output tokens of the request came out."""
        return list(self._token_times.get(request_id, ()))

    def arrival(self, request_id: str) -> float:
        if request_id not in self._arrivals:
            raise KeyError(f"request {request_id!r} is not in this trace")
        return self._arrivals[request_id]

    def metrics(self, request_id: str) -> RequestMetrics:
        return RequestMetrics.of(
            self.arrival(request_id), self.token_times(request_id), self._scheduled.get(request_id)
        )

    def prefix_cache(self) -> PrefixCacheUse:
        """What prefix hits saved when requests were let in for the first time."""
        first: dict[str, int] = {}
        evicted = 0
        for step in self.steps():
            evicted += len(step.transfers.evicted)
            for request_id, cached in step.admitted:
                first.setdefault(request_id, cached)
        arrived = [e for e in self.events if isinstance(e, RequestArrived) and e.request_id in first]
        prompts = {e.request_id: e.num_prompt_tokens for e in arrived}  # a request that goes on here may find more
        cached_tokens = sum(min(cached, prompts.get(request_id, cached)) for request_id, cached in first.items())
        return PrefixCacheUse(sum(e.num_prompt_tokens for e in arrived), cached_tokens, evicted)

    def workload(self, request_ids: Iterable[str] | None = None) -> WorkloadMetrics:
        """Metrics of all requests of the trace together, or of those named."""
        ids = self._arrivals if request_ids is None else request_ids
        return WorkloadMetrics.of((self.arrival(i), self.metrics(i)) for i in ids)
