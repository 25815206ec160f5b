"""One answer of several engines: metrics, statuses and timelines with the number of each, one trace of all."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.samples import Sample

from reference_impl.observe.perfetto_together import MOST_BYTES, EngineTrace, write_together
from reference_impl.serving.first_tokens import FirstTokens
from reference_impl.serving.joining import RemoteEngine
from reference_impl.serving.runner import EngineHost, Message

logger = logging.getLogger("inferlab.serving")
_LINE = ("pid", "running", "waiting", "blocks", "blocks_available", "hit_rate", "tokens_per_second", "pools")
REMOTE_BYTES = 700_000  # of a trace: what fits into one control message


@dataclass
class _Asked:
    """A question that several engines answer. waits: for these."""

    name: str
    arguments: tuple[Any, ...]
    waits: set[int]
    answers: dict[int, Any] = field(default_factory=dict)
    refusals: dict[int, str] = field(default_factory=dict)


class Questions:
    """Asks engines, and tells `receive` what they say together. roles: what each is for, if that differs. names: the
    number of an engine by each name that its peers have known it by. first_tokens: where there are roles."""

    def __init__(self, engines: Sequence[EngineHost], receive: Callable[[Message], None]):
        self._engines, self._receive = engines, receive
        self.roles = [""] * len(engines)
        self.names: dict[str, int] = {}
        self.first_tokens: FirstTokens | None = None
        self._asked: dict[int, _Asked] = {}  # by number

    def ask(self, number: int, name: str, arguments: tuple[Any, ...], serving: set[int]) -> None:
        # A failed engine whose process lives still answers what is asked of its past.
        able = serving or {n for n, engine in enumerate(self._engines) if engine.is_alive}
        if not able:
            self._receive(("answer", number, None, "no engine serves"))
            return
        self._asked[number] = _Asked(name, arguments, set(able))
        for engine in sorted(able):
            question = name, arguments
            if name == "write_trace":  # one file is written here
                is_remote = isinstance(self._engines[engine], RemoteEngine)
                question = "events", (REMOTE_BYTES if is_remote else MOST_BYTES,)
            self._engines[engine].send(("ask", number, *question))

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
        try:
            self._receive(("answer", number, self._together(asked), None))
        except (OSError, ValueError) as error:
            self._receive(("answer", number, None, str(error)))
        except Exception as error:  # what an engine says is not what was asked: the others' streams go on
            logger.exception("the answers to %s do not fit together", asked.name)
            self._receive(("answer", number, None, f"{type(error).__name__}: {error}"))

    def _together(self, asked: _Asked) -> Any:
        match asked.name:
            case "metrics":
                text = merged_metrics(asked.answers, self.names, self.roles)
                return text if self.first_tokens is None else text + self.first_tokens.text()
            case "status":
                each = [self._status(asked.answers.get(engine)) for engine in range(len(self._engines))]
                parts = None if self.first_tokens is None else self.first_tokens.summary()
                return {"engines": each, "roles": self.roles, "ttft_parts": parts}
            case "timeline":
                return self._timeline(asked.arguments[0], asked.answers)
            case "write_trace":
                traces = [EngineTrace(self._title(n), *found) for n, found in sorted(asked.answers.items())]
                return write_together(traces, Path(asked.arguments[0]))
        return asked.answers[min(asked.answers)]

    def _title(self, engine: int) -> str:
        return f"{self.roles[engine] or 'engine'} {engine}"

    def _status(self, found: dict[str, Any] | None) -> dict[str, Any] | None:
        """With the number of an engine for the name of a peer."""
        if found is None or not found["pools"]:
            return found
        known = [pool for pool in found["pools"] if pool["peer"] in self.names]
        return found | {"pools": [pool | {"peer": self.names[pool["peer"]]} for pool in known]}

    def _timeline(self, answer: str, answers: Mapping[int, dict[str, Any]]) -> dict[str, Any]:
        """Of all engines that had a part in an answer. Each times its requests by its own clock, from their arrival."""
        requests = [
            {"engine": engine, "role": self.roles[engine]} | request
            for engine, found in answers.items()
            for request in found["requests"]
        ]
        requests.sort(key=lambda request: float(request["arrived_at"]))
        parts = None if self.first_tokens is None else self.first_tokens.of(answer)
        return {"id": answer, "requests": requests, "ttft_parts": parts}


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
    return (each[chosen] or {}) | {"engine": chosen, "engines": lines, "ttft_parts": found["ttft_parts"]}


class _Merged(Collector):
    def __init__(self, families: Sequence[Metric]):
        self.families = families

    def collect(self) -> Sequence[Metric]:
        return self.families


def merged_metrics(texts: Mapping[int, bytes], names: Mapping[str, int], roles: Sequence[str]) -> bytes:
    """Prometheus' text of several engines as one, in which each sample has the label engine, as vLLM's."""
    families: dict[str, Metric] = {}
    for engine, text in sorted(texts.items()):
        for found in text_string_to_metric_families(text.decode()):
            family = families.setdefault(found.name, Metric(found.name, found.documentation, found.type))
            for sample in with_numbers(found.samples, names, roles):
                family.add_sample(sample.name, {"engine": str(engine), **sample.labels}, sample.value)
    registry = CollectorRegistry()
    registry.register(_Merged([*families.values()]))
    return generate_latest(registry)


def with_numbers(samples: Sequence[Sample], names: Mapping[str, int], roles: Sequence[str]) -> list[Sample]:
    """Samples with the label `peer`: its engine's number and role for its name; those of one engine's lives added up.
    names: numbers of engines, by the names of all their lives. Others stay as they are; of names that nobody has told
    there are none."""
    found: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for sample in samples:
        labels = dict(sample.labels)
        if "peer" in labels:
            if (number := names.get(labels["peer"])) is None:
                continue
            labels |= {"peer": str(number), "peer_role": roles[number]}
        key = sample.name, tuple(labels.items())
        found[key] = found.get(key, 0.0) + sample.value
    return [Sample(name, dict(labels), value) for (name, labels), value in found.items()]
