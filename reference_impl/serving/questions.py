"""What the event loop may ask of the engine, by name.

The answer is made where the engine runs, between two steps: so all numbers of an answer are of one moment, and only the
answer, which is small, is sent.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from reference_impl.assembly.engine import Engine
from reference_impl.observe.perfetto import write_perfetto
from reference_impl.observe.perfetto_together import packed
from reference_impl.serving import status
from reference_impl.serving.metrics import EngineGauges, WatchedTrace
from reference_impl.serving.peer_metrics import PeerMetrics, endpoint_in, pools, transfers

logger = logging.getLogger("inferlab.serving")


class Questions:
    """The answers to questions. engine: one whose trace is a WatchedTrace."""

    def __init__(self, engine: Engine):
        if not isinstance(engine.trace, WatchedTrace):
            raise TypeError("expected an engine with Parts(trace=WatchedTrace(...))")
        self._engine, self._trace = engine, engine.trace
        self._trace.counts.registry.register(EngineGauges(engine))
        if (endpoint := endpoint_in(engine)) is not None:
            self._trace.counts.registry.register(PeerMetrics(endpoint))
        self._endpoint = endpoint

    def answer(self, name: str, arguments: tuple[Any, ...]) -> tuple[Any, str | None]:
        """(answer, None), or (None, why there is none). A failing question does not end the engine."""
        try:
            return getattr(self, name)(*arguments), None
        except (ValueError, OSError) as error:
            return None, str(error)
        except Exception as error:
            logger.exception("the question %s%r went wrong", name, arguments)
            return None, f"{type(error).__name__}: {error}"

    def metrics(self) -> bytes:
        """Prometheus' text format."""
        return self._trace.counts.text()

    def status(self, last: int, ttft: float, tpot: float) -> dict[str, Any]:
        """What runs now, and of the last finished requests percentiles, and goodput under objectives (seconds)."""
        engine, counts = self._engine, self._trace.counts
        finished = status.finished(counts.last[-last:], engine.clock.now(), ttft, tpot)
        shared = {"pools": [] if self._endpoint is None else pools(self._endpoint)}
        return status.snapshot(engine, counts.hit_rate) | finished | shared

    def timeline(self, answer: str) -> dict[str, Any]:
        """What happened to an answer's requests. Raises ValueError where the trace does not have it, or no longer."""
        try:
            return status.timeline(self._engine, answer)
        except KeyError:
            kept = f"expected the id of an answer among the last {self._trace.keep} events"
            raise ValueError(f"no request {answer!r}: {kept}") from None

    def write_trace(self, file: str) -> None:
        """Writes a timeline for ui.perfetto.dev. Raises OSError where it cannot be written."""
        write_perfetto(self._trace, Path(file))

    def events(self, most_bytes: int) -> tuple[float, bytes]:
        """What an `EngineTrace` has of this engine besides its name, in so many bytes."""
        moved = [] if self._endpoint is None else transfers(self._endpoint)
        return status.epoch_of(self._engine.clock), packed(self._trace, moved, most_bytes)
