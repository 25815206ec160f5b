"""The figures of a load, made from outcomes. Latency and goodput are defined in `reference_impl.observe.metrics`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from reference_impl.bench.load.client import Outcome
from reference_impl.bench.load.intervals import Estimate, percentile_interval, share_interval
from reference_impl.observe.metrics import WorkloadMetrics, percentile

PERCENTS = (50, 90, 99)
METHOD = (
    "95 % intervals: percentiles between order statistics (Hahn and Meeker 1991, 5.2), attainment by score (Wilson "
    "1927); both take requests as independent, which near saturation they are not. ITL pools the gaps of all requests, "
    "and gaps of one request depend on one another: no interval."
)


@dataclass(frozen=True)
class Row:
    """Percentiles of one quantity, in seconds. Without intervals where values of one request are pooled."""

    name: str
    mean: float
    percentiles: dict[int, Estimate]
    num_values: int


@dataclass(frozen=True)
class Objectives:
    """The objectives, in seconds, both inclusive."""

    ttft: float
    tpot: float


@dataclass(frozen=True)
class Report:
    """What a load gave. Rates are per second of `seconds`: from the first planned request to the end of the last."""

    num_requests: int
    num_succeeded: int
    errors: dict[str, int]  # by kind
    examples: dict[str, str]  # of each kind, what the first one said
    seconds: float
    planned_rate: float  # requests per second that were to be sent, from the first to the last
    request_rate: float  # that succeeded
    output_rate: float  # tokens of requests that succeeded
    prompt_rate: float
    num_output_tokens: int
    num_prompt_tokens: int
    asked_output_tokens: int  # of requests that succeeded
    asked_prompt_tokens: int
    lost_output_tokens: int  # of requests that failed on the way
    tokens_counted_by_server: int  # requests; of the others the chunks were counted
    ended_without_done: int  # requests that succeeded
    tokens_per_chunk: float | None
    rows: tuple[Row, ...]
    objectives: Objectives
    goodput: float
    attainment: Estimate
    goodput_from_sent: float
    attainment_from_sent: Estimate
    method: str = METHOD
    setup: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        content = asdict(self)
        content["rows"] = {row.pop("name"): row for row in content["rows"]}
        return content


def report(outcomes: Sequence[Outcome], objectives: Objectives, setup: dict[str, Any] | None = None) -> Report:
    """A load's report. Failed requests count: in the number of requests, and as requests that missed the objectives.

    Raises ValueError where there is no outcome.
    """
    if not outcomes:
        raise ValueError("expected at least one request, got none: there is nothing to report")
    good = [o for o in outcomes if o.error is None]
    first, last = min(o.planned for o in outcomes), max(o.planned for o in outcomes)
    seconds = max(o.ended for o in outcomes) - first
    planned = WorkloadMetrics(tuple(o.metrics(o.planned) for o in outcomes), seconds)
    sent = WorkloadMetrics(tuple(o.metrics(o.sent) for o in outcomes), seconds)
    rows = [
        _row("TTFT from planned", planned.ttft),
        _row("TTFT from sent", sent.ttft),
        _row("TPOT", planned.tpot),
        _row("ITL", planned.itl, independent=False),
        _row("latency from planned", planned.latency),
        _row("latency from sent", sent.latency),
        _row("delay of the client", [o.sent - o.planned for o in outcomes]),
    ]
    prompt_tokens = sum(o.asked_prompt_tokens if o.num_prompt_tokens is None else o.num_prompt_tokens for o in good)
    chunks = sum(len(o.token_times) for o in good)
    examples: dict[str, str] = {}
    for o in outcomes:
        if o.error is not None:
            examples.setdefault(o.error, o.detail)
    rate = 1 / seconds if seconds else 0.0
    return Report(
        num_requests=len(outcomes),
        num_succeeded=len(good),
        errors=dict(Counter(o.error for o in outcomes if o.error is not None).most_common()),
        examples=examples,
        seconds=seconds,
        planned_rate=(len(outcomes) - 1) / (last - first) if last > first else 0.0,
        request_rate=len(good) * rate,
        output_rate=planned.throughput,
        prompt_rate=prompt_tokens * rate,
        num_output_tokens=planned.num_output_tokens,
        num_prompt_tokens=prompt_tokens,
        asked_output_tokens=sum(o.asked_output_tokens for o in good),
        asked_prompt_tokens=sum(o.asked_prompt_tokens for o in good),
        lost_output_tokens=sum(o.num_output_tokens for o in outcomes if o.error is not None),
        tokens_counted_by_server=sum(o.has_usage for o in good),
        ended_without_done=sum(not o.has_done for o in good),
        tokens_per_chunk=planned.num_output_tokens / chunks if chunks else None,
        rows=tuple(row for row in rows if row is not None),
        objectives=objectives,
        goodput=planned.goodput(objectives.ttft, objectives.tpot),
        attainment=_share(planned, objectives),
        goodput_from_sent=sent.goodput(objectives.ttft, objectives.tpot),
        attainment_from_sent=_share(sent, objectives),
        setup=setup or {},
    )


def _share(load: WorkloadMetrics, objectives: Objectives) -> Estimate:
    met = sum(m.meets(objectives.ttft, objectives.tpot) for m in load.requests)
    return share_interval(met, len(load.requests))


def _row(name: str, values: Sequence[float], independent: bool = True) -> Row | None:
    if not values:
        return None
    estimates = {
        p: percentile_interval(values, p) if independent else Estimate(percentile(values, p), None, None)
        for p in PERCENTS
    }
    return Row(name, sum(values) / len(values), estimates, len(values))
