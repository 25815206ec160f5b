"""The engine's process, started again when it ends or a step raises, but only a few times within some minutes.

What it held is lost: streams end with an error, and requests that come meanwhile are answered with 503, until the new
process is ready. Tries are few, since what ends an engine may be a request that its client sends again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reference_impl.serving.process import EngineProcess
from reference_impl.serving.runner import Message, Prompts

if TYPE_CHECKING:
    from reference_impl.assembly.llm import LLM

logger = logging.getLogger("inferlab.serving")


@dataclass(frozen=True)
class Restarts:
    """How often an engine is started again. tries: within `seconds`, counted from the first of them. wait: seconds
    before the first try; before each further one in that time twice as many as before the last."""

    tries: int = 3
    seconds: float = 300.0
    wait: float = 1.0


class SupervisedEngine:
    """An `EngineHost`: an `EngineProcess` and its successors. make, prompts, errors of the first: see there."""

    def __init__(self, make: Callable[[], LLM], prompts: Prompts, restarts: Restarts):
        self._make, self.prompts, self.restarts = make, prompts, restarts
        self._engine = EngineProcess(make, prompts)
        self.vocab_size, self.max_model_len = self._engine.vocab_size, self._engine.max_model_len
        self.acceptance, self.sampling_defaults = self._engine.acceptance, self._engine.sampling_defaults
        self.embedding_defaults = self._engine.embedding_defaults
        self._began: list[float] = []  # when the latest tries did, on the event loop's clock
        self._restarting: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        """The process id of the present engine."""
        return self._engine.pid

    @property
    def is_alive(self) -> bool:
        return self._engine.is_alive

    async def begin(self, receive: Callable[[Message], None]) -> None:
        self._receive = receive
        await self._engine.begin(self._pass_on)

    def send(self, command: Message) -> None:
        if self.is_alive:
            self._engine.send(command)

    def kill(self) -> None:
        self._engine.kill()

    async def end(self, seconds: float) -> None:
        if self._restarting is not None and not self._restarting.done():
            self._restarting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._restarting
            seconds = 0
        await self._engine.end(seconds)

    def _pass_on(self, message: Message) -> None:
        if message[0] == "failed":
            if number := self._next_try(message[1]):
                self._restarting = asyncio.create_task(self._restart(number, message[1]))
        else:
            self._receive(message)

    def _next_try(self, why: str) -> int:
        """The number of the next try, from 1, after reporting it; 0 where there were enough."""
        now, most = asyncio.get_running_loop().time(), self.restarts.tries
        self._began = [began for began in self._began if began > now - self.restarts.seconds]
        if len(self._began) >= most:
            after = f" (after {most} restarts within {self.restarts.seconds:g} s)" if most else ""
            self._receive(("failed", why + after))
            return 0
        self._began.append(now)
        number = len(self._began)
        logger.error("restarting the engine (try %d of %d): %s", number, most, why)
        self._receive(("restarting", f"restarting (try {number} of {most}): {why}"))
        return number

    async def _restart(self, number: int, why: str) -> None:
        await self._engine.end(1.0)  # so that its memory is free
        while number:
            await asyncio.sleep(self.restarts.wait * 2 ** (number - 1))
            try:
                self._engine = EngineProcess(self._make, self.prompts, wait=False)
                await asyncio.to_thread(self._engine.wait_until_ready)
                await self._engine.begin(self._pass_on)
            except Exception as error:  # whatever it is, the next try, or the end of them, is due
                number = self._next_try(f"{why}; it could not be started again: {error}")
            else:
                logger.warning("the engine serves again")
                self._receive(("restarted",))
                return
