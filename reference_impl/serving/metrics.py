"""Prometheus metrics, named as vLLM names its own (`inferlab:` in place of `vllm:`), from the engine's trace."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from reference_impl.assembly.engine import Engine
from reference_impl.observe.metrics import RequestMetrics
from reference_impl.observe.trace import DraftUse, Event, RequestArrived, RequestFinished, StepDone, Trace

if TYPE_CHECKING:
    from reference_impl.features.parallel.group import RankReport

_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_GAPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0)
_LATENCY = (0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0)


LAST = 500  # finished requests whose percentiles can be queried


@dataclass(frozen=True)
class Finished:
    """A request that has ended, finished or aborted. arrival and end: seconds on the engine's clock."""

    id: str
    reason: str
    num_prompt_tokens: int
    arrival: float
    end: float
    metrics: RequestMetrics


class WatchedTrace(Trace):
    """A trace that keeps the last events and counts all of them."""

    def __init__(self, keep: int):
        super().__init__(keep=keep)
        self.counts = Counts(self)

    def add(self, event: Event) -> None:
        super().add(event)
        self.counts.count(event)


class Counts:
    """Counters, histograms and the last requests."""

    def __init__(self, trace: Trace):
        self.registry = CollectorRegistry()
        self._trace = trace
        self.last: tuple[Finished, ...] = ()  # the latest at the end

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"inferlab:{name}", text, labels, registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"inferlab:{name}", text, buckets=buckets, registry=self.registry)

        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of the requests that arrived")
        self.generation_tokens = counter("generation_tokens", "Tokens generated")
        self.queries = counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache")
        self.hits = counter("prefix_cache_hits", "Prompt tokens found in the prefix cache")
        self.evictions = counter("prefix_cache_evictions", "Blocks evicted from the prefix cache")
        self.preemptions = counter("num_preemptions", "Preemptions: a request loses its blocks")
        self.steps = counter("engine_steps", "Forward passes")
        self.drafts = counter("spec_decode_num_drafts", "Rows that verified drafts")
        self.draft_tokens = counter("spec_decode_num_draft_tokens", "Draft tokens verified")
        self.lossy = counter("spec_decode_num_lossy_drafts", "Rows whose drafts were kept by a rule that is lossy")
        self.accepted = counter("spec_decode_num_accepted_tokens", "Draft tokens kept")
        self.accepted_at = counter(
            "spec_decode_num_accepted_tokens_per_pos", "Draft tokens kept, by their place among a row's", "position"
        )
        self.finished = counter("request_success", "Requests that ended, by reason", "finished_reason")
        self.ttft = histogram("time_to_first_token_seconds", "Arrival to first token", _TTFT)
        self.itl = histogram("inter_token_latency_seconds", "Gaps between the tokens of a request", _GAPS)
        self.latency = histogram("e2e_request_latency_seconds", "Arrival to last token", _LATENCY)
        self.queue = histogram("request_queue_time_seconds", "Arrival to the first step that computes it", _TTFT)
        self._prompts: dict[str, int] = {}  # lengths, of the unfinished
        self._waiting: set[str] = set()  # unfinished requests that were never admitted

    def count(self, event: Event) -> None:
        if isinstance(event, StepDone):
            self.steps.inc()
            self.generation_tokens.inc(sum(event.num_new_tokens))
            if event.num_sampled:
                self._count_drafts(event)
            if event.preempted:
                self.preemptions.inc(len(event.preempted))
            if event.transfers.evicted:
                self.evictions.inc(len(event.transfers.evicted))
            for request_id, cached in event.admitted:
                if request_id in self._waiting:  # admitted for the first time
                    self._waiting.remove(request_id)
                    self.queries.inc(self._prompts[request_id])
                    self.hits.inc(min(cached, self._prompts[request_id]))  # of one that goes on here more may be
        elif isinstance(event, RequestArrived):
            self.prompt_tokens.inc(event.num_prompt_tokens)
            self._prompts[event.request_id] = event.num_prompt_tokens
            self._waiting.add(event.request_id)
        elif isinstance(event, RequestFinished):
            self._waiting.discard(event.request_id)
            self._finish(event)

    def _count_drafts(self, step: StepDone) -> None:
        use = DraftUse.of([step])
        self.drafts.inc(use.num_drafts)
        self.draft_tokens.inc(use.num_draft_tokens)
        self.lossy.inc(use.num_lossy)
        self.accepted.inc(use.num_accepted_tokens)
        for position, kept in enumerate(use.accepted_per_position):
            self.accepted_at.labels(str(position)).inc(kept)

    def _finish(self, event: RequestFinished) -> None:
        self.finished.labels(event.reason).inc()
        metrics = self._trace.metrics(event.request_id)
        for histogram, value in (
            (self.ttft, metrics.ttft),
            (self.latency, metrics.latency),
            (self.queue, metrics.queue),
        ):
            if value is not None:
                histogram.observe(value)
        for gap in metrics.itl:
            self.itl.observe(gap)
        request_id = event.request_id
        ended = Finished(request_id, event.reason, self._prompts.pop(request_id), self._trace.arrival(request_id),
                         event.time, metrics)  # fmt: skip
        self.last = (*self.last[1 - LAST :], ended)

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens looked up that were found; 0 before the first."""
        queries, hits = (self.registry.get_sample_value(f"inferlab:prefix_cache_{name}_total") or 0.0
                         for name in ("queries", "hits"))  # fmt: skip
        return hits / queries if queries else 0.0

    def text(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self.registry)


def rank_reports(engine: Engine) -> list[RankReport]:
    """What each rank of a divided model did; empty for one that is whole."""
    if not engine.config.is_divided:
        return []
    from reference_impl.features.parallel.group import RankProcesses

    return engine.executor.reports() if isinstance(engine.executor, RankProcesses) else []


class EngineGauges(Collector):
    """The engine's state at the moment of the scrape."""

    def __init__(self, engine: Engine):
        self.engine = engine

    def collect(self) -> Iterator[GaugeMetricFamily]:
        engine = self.engine
        used = 1 - engine.kv.num_available / engine.num_blocks
        for name, text, value in (
            ("num_requests_running", "Requests that hold blocks", engine.scheduler.num_running),
            ("num_requests_waiting", "Requests that wait for blocks or a seat", engine.scheduler.num_waiting),
            ("kv_cache_usage_perc", "Share of the KV blocks in use; cached ones not in use are free", used),
        ):
            yield GaugeMetricFamily(f"inferlab:{name}", text, value)
        if reports := rank_reports(engine):
            shown = GaugeMetricFamily("inferlab:rank_collective_bytes", "Bytes shown to other ranks", labels=["rank"])
            waited = GaugeMetricFamily("inferlab:rank_waiting_seconds", "Waiting for other ranks", labels=["rank"])
            for report in reports:
                shown.add_metric([str(report.rank)], report.num_bytes)
                waited.add_metric([str(report.rank)], report.waited)
            yield from (shown, waited)
            if engine.config.enable_expert_parallel:
                text = "Pairs of token and expert that the rank's experts computed"
                rows = GaugeMetricFamily("inferlab:rank_expert_rows", text, labels=["rank"])
                for report in reports:
                    rows.add_metric([str(report.rank)], report.expert_rows)
                yield rows
