"""Several engines with one model behind one server (data parallelism): a router gives each request to one of them.

When an engine is lost, another one goes on with its streams. Requests go to the others until it serves again; where
none serves, the server says what it says of a single engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from itertools import count
from typing import Any

import numpy as np

from reference_impl.serving.runner import EngineHost, Message, Piece
from reference_impl.serving.streams import Sample, Stream
from reference_impl.serving.together import Questions
from reference_impl.simulation.routers import ROUTERS
from reference_impl.simulation.workloads.request import PAGE_TOKENS, WorkloadRequest

MOVES = 2  # of a stream, to other engines


class Fleet:
    """An `EngineHost` of several, which have the same model and options. router: a name in `ROUTERS`; KeyError for
    another.

    A stream whose engine is lost goes on in another one, MOVES times at most, since what ends an engine may be the
    request itself: each sample by itself, as a stream with a number below 0.
    """

    def __init__(self, engines: Sequence[EngineHost], router: str = "prefix"):
        self.engines, first = list(engines), engines[0]
        self.prompts, self.vocab_size, self.max_model_len = first.prompts, first.vocab_size, first.max_model_len
        self.acceptance, self.sampling_defaults = first.acceptance, first.sampling_defaults
        self.embedding_defaults = first.embedding_defaults
        self._choose = ROUTERS[router](len(engines))
        self.serving: set[int] = set()  # which engines do
        self._lost: dict[int, str] = {}  # for good, and why
        self.streams: dict[int, Stream] = {}  # by number
        self._parts: dict[int, tuple[int, Sample]] = {}  # by number: the stream that a sample is of
        self.numbers = count(-1, -1)
        self.questions = Questions(self.engines, lambda message: self._receive(message))

    @property
    def is_alive(self) -> bool:
        return any(engine.is_alive for engine in self.engines)

    async def begin(self, receive: Callable[[Message], None]) -> None:
        self._receive = receive
        for number, engine in enumerate(self.engines):
            await engine.begin(partial(self.said, number))
            self.serving.add(number)

    async def end(self, seconds: float) -> None:
        await asyncio.gather(*(engine.end(seconds) for engine in self.engines))

    def kill(self) -> None:
        for engine in self.engines:
            engine.kill()

    # --- commands ---------------------------------------------------------------------------------------------------

    def send(self, command: Message) -> None:
        match command:
            case "start", number, *request:
                stream = Stream(*request)
                stream.engine = self.route(stream.request_id, stream.prompts, stream.options)
                self.streams[number] = stream
                self.start(command, stream.engine)
            case "leave", number:
                if (left := self.streams.pop(number, None)) is not None:
                    for part in left.parts or {number}:
                        self._parts.pop(part, None)
                        self.engines[left.engine].send(("leave", part))
            case "ask", number, name, arguments:
                self.questions.ask(number, name, arguments, self.serving)

    def start(self, command: Message, engine: int) -> None:
        """Gives a request to an engine."""
        self.engines[engine].send(command)

    def route(self, request_id: str, prompts: Sequence[Sequence[int]], options: Mapping[str, Any]) -> int:
        """The engine for a request: the router's choice, or, if that is lost, the next one that serves."""
        chosen = self._choose(asked(request_id, prompts, options))
        order = [(chosen + more) % len(self.engines) for more in range(len(self.engines))]
        return next((engine for engine in order if engine in self.serving), chosen)

    def public(self, number: int) -> int:
        """The number by which a client's stream is known, of one that may be a part of it."""
        return self._parts[number][0] if number in self._parts else number

    # --- what engines say -------------------------------------------------------------------------------------------

    def said(self, engine: int, message: Message) -> None:
        """Passes on what an engine says; what is about all of it becomes what it means for the fleet."""
        match message:
            case "step", rows, usages:
                self._step(rows, usages)
            case "answer", number, seeds, refusal if number in self.streams:
                if refusal is None:
                    self.streams[number].begin(seeds)
                self._receive(("answer", number, None, refusal))
            case "answer", number, _, refusal if number in self._parts:
                if refusal is not None:
                    self._receive(
                        ("lost", [self._parts[number][0]], f"another engine does not go on: {refusal}", False)
                    )
            case "answer", *answer:
                self.questions.answered(engine, *answer)
            case "restarting", how:
                self.lose(engine, how, again=True)
            case "failed", why:
                self._lost[engine] = why
                self.lose(engine, why, again=False)
            case ("restarted",):
                self.serving.add(engine)
                if len(self.serving) == 1:
                    self._receive(message)
            case _:
                self._receive(message)

    def _step(self, rows: Sequence[Sequence[Any]], usages: Sequence[tuple[int, tuple[int, int, int]]]) -> None:
        told = [new for row in rows if (new := self._row(*row)) is not None]
        used = []
        for number, (prompt, completion, cached) in usages:
            public = self.public(number)
            if (stream := self.streams.get(public)) is not None:
                stream.num_cached = max(stream.num_cached, cached)
                used.append((public, stream.usage() if stream.num_moves else (prompt, completion, cached)))
        self._receive(("step", told, used))

    def _row(self, number: int, index: int, *fields: Any) -> tuple[Any, ...] | None:
        """What the client of this row is told; None where it has gone."""
        public, sample = self._parts.get(number, (number, None))
        if (stream := self.streams.get(public)) is None:
            return None
        sample = sample or stream.samples[index]
        sample.take(piece := Piece(index, *fields))
        *rest, _, error = fields[1:]
        return (public, sample.index, piece.text, *rest, piece.prompt_logprobs, error)

    def lose(self, engine: int, how: str, again: bool) -> None:
        """The engine serves no more. again: it may later."""
        self.serving.discard(engine)
        self.questions.lost(engine)
        streams = [number for number, stream in self.streams.items() if stream.engine == engine]
        if self.serving:
            left = [number for number in streams if not self._move(number)]
            why = f"engine {engine} is {how}" if again else f"engine {engine}: {how}"
            self._receive(("lost", left, why, again))
            return
        for number in streams:
            self._drop(number)
        if len(self._lost) == len(self.engines):
            self._receive(("failed", "; ".join(f"engine {each}: {why}" for each, why in sorted(self._lost.items()))))
        else:
            self._receive(("restarting", how))

    def _drop(self, number: int) -> None:
        for part in self.streams.pop(number).parts:
            self._parts.pop(part, None)

    def _move(self, number: int) -> bool:
        """Lets another engine go on with a stream; False, and it is dropped, where none may."""
        stream = self.streams[number]
        if stream.num_moves >= MOVES or not stream.can_move:
            self._drop(number)
            return False
        for part in stream.parts:
            self._parts.pop(part, None)
        stream.parts = set()
        stream.num_moves += 1
        stream.engine = self.route(stream.request_id, stream.prompts, stream.options)
        if not stream.is_answered:  # nothing is known of it: it begins anew
            self.start(("start", number, *stream.request), stream.engine)
            return True
        for sample in stream.samples:
            if not sample.is_over:
                stream.parts.add(part := next(self.numbers))
                self._parts[part] = number, sample
                self.start(stream.command(part, sample), stream.engine)
        return True


def asked(request_id: str, prompts: Sequence[Sequence[int]], options: Mapping[str, Any]) -> WorkloadRequest:
    """A request as routers see it."""
    pages = pages_of(prompts[0], str(options.get("cache_salt") or ""))
    return WorkloadRequest(request_id, asyncio.get_running_loop().time(), sum(map(len, prompts)), 0, pages)


def pages_of(prompt: Sequence[int], salt: str, page_tokens: int = PAGE_TOKENS) -> tuple[int, ...]:
    """A 64-bit hash for each full page of a prompt, which stands for all before it: see `WorkloadRequest`."""
    found, before = [], blake2b(salt.encode(), digest_size=8).digest()
    for start in range(0, len(prompt) - page_tokens + 1, page_tokens):
        tokens = np.asarray(prompt[start : start + page_tokens], np.int64).tobytes()
        before = blake2b(before + tokens, digest_size=8).digest()
        found.append(int.from_bytes(before, "little"))
    return tuple(found)
