"""Several engines with one model behind one server (data parallelism): a router gives each request to one of them.

An engine that is lost ends its own streams only. Requests go to the others until it serves again; where none serves,
the server says what it says of a single engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from typing import Any

import numpy as np

from reference_impl.serving.runner import EngineHost, Message
from reference_impl.serving.together import Questions
from reference_impl.simulation.routers import ROUTERS
from reference_impl.simulation.workloads.request import PAGE_TOKENS, WorkloadRequest


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
        self._questions = Questions(self.engines, lambda message: self._receive(message))

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
                self._questions.ask(number, name, arguments, self.serving)

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
            case "answer", *answer if self._questions.answered(engine, *answer):
                pass
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
        self._questions.lost(engine)
        if self.serving:
            self._receive(("lost", streams, f"engine {engine} is {how}" if again else f"engine {engine}: {how}", again))
        elif len(self._lost) == len(self.engines):
            self._receive(("failed", "; ".join(f"engine {each}: {why}" for each, why in sorted(self._lost.items()))))
        else:
            self._receive(("restarting", how))


def pages_of(prompt: Sequence[int], salt: str) -> tuple[int, ...]:
    """A 64-bit hash for each full page of a prompt, which stands for all before it: see `WorkloadRequest`."""
    found, before = [], blake2b(salt.encode(), digest_size=8).digest()
    for start in range(0, len(prompt) - PAGE_TOKENS + 1, PAGE_TOKENS):
        tokens = np.asarray(prompt[start : start + PAGE_TOKENS], np.int64).tobytes()
        before = blake2b(before + tokens, digest_size=8).digest()
        found.append(int.from_bytes(before, "little"))
    return tuple(found)
