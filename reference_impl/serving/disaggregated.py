"""Prefill and decode in engines of their own, behind one server (DistServe, Zhong et al. 2024; Splitwise, Patel et al.
2024; Mooncake, Qin et al. 2024).

    a request -> a decode engine, where it waits until its pages have come or will not come, and
              -> a prefill engine, which computes its prompt and pushes the pages there, chunk by chunk

An engine is told nothing of its role: any of them can do both, and the router decides. So where a role has no engine
left, the others do its work. A prompt that is short, or that the decode engine has had before, stays with it.

What engines say to each other goes through here (`relay`); pages do not. An engine that leaves PINGS pings unanswered
is stopped or hangs: it is ended, and its streams go on elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, product
from typing import Any

from reference_impl.features.disaggregation.layouts import PageFormat
from reference_impl.interfaces import SamplingParams
from reference_impl.serving.first_tokens import FirstTokens
from reference_impl.serving.fleet import Fleet, asked
from reference_impl.serving.joining import ROLES, PeersPort, RemoteEngine
from reference_impl.serving.placing import Placement, full_pages
from reference_impl.serving.runner import EngineHost, Message
from reference_impl.simulation.routers import ROUTERS

logger = logging.getLogger("inferlab.serving")
MIN_PAGES = 4
PINGS = 4
MEETING_SECONDS = 10.0  # that a fleet waits for its engines to meet, before it serves
ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0, detokenize=False)  # of a prompt that is computed for another


@dataclass
class _Prefill:
    """A prompt that a prefill engine computes. stream: by which its client knows it."""

    engine: int
    stream: int


class Disaggregated(Fleet):
    """A fleet whose first num_prefill engines compute prompts. min_pages: how many a decode engine must lack so that a
    prompt goes through one of them. seconds: in which an engine answers. peers_port: where others may join."""

    def __init__(
        self,
        engines: Sequence[EngineHost],
        num_prefill: int,
        router: str = "prefix",
        min_pages: int = MIN_PAGES,
        seconds: float = 30.0,
        peers_port: PeersPort | None = None,
    ):
        super().__init__(engines, router)
        self.min_pages, self.seconds, self._router, self._peers_port = min_pages, seconds, router, peers_port
        self.questions.roles = ["prefill"] * num_prefill + ["decode"] * (len(engines) - num_prefill)
        self._assigned()
        self.names: dict[int, str] = {}  # of engines, as their peers know them
        self.page_format: PageFormat | None = None  # of the engines here, once one has said it
        self.first_tokens = self.questions.first_tokens = FirstTokens()
        # By names of prefill and decode engines that have met: why the one does not push to the other, if so.
        self._met: dict[tuple[str | None, str | None], str] = {}
        self._prefills: dict[int, _Prefill] = {}  # by number of the stream in the prefill engine
        self._life, self._transfers = uuid.uuid4().hex, count(1)
        self._unanswered: dict[int, int] = {}  # pings, by engine
        self.placement = Placement()

    async def begin(self, receive: Callable[[Message], None]) -> None:
        self._all_met = asyncio.Event()
        await super().begin(receive)
        with contextlib.suppress(TimeoutError):  # engines that have not met compute their prompts themselves
            async with asyncio.timeout(MEETING_SECONDS):
                await self._all_met.wait()
        self._watching = asyncio.create_task(self._watch())
        if self._peers_port is not None:
            await self._peers_port.open(self)

    async def end(self, seconds: float) -> None:
        self._watching.cancel()
        if self._peers_port is not None:
            await self._peers_port.close()
        await super().end(seconds)

    async def _watch(self) -> None:
        """By number of pings and not by the clock: when this process was stopped itself, it is nobody's fault."""
        while True:
            await asyncio.sleep(self.seconds / PINGS)
            for engine in list(self._unanswered):
                if self._unanswered[engine] >= PINGS:
                    logger.error("engine %d has said nothing for %g s: it is ended", engine, self.seconds)
                    del self._unanswered[engine]
                    self.engines[engine].kill()
                else:
                    self._unanswered[engine] += 1
                    self.engines[engine].send(("ping",))

    # --- roles ------------------------------------------------------------------------------------------------------

    def _assigned(self) -> None:
        """What follows from the roles. Routers begin anew: they only guess what is cached where."""
        roles = self.questions.roles
        self.prefill, self.decode = ([n for n, role in enumerate(roles) if role == each] for each in ROLES)
        self._choose_prefill, self._choose_decode = (
            ROUTERS[self._router](len(each)) for each in (self.prefill, self.decode)
        )

    async def join(self, engine: EngineHost, role: str) -> None:
        """Takes in one more engine, in the place of one that had joined and is gone if there is such a place."""
        left = (n for n in sorted(self._lost) if isinstance(self.engines[n], RemoteEngine))
        if (number := next(left, len(self.engines))) < len(self.engines):
            del self._lost[number]
            self.engines[number], self.questions.roles[number] = engine, role
        else:
            self.engines.append(engine)
            self.questions.roles.append(role)
        self._assigned()
        await engine.begin(partial(self.said, number))
        self._unanswered[number] = 0  # also one that never says its name has to answer
        self.said(number, ("restarted",))

    def assign(self, engine: int, role: str) -> None:
        """Gives an engine another role; what it has begun it ends. ValueError where the other one would have none."""
        others = [each for n, each in enumerate(self.questions.roles) if n != engine and n in self.serving]
        if role not in ROLES or set(others) | {role} != set(ROLES):
            raise ValueError(f"role: expected one of {', '.join(ROLES)}, so that each has an engine, got {role!r}")
        self.questions.roles[engine] = role
        self._assigned()
        self._meet(engine)

    def _meet(self, engine: int) -> None:
        """Lets those meet that will exchange pages, as soon as both are there."""
        for prefill, decode in product(self.prefill, self.decode):
            if engine in (prefill, decode) and prefill in self.names and decode in self.names:
                self.engines[prefill].send(("meet", self.names[decode]))

    # --- commands ---------------------------------------------------------------------------------------------------

    def send(self, command: Message) -> None:
        match command:
            case "leave", number:
                self.first_tokens.forget(number)
                for prefill in [n for n, found in self._prefills.items() if found.stream == number]:
                    self._end(prefill)
        super().send(command)

    def route(self, request_id: str, prompts: Sequence[Sequence[int]], options: Mapping[str, Any]) -> int:
        serving = [engine for engine in self.decode if engine in self.serving] or sorted(self.serving)
        if not serving:
            return self.decode[0]
        if self._router == "prefix":
            return self.placement.cheapest(serving, full_pages(prompts[0][:-1], options), self._num_requests)
        chosen = self.decode[self._choose_decode(asked(request_id, prompts, options))]
        return chosen if chosen in serving else serving[0]

    def _num_requests(self, engine: int) -> int:
        own = sum(stream.engine == engine for stream in self.streams.values())
        return own + sum(prefill.engine == engine for prefill in self._prefills.values())

    def start(self, command: Message, engine: int) -> None:
        """Gives a request to a decode engine, and its prompts to prefill engines first where that is worth it."""
        _, number, request_id, prompts, sampling, options = command
        transfers: dict[str, str] = {}  # and who sends each
        for prompt in prompts:
            pages = full_pages(prompt[:-1], options)  # the last token is computed where it is answered
            is_whole = options.get("pooling") is not None or sampling.prompt_logprobs is not None
            if not is_whole and self.placement.num_new(engine, pages) >= self.min_pages:
                transfers |= self._compute(self.public(number), request_id, prompt, options, engine)
            self.placement.note(engine, pages)
        if transfers:
            stream = self.public(number)
            self.first_tokens.begin(stream, self.streams[stream].request_id, time.monotonic())
            options = {**options, "transfers": transfers}
        super().start(("start", number, request_id, prompts, sampling, options), engine)

    def _compute(
        self, stream: int, request_id: str, prompt: Sequence[int], options: Mapping[str, Any], decode: int
    ) -> dict[str, str]:
        """Lets a prefill engine compute a prompt; {transfer: its name}, or nothing where none can."""
        able = [n for n in self.prefill if n in self.serving and n != decode and self._can_push(n, decode)]
        if not able:
            return {}
        if self._router == "prefix":
            pages = full_pages(prompt[:-1], options)
            prefill = self.placement.cheapest(able, pages, self._num_requests)
            self.placement.note(prefill, pages)
        else:
            chosen = self.prefill[self._choose_prefill(asked(request_id, [prompt], options))]
            prefill = chosen if chosen in able else able[0]
        sender, receiver = self.names[prefill], self.names[decode]
        transfer, number = f"{next(self._transfers)}.{self._life}", next(self.numbers)
        self._prefills[number] = _Prefill(prefill, stream)
        own = {name: options[name] for name in ("cache_salt", "priority") if name in options}
        request = f"{request_id}.{transfer}", [prompt], ONE_TOKEN, {**own, "push_to": (transfer, receiver)}
        self.engines[prefill].send(("start", number, *request))
        return {transfer: sender}

    def _can_push(self, prefill: int, decode: int) -> bool:
        return self._met.get((self.names.get(prefill), self.names.get(decode))) == ""

    def _end(self, number: int) -> None:
        self.engines[self._prefills.pop(number).engine].send(("leave", number))

    # --- what engines say -------------------------------------------------------------------------------------------

    def said(self, engine: int, message: Message) -> None:
        match message:
            case ("pong",):
                self._unanswered[engine] = 0
            case "pages", content:
                self.page_format = self.page_format or PageFormat.from_json(content)
            case "here", name:
                self.names[engine], self._unanswered[engine] = name, 0
                self.questions.names[name] = engine
                self._meet(engine)
            case "relay", peer, content:
                self._relay(engine, peer, content)
            case "computed", number, seconds if number in self._prefills:
                self.first_tokens.computed(self._prefills[number].stream, seconds, time.monotonic())
            case "has", number, rest, first:
                self.first_tokens.has(self.public(number), rest, first, time.monotonic())
            case "met", peer, refusal:
                if refusal:
                    logger.error("engine %d cannot push pages to another: %s", engine, refusal)
                self._met[self.names[engine], peer] = refusal
                if all(
                    (self.names.get(p), self.names.get(d)) in self._met for p, d in product(self.prefill, self.decode)
                ):
                    self._all_met.set()
            case "answer", number, _, refusal if number in self._prefills:
                if refusal is not None:  # the decode engine computes the prompt, or refuses it too
                    self._end(number)
            case _:
                super().said(engine, message)
                if message[0] == "step":
                    for number, index, _, _, _, finish_reason, *_ in message[1]:
                        if finish_reason is not None:
                            self._has_ended(engine, number, index)

    def _has_ended(self, engine: int, number: int, index: int) -> None:
        if number in self._prefills:
            self._end(number)
        elif (stream := self.streams.get(number)) is not None:  # the next turn begins with this one's answer
            sample = stream.samples[index]
            text = [*stream.prompts[sample.prompt], *sample.tokens[:-1]]
            self.placement.note(engine, full_pages(text, stream.options))

    def _relay(self, engine: int, peer: str, content: bytes) -> None:
        target = next((n for n, name in self.names.items() if name == peer), None)
        if target is None:
            self.engines[engine].send(("gone", peer))
        else:
            self.engines[target].send(("relay", self.names[engine], content))

    def lose(self, engine: int, how: str, again: bool) -> None:
        self.placement.forget(engine)
        self._unanswered.pop(engine, None)
        for number in [number for number, found in self._prefills.items() if found.engine == engine]:
            del self._prefills[number]
        if (name := self.names.pop(engine, None)) is not None:
            for other in self.names:
                self.engines[other].send(("gone", name))
        super().lose(engine, how, again)
