"""One answer of several engines: metrics with the number of each, or the first that is no refusal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector, CollectorRegistry

from reference_impl.serving.runner import EngineHost, Message

_LINE = ("pid", "running", "waiting", "blocks", "blocks_available", "hit_rate", "tokens_per_second")


@dataclass
class _Asked:
    """A question that several engines answer. waits: for these."""

    name: str
    waits: set[int]
    answers: dict[int, Any] = field(default_factory=dict)
    refusals: dict[int, str] = field(default_factory=dict)


class Questions:
    """Asks engines, and tells `receive` what they say together. roles: what each is for, if that differs."""

    def __init__(self, engines: Sequence[EngineHost], receive: Callable[[Message], None]):
        self._engines, self._receive = engines, receive
        self.roles = [""] * len(engines)
        self._asked: dict[int, _Asked] = {}  # by number

    def ask(self, number: int, name: str, arguments: tuple[Any, ...], serving: set[int]) -> None:
        # A failed engine whose process lives still answers what is asked of its past.
        able = serving or {n for n, engine in enumerate(self._engines) if engine.is_alive}
        if not able:
            self._receive(("answer", number, None, "no engine serves"))
            return
        self._asked[number] = _Asked(name, set(able))
        for engine in sorted(able):
            self._engines[engine].send(("ask", number, name, _own(engine, name, arguments)))

    def answered(self, engine: int, number: int, value: Any, refusal: str | None) -> bool:
        """Takes an engine's answer; False where it is none of a question that was asked here."""
        if (asked := self._asked.get(number)) is None:
            return False
        if refusal is None:
            asked.answers[engine] = value
        else:
            asked.refusals[engine] = refusal
        self._is_over(number, engine)
        return True

    def lost(self, engine: int) -> None:
        """Waits for this engine no longer."""
        for number in list(self._asked):
            self._is_over(number, engine)

    def _is_over(self, number: int, engine: int) -> None:
        asked = self._asked[number]
        asked.waits.discard(engine)
        if asked.waits:
            return
        del self._asked[number]
        if not asked.answers:
            why = next(iter(asked.refusals.values()), "no engine serves")
            self._receive(("answer", number, None, why))
            return
        self._receive(("answer", number, self._together(asked), None))

    def _together(self, asked: _Asked) -> Any:
        if asked.name == "metrics":
            return merged_metrics(asked.answers)
        if asked.name == "status":
            return {
                "engines": [asked.answers.get(engine) for engine in range(len(self._engines))],
                "roles": self.roles,
            }
        return asked.answers[min(asked.answers)]


def of_one_engine(found: dict[str, Any], wanted: int) -> dict[str, Any]:
    """The status of one engine of a fleet, the wanted one if it serves, with a line about each. found: a fleet's, or
    that of a single engine, which it stays."""
    if "engines" not in found:
        return found
    each: list[dict[str, Any] | None] = found["engines"]
    served = [number for number, status in enumerate(each) if status is not None]
    chosen = wanted if wanted in served else served[0]
    lines = [
        {"engine": number, "role": role, "serves": status is not None}
        | {name: (status or {}).get(name) for name in _LINE}
        for number, (role, status) in enumerate(zip(found["roles"], each, strict=True))
    ]
    return (each[chosen] or {}) | {"engine": chosen, "engines": lines}


def _own(engine: int, name: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a question for one engine: each writes a trace of its own."""
    if name != "write_trace":
        return arguments
    file = Path(arguments[0])
    return (str(file.with_name(f"{file.stem}.{engine}{file.suffix}")),)


class _Merged(Collector):
    def __init__(self, families: Sequence[Metric]):
        self.families = families

    def collect(self) -> Sequence[Metric]:
        return self.families


def merged_metrics(texts: Mapping[int, bytes]) -> bytes:
    """Prometheus' text of several engines as one, in which each sample has the label engine, as vLLM's."""
    families: dict[str, Metric] = {}
    for engine, text in sorted(texts.items()):
        for found in text_string_to_metric_families(text.decode()):
            family = families.setdefault(found.name, Metric(found.name, found.documentation, found.type))
            for sample in found.samples:
                family.add_sample(sample.name, {"engine": str(engine), **sample.labels}, sample.value)
    registry = CollectorRegistry()
    registry.register(_Merged([*families.values()]))
    return generate_latest(registry)
