"""Several engines with one model behind one server (data parallelism): a router gives each request to one of them.

An engine that is lost ends its own streams only. Requests go to the others until it serves again; where none serves,
the server says what it says of a single engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector, CollectorRegistry

from reference_impl.serving.runner import EngineHost, Message
from reference_impl.simulation.routers import ROUTERS
from reference_impl.simulation.workloads.request import PAGE_TOKENS, WorkloadRequest

_LINE = ("running", "waiting", "blocks", "blocks_available", "hit_rate", "tokens_per_second")


@dataclass
class _Asked:
    """A question that several engines answer. waits: for these."""

    name: str
    arguments: tuple[Any, ...]
    waits: set[int]
    answers: dict[int, Any] = field(default_factory=dict)
    refusals: dict[int, str] = field(default_factory=dict)


class Fleet:
    """An `EngineHost` of several, which have the same model and options. router: a name in `ROUTERS`; KeyError for
    another."""

    def __init__(self, engines: Sequence[EngineHost], router: str = "prefix"):
        self.engines, first = list(engines), engines[0]
        self.prompts, self.vocab_size, self.max_model_len = first.prompts, first.vocab_size, first.max_model_len
        self.acceptance, self.sampling_defaults = first.acceptance, first.sampling_defaults
        self.embedding_defaults = first.embedding_defaults
        self._choose = ROUTERS[router](len(engines))
        self.serving: set[int] = set()  # which engines do
        self._lost: dict[int, str] = {}  # for good, and why
        self._engine_of: dict[int, int] = {}  # by number of a stream
        self._asked: dict[int, _Asked] = {}  # by number of a question

    @property
    def is_alive(self) -> bool:
        return any(engine.is_alive for engine in self.engines)

    async def begin(self, receive: Callable[[Message], None]) -> None:
        self._receive = receive
        for number, engine in enumerate(self.engines):
            await engine.begin(partial(self._said, number))
            self.serving.add(number)

    async def end(self, seconds: float) -> None:
        await asyncio.gather(*(engine.end(seconds) for engine in self.engines))

    def send(self, command: Message) -> None:
        match command:
            case "start", number, request_id, prompts, _, options:
                self._engine_of[number] = engine = self._routed(request_id, prompts, options)
                self.engines[engine].send(command)
            case "leave", number:
                if (left := self._engine_of.pop(number, None)) is not None:
                    self.engines[left].send(command)
            case "ask", number, name, arguments:
                # A failed engine whose process lives still answers what is asked of its past.
                able = self.serving or {n for n, engine in enumerate(self.engines) if engine.is_alive}
                if not able:
                    self._receive(("answer", number, None, "no engine serves"))
                    return
                self._asked[number] = _Asked(name, arguments, set(able))
                for engine in sorted(able):
                    self.engines[engine].send(("ask", number, name, _own(engine, name, arguments)))

    def _routed(self, request_id: str, prompts: Sequence[Sequence[int]], options: Mapping[str, Any]) -> int:
        """The engine for a request: the router's choice, or, if that is lost, the next one that serves."""
        pages = pages_of(prompts[0], str(options.get("cache_salt") or ""))
        now, tokens = asyncio.get_running_loop().time(), sum(map(len, prompts))
        chosen = self._choose(WorkloadRequest(request_id, now, tokens, 0, pages))
        order = [(chosen + more) % len(self.engines) for more in range(len(self.engines))]
        return next((engine for engine in order if engine in self.serving), chosen)

    def _said(self, engine: int, message: Message) -> None:
        """Passes on what an engine says; what is about all of it becomes what it means for the fleet."""
        match message:
            case "answer", number, value, refusal if number in self._asked:
                asked = self._asked[number]
                if refusal is None:
                    asked.answers[engine] = value
                else:
                    asked.refusals[engine] = refusal
                self._answered(number, engine)
            case "restarting", how:
                self._lose(engine, how, again=True)
            case "failed", why:
                self._lost[engine] = why
                self._lose(engine, why, again=False)
            case ("restarted",):
                self.serving.add(engine)
                if len(self.serving) == 1:
                    self._receive(message)
            case _:
                self._receive(message)

    def _lose(self, engine: int, how: str, again: bool) -> None:
        self.serving.discard(engine)
        streams = [number for number, of in self._engine_of.items() if of == engine]
        for number in streams:
            del self._engine_of[number]
        for number in list(self._asked):
            self._answered(number, engine)
        if self.serving:
            self._receive(("lost", streams, f"engine {engine} is {how}" if again else f"engine {engine}: {how}", again))
        elif len(self._lost) == len(self.engines):
            self._receive(("failed", "; ".join(f"engine {each}: {why}" for each, why in sorted(self._lost.items()))))
        else:
            self._receive(("restarting", how))

    def _answered(self, number: int, engine: int) -> None:
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
        """One answer of those of all engines: metrics with each engine's number, the status of each, or else the first
        that is no refusal."""
        if asked.name == "metrics":
            return merged_metrics(asked.answers)
        if asked.name == "status":
            return {"engines": [asked.answers.get(engine) for engine in range(len(self.engines))]}
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
        {"engine": number, "serves": status is not None} | {name: (status or {}).get(name) for name in _LINE}
        for number, status in enumerate(each)
    ]
    return (each[chosen] or {}) | {"engine": chosen, "engines": lines}


def _own(engine: int, name: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a question for one engine: each writes a trace of its own."""
    if name != "write_trace":
        return arguments
    file = Path(arguments[0])
    return (str(file.with_name(f"{file.stem}.{engine}{file.suffix}")),)


def pages_of(prompt: Sequence[int], salt: str) -> tuple[int, ...]:
    """A 64-bit hash for each full page of a prompt, which stands for all before it: see `WorkloadRequest`."""
    found, before = [], blake2b(salt.encode(), digest_size=8).digest()
    for start in range(0, len(prompt) - PAGE_TOKENS + 1, PAGE_TOKENS):
        tokens = np.asarray(prompt[start : start + PAGE_TOKENS], np.int64).tobytes()
        before = blake2b(before + tokens, digest_size=8).digest()
        found.append(int.from_bytes(before, "little"))
    return tuple(found)


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
