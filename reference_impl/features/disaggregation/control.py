"""Control messages between router, prefill and decode workers: who connects and who listens prove the join key to each
other, then each message is a frame with an HMAC (`authentication.py`). Contents are opaque bytes; nothing is unpickled.
Nothing is encrypted: use a private network.

Everything here belongs to one event loop. The router has one anyway. A worker with threads runs a loop in one of them
and calls from the others with `loop.call_soon_threadsafe(channel.send, content)`: so there is one implementation, no
thread for each peer, and `send` never waits, not even for a peer that is stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

from reference_impl.features.disaggregation.authentication import (
    HEADER_BYTES,
    LENGTH,
    Handshake,
    PeerError,
    Session,
    as_first,
    as_second,
    check_address,
    step_length,
)

logger = logging.getLogger("inferlab.disaggregation")

PURPOSE = "control"
MAX_WAITING = 16 << 20  # bytes that were sent to a peer and that it has not read
MAX_STRANGERS = 64  # connections at a time that have not proved the key


class Channel:
    """A connection to a peer that has the join key. peer: the name that it gave."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, session: Session):
        self.peer = session.peer
        self._text = f"{session.peer} at {session.address}"
        self._reader, self._writer = reader, writer
        self._sealer, self._opener = session.sealer, session.opener

    def send(self, content: bytes) -> None:
        """Never waits. PeerError if the connection has ended, or if the peer has left MAX_WAITING bytes unread, which
        ends the connection."""
        if self._writer.is_closing():
            raise PeerError(f"{self._text}: the control connection has ended, nothing can be sent")
        self._writer.write(self._sealer.seal(content))
        if (waiting := self._writer.transport.get_write_buffer_size()) > MAX_WAITING:
            self._writer.transport.abort()
            raise PeerError(f"{self._text}: does not read its control messages, {waiting} bytes wait; connection ended")

    async def receive(self) -> bytes:
        """The next message. PeerError if the peer ended the connection, or a message is not the next that it sent.
        For one task at a time."""
        try:
            header = await self._reader.readexactly(HEADER_BYTES)
            content = await self._reader.readexactly(self._opener.length(header))
            return self._opener.open(header, content)
        except asyncio.IncompleteReadError as error:
            self._writer.transport.abort()
            where = f"after {len(error.partial)} bytes of a control message" if error.partial else "between messages"
            raise PeerError(f"{self._text}: the control connection has ended {where}") from None
        except PeerError:
            self._writer.transport.abort()
            raise
        except OSError as error:
            raise PeerError(f"{self._text}: the control connection was lost: {error}") from error

    async def close(self, seconds: float = 1.0) -> None:
        """Ends the connection when what was sent has left, or after so many seconds. Idempotent."""
        self._writer.close()
        try:
            async with asyncio.timeout(seconds):
                # All that close it wait for one future, which a cancelled one would cancel for the others.
                await asyncio.shield(self._writer.wait_closed())
        except (OSError, TimeoutError):
            self._writer.transport.abort()


class Listener:
    """Accepts control connections; see `listen`. address: (host, port) where it listens."""

    def __init__(self, accept: Callable[[Channel], Awaitable[None]], key: bytes, name: str, seconds: float):
        self._accept, self._key, self._name, self._seconds = accept, key, name, seconds
        self._server: asyncio.Server
        self._tasks = set[asyncio.Task[None]]()
        self._strangers = 0
        self.address = ("", 0)

    async def start(self, host: str, port: int) -> None:
        self._server = await asyncio.start_server(self._connected, check_address(host), port)
        self.address = self._server.sockets[0].getsockname()[:2]

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._strangers >= MAX_STRANGERS:
            logger.warning("refused a control connection: %d others have not proved the key yet", self._strangers)
            writer.transport.abort()
            return
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        address = _text(writer.get_extra_info("peername"))
        self._strangers += 1
        try:
            steps = as_second(self._key, PURPOSE, self._name, address)
            session = await _shake_hands(reader, writer, steps, address, self._seconds)
        except PeerError as error:
            logger.warning("refused a control connection: %s", error)
            return
        finally:
            self._strangers -= 1
        channel = Channel(reader, writer, session)
        try:
            await self._accept(channel)
        except PeerError as error:
            logger.warning("a control connection ended: %s", error)
        except Exception:
            logger.exception(
                "what was to be done with the control connection of %s at %s failed", session.peer, address
            )
        finally:
            await channel.close()

    async def close(self) -> None:
        """Ends the listener and every connection that it accepted. Idempotent."""
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await self._server.wait_closed()


async def listen(
    accept: Callable[[Channel], Awaitable[None]],
    key: bytes,
    name: str,
    host: str = "127.0.0.1",
    port: int = 0,
    seconds: float = 10.0,
) -> Listener:
    """Calls `accept` with each connection of a peer that has proved the key within so many seconds; the connection is
    closed when it returns. name: by which this end is known. Port 0: the system chooses. ValueError for a host that is
    no IP address, or a key that is too short."""
    next(as_second(key, PURPOSE, name, host))  # a key or name that is wrong: now, not at the first connection
    listener = Listener(accept, key, name, seconds)
    await listener.start(host, port)
    return listener


async def connect(host: str, port: int, key: bytes, name: str, seconds: float = 10.0) -> Channel:
    """A connection to a listener that has the same key. PeerError names what happened otherwise, at the latest after so
    many seconds."""
    address = _text((check_address(host), port))
    steps = as_first(key, PURPOSE, name, address)
    try:
        async with asyncio.timeout(seconds):
            reader, writer = await asyncio.open_connection(host, port)
    except TimeoutError:
        raise PeerError(f"{address}: no connection within {seconds:g} s") from None
    except OSError as error:
        raise PeerError(f"{address}: no connection: {error}") from error
    return Channel(reader, writer, await _shake_hands(reader, writer, steps, address, seconds))


async def _shake_hands(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, steps: Handshake, address: str, seconds: float
) -> Session:
    """Runs the handshake; the connection is ended if it fails."""
    try:
        async with asyncio.timeout(seconds):
            writer.write(next(steps))
            while True:
                length = step_length(await reader.readexactly(LENGTH.size), address)
                writer.write(steps.send(await reader.readexactly(length)))
    except StopIteration as done:
        session: Session = done.value
        writer.write(session.last)
        return session
    except BaseException as error:
        writer.transport.abort()
        if isinstance(error, TimeoutError):
            raise PeerError(f"{address}: did not prove the join key within {seconds:g} s") from None
        if isinstance(error, asyncio.IncompleteReadError):
            text = "ended the connection in the handshake: is its join key another one?"
            raise PeerError(f"{address}: {text}") from None
        if isinstance(error, OSError) and not isinstance(error, PeerError):
            raise PeerError(f"{address}: the connection was lost in the handshake: {error}") from error
        raise


def _text(address: tuple[str, int] | None) -> str:
    return f"{address[0]}:{address[1]}" if address else "a peer that has left"
