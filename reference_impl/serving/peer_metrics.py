"""What engines move between each other, for Prometheus and the status page.

An engine knows its peers by names, which are new with each of their lives; the router knows whose they are, and puts
number and role in the place of the name (`with_numbers` in together.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from reference_impl.assembly.engine import Engine
from reference_impl.features.disaggregation.endpoint import Endpoint
from reference_impl.features.disaggregation.store import PeerStore
from reference_impl.features.disaggregation.tally import Moved, peer_of
from reference_impl.features.transfer.stored import FetchingKVManager
from reference_impl.observe.timeline import Slice


def endpoint_in(engine: Engine) -> Endpoint | None:
    """That of an engine whose pages come from peers; None for any other."""
    store = engine.kv.store if isinstance(engine.kv, FetchingKVManager) else None
    return store.endpoint if isinstance(store, PeerStore) else None


def pools(endpoint: Endpoint) -> list[dict[str, Any]]:
    """The memory into which each peer may write, in slots of a page, and how many transfers wait for free ones."""
    found: dict[str, Counter[str]] = {}
    for met, (slots, free, waiting) in endpoint.receiver.pools().items():
        found.setdefault(peer_of(met), Counter()).update(slots=slots, free=free, waiting=waiting)
    return [{"peer": peer, **{n: each[n] for n in ("slots", "free", "waiting")}} for peer, each in found.items()]


def transfers(endpoint: Endpoint) -> list[Slice]:
    """The transfers that ended last, on the engine's clock; in each the time from its first page on, if it has any."""
    return [part for moved in endpoint.tally.last() for part in _slices(moved, endpoint.format.page_bytes)]


def _slices(moved: Moved, page_bytes: int) -> Iterator[Slice]:
    args = {"transfer": moved.transfer, "direction": moved.direction, "peer": moved.peer, "error": moved.error}
    yield Slice(f"{moved.direction} {moved.transfer}", moved.started_at, moved.ended_at, args)
    if moved.first_page_at is not None:
        moves = {"pages": moved.num_pages, "bytes": moved.num_pages * page_bytes}
        yield Slice("pages", moved.first_page_at, moved.ended_at, moves)


class PeerMetrics(Collector):
    """What an endpoint has moved, and its pools at the moment of the scrape."""

    def __init__(self, endpoint: Endpoint):
        self._endpoint = endpoint

    def collect(self) -> Iterator[Metric]:
        way, page_bytes = ["direction", "peer"], self._endpoint.format.page_bytes
        pages = CounterMetricFamily("inferlab:transfer_pages", "Pages that came whole to where they went", labels=way)
        num_bytes = CounterMetricFamily("inferlab:transfer_bytes", "Bytes of these pages", labels=way)
        damaged = CounterMetricFamily("inferlab:transfer_pages_damaged", "Pages received damaged", labels=["peer"])
        ended = CounterMetricFamily("inferlab:transfers", "Transfers that ended, by outcome", labels=[*way, "outcome"])
        going = GaugeMetricFamily("inferlab:transfers_open", "Transfers that go on", labels=way)
        for peer, each in self._endpoint.tally.by_peer().items():
            for direction in each.num_open:
                pages.add_metric([direction, peer], each.pages[direction])
                num_bytes.add_metric([direction, peer], each.pages[direction] * page_bytes)
                going.add_metric([direction, peer], each.num_open[direction])
            damaged.add_metric([peer], each.num_damaged)
            for (direction, outcome), count in each.ended.items():
                ended.add_metric([direction, peer, outcome], count)
        yield from (pages, num_bytes, damaged, ended, going)
        yield from self._pools()

    def _pools(self) -> Iterator[Metric]:
        slots = GaugeMetricFamily("inferlab:transfer_slots", "Slots for a peer's pages", labels=["peer", "state"])
        text = "Transfers of a peer that wait for slots"
        waiting = GaugeMetricFamily("inferlab:transfers_waiting_for_slots", text, labels=["peer"])
        for pool in pools(self._endpoint):
            slots.add_metric([pool["peer"], "free"], pool["free"])
            slots.add_metric([pool["peer"], "used"], pool["slots"] - pool["free"])
            waiting.add_metric([pool["peer"]], pool["waiting"])
        yield from (slots, waiting)
