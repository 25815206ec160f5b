"""The engine in a process of its own, and the socket between it and the event loop.

The event loop needs some 40 us for every token that it sends to a client. In one process with the engine, whose steps
are Python too, that time is taken from the steps: only one thread of a process runs Python.

The event loop never waits for the socket: its commands queue up. The engine does: when the event loop has not read for
so long that the socket is full, the engine stands still until it reads again, and nothing grows. When the event
loop's process ends, however it ends, the kernel closes the socket, and the engine's process ends, in mid-step.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import queue
import select
import socket
import struct
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from reference_impl.features.process.beside import end_with_the_other, how_it_ended, ignore_signals, start_beside
from reference_impl.serving.runner import Message, Prompts

if TYPE_CHECKING:
    from reference_impl.assembly.llm import LLM

logger = logging.getLogger("inferlab.serving")
_LENGTH = struct.Struct("!I")  # of the pickled message that follows


def _packed(message: Any) -> bytes:
    body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(body)) + body


def _unpacked(connection: socket.socket) -> Any:
    """Waits for the next message and returns it. Raises EOFError where the other end is gone."""
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    return pickle.loads(_exactly(connection, length))


def _exactly(connection: socket.socket, length: int) -> bytearray:
    data, filled = bytearray(length), 0
    while filled < length:
        if not (received := connection.recv_into(memoryview(data)[filled:])):
            raise EOFError
        filled += received
    return data


class EngineProcess:
    """Starts a process in which `make()` loads an LLM; `make` is pickled, so it is a function of a module.

    prompts: makes tokens here, for the same model. wait: until it is ready (see `wait_until_ready`).
    """

    def __init__(self, make: Callable[[], LLM], prompts: Prompts, wait: bool = True):
        self._make, self.prompts = make, prompts
        self._ending = False
        self._reading: asyncio.Task[None] | None = None
        self._process, self._socket = start_beside(__name__)
        if wait:
            self.wait_until_ready()

    def wait_until_ready(self) -> None:
        """Blocks. Raises ValueError for what `make` refuses, ChildProcessError where the process ends before."""
        try:
            self._socket.sendall(_packed(self._make))
            refusal, self.vocab_size, self.max_model_len, self.acceptance, *defaults = _unpacked(self._socket)
            self.sampling_defaults, self.embedding_defaults = defaults
        except (EOFError, OSError):
            raise ChildProcessError(f"{self._wait()} before it was ready") from None
        if refusal is not None:
            self._wait()
            raise ValueError(refusal)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def begin(self, receive: Callable[[Message], None]) -> None:
        reader, self._writer = await asyncio.open_unix_connection(sock=self._socket)
        self._reading = asyncio.create_task(self._read(reader, receive))

    async def _read(self, reader: asyncio.StreamReader, receive: Callable[[Message], None]) -> None:
        try:
            while True:
                (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
                receive(pickle.loads(await reader.readexactly(length)))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # it has ended
        except Exception:
            logger.exception("a message of the engine's process cannot be read; the process is ended")
            self._process.kill()
        how = await asyncio.to_thread(self._wait)
        if not self._ending:
            receive(("failed", how))

    @property
    def is_alive(self) -> bool:
        return self._reading is not None and not self._reading.done()

    def send(self, command: Message | None) -> None:
        if not self._writer.is_closing():
            self._writer.write(_packed(command))  # into a buffer, from which it goes when the engine reads

    def kill(self) -> None:
        self._process.kill()

    async def end(self, seconds: float) -> None:
        self._ending = True
        if self._reading is None:  # it never began
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
            return
        self.send(None)
        await asyncio.wait((self._reading,), timeout=seconds)
        self._process.kill()  # unless it has ended
        await self._reading
        self._writer.close()

    def _wait(self) -> str:
        """Waits for the end of the process, after that of the socket; returns how it ended."""
        return f"the engine's process {how_it_ended(self._process)}"


# --- in that process ------------------------------------------------------------------------------------------------


class _Link:
    """The commands and results of a Worker, over the socket; when the other end is gone, this process ends."""

    def __init__(self, connection: socket.socket):
        self._connection = connection
        end_with_the_other(connection.fileno())

    def get(self, block: bool = True) -> Any:
        """The next message, with the arguments and errors of `queue.SimpleQueue.get`."""
        if not block and not select.select([self._connection], [], [], 0)[0]:
            raise queue.Empty
        try:
            return _unpacked(self._connection)
        except (EOFError, ConnectionError):
            os._exit(1)

    def begin(self) -> None:
        """Commands will be asked for from now on."""

    def put(self, message: Message) -> None:
        try:
            self._connection.sendall(_packed(message))
        except ConnectionError:
            os._exit(1)


def main() -> None:
    ignore_signals()
    link = _Link(socket.socket(fileno=int(sys.argv[1])))
    make = link.get()
    from reference_impl.models.embedding_defaults import EmbeddingDefaults
    from reference_impl.serving.peers import connected
    from reference_impl.serving.worker import Worker, freeze

    try:
        llm = make()
    except (TypeError, ValueError, OSError) as error:
        link.put((str(error), 0, 0, "", {}, EmbeddingDefaults()))
        return
    freeze()
    commands = connected(llm, link)
    worker = Worker(llm, commands, commands.put)
    engine = llm.engine
    size, longest = engine.model.config.vocab_size, engine.max_model_len
    defaults = llm.sampling_defaults, llm.embedding_defaults
    link.put((None, size, longest, engine.config.acceptance, *defaults))
    commands.begin()
    worker.run()


if __name__ == "__main__":
    main()
