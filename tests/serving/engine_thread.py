"""The engine in a thread beside the event loop, where a test can look at it while it serves."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable

from reference_impl import LLM
from reference_impl.serving.peers import connected
from reference_impl.serving.runner import Message
from reference_impl.serving.worker import Worker


class _Connection:
    """What is a socket between two processes."""

    def __init__(self, commands: queue.SimpleQueue[Message | None], report: Callable[[Message], None]):
        self.get, self.put = commands.get, report

    def begin(self) -> None:
        pass


class EngineThread:
    """The engine in a thread beside the event loop. They share one interpreter lock, so each waits for the other."""

    def __init__(self, llm: LLM):
        self.llm = self.prompts = llm
        self.vocab_size, self.max_model_len = llm.engine.model.config.vocab_size, llm.engine.max_model_len
        self.acceptance, self.sampling_defaults = llm.engine.config.acceptance, llm.sampling_defaults
        self.embedding_defaults = llm.embedding_defaults
        self._commands: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self.send = self._commands.put

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    async def begin(self, receive: Callable[[Message], None]) -> None:
        loop = asyncio.get_running_loop()

        self._receive, self._is_killed = receive, False

        def report(message: Message) -> None:
            if self._is_killed:
                return
            with contextlib.suppress(RuntimeError):  # a step may end after the loop was closed
                loop.call_soon_threadsafe(receive, message)

        connection = connected(self.llm, _Connection(self._commands, report))
        self.worker = Worker(self.llm, connection, connection.put)
        self._thread = threading.Thread(target=self.worker.run, name="engine", daemon=True)
        self._thread.start()
        connection.begin()

    def kill(self) -> None:
        """Nothing that it says comes any more; a thread cannot be ended in the middle of a step."""
        self._is_killed = True
        self.send(None)
        self._receive(("failed", "killed"))

    async def end(self, seconds: float) -> None:
        self.send(None)
        await asyncio.to_thread(self._thread.join, seconds)
