"""Pages over TCP, between any two machines: the receiver listens, each writer has one connection for each memory.

What travels is in `tcp_frames.py`, the receiver's end in `tcp_receiver.py`, the writer's here. Nothing is encrypted.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from concurrent.futures import Future
from typing import NoReturn

from reference_impl.features.disaggregation.authentication import as_first, as_second, check_address
from reference_impl.features.disaggregation.transports.interface import Link, PageMemory, WriteError, WriteTimeout
from reference_impl.features.disaggregation.transports.pages import Description, Pages, Shape, Write, Writer, describe
from reference_impl.features.disaggregation.transports.tcp_frames import (
    ANSWER,
    FRAME,
    MAX_TEXT,
    PURPOSE,
    shake_hands,
    shut,
)
from reference_impl.features.disaggregation.transports.tcp_receiver import Listener, Shared

_AT_ONCE = 32  # pages in one call of the system


class TcpTransport:
    """See `Transport`. owner: by which name the errors of peers call this process. key: the join key. host, port: where
    it listens once it shares memory, an address that peers can reach; port 0: the system chooses."""

    name = "tcp"

    def __init__(self, owner: str, key: bytes, host: str = "127.0.0.1", port: int = 0):
        if check_address(host) in ("0.0.0.0", "::"):
            raise ValueError(f"expected the address of one interface, which peers connect to; got {host}")
        next(as_second(key, PURPOSE, owner, host))  # a key or a name that is wrong: now
        self.owner, self._key, self._host, self._port = owner, key, host, port
        self._lock = threading.Lock()
        self._listener: Listener | None = None
        self._shared: dict[str, Shared] = {}
        self._links = set[_Link]()

    def share(self, peer: str, num_slots: int, slot_bytes: int) -> tuple[PageMemory, bytes]:
        shape = Shape(num_slots, slot_bytes)
        with self._lock:
            if peer in self._shared:
                raise ValueError(f"{peer} has a memory already: cut it off before it gets another")
            self._listener = self._listener or Listener(self.owner, self._key, self._host, self._port)
            shared = self._shared[peer] = Shared(shape, peer)
            self._listener.shared[shared.token] = shared
            port = self._listener.port
        more: dict[str, str | int] = {"host": self._host, "port": port, "memory": shared.token}
        return shared.slots, describe(self.name, self.owner, shape, **more)

    def connect(self, description: bytes) -> Link:
        read = Description.read(description, self.name, {"host": str, "port": int, "memory": str})
        check_address(read.more["host"])
        if not 0 < read.more["port"] < 1 << 16:
            raise ValueError(f"expected a port, got {read.more['port']}")
        link = _Link(read, self._key)
        with self._lock:
            self._links = {other for other in self._links if not other.closed} | {link}
        return link

    def cut_off(self, peer: str) -> None:
        with self._lock:
            shared = self._shared.pop(peer, None)
            if shared is not None and self._listener is not None:
                del self._listener.shared[shared.token]
        if shared is not None:
            shared.end()

    def close(self) -> None:
        for peer in list(self._shared):
            self.cut_off(peer)
        for link in list(self._links):
            link.close()
        self._links = set()
        with self._lock:
            listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()


class _Link:
    """The writer's end. The thread of its Writer connects, sends and waits for answers."""

    def __init__(self, description: Description, key: bytes):
        more = description.more
        self._owner, self._shape, self._key = description.owner, description.shape, key
        self._address, self._memory = (more["host"], more["port"]), more["memory"]
        self._peer = f"{description.owner} at {more['host']}:{more['port']}"
        self._socket: socket.socket | None = None
        self._sequence = 0
        self._partial = b""  # of an answer
        self.closed = False
        self._writer = Writer(self._peer, self._do, self._interrupt)

    def write(self, pages: Pages, deadline: float) -> Future[None]:
        return self._writer.add(Write.of(pages, deadline, self._shape))

    def close(self) -> None:
        self.closed = True
        self._writer.close()
        if self._socket is not None:
            self._socket.close()

    def _interrupt(self) -> None:
        if self._socket is not None:
            shut(self._socket)

    def _do(self, write: Write) -> None:
        begun = self._sequence
        try:
            self._socket = self._socket or self._join(write)
            self._send(self._socket, write)
            self._read_answer(self._socket, write)
        except (OSError, EOFError) as error:
            certain = isinstance(error, WriteError) or self._sequence == begun
            late = isinstance(error, TimeoutError)
            text = str(error) if isinstance(error, WriteError) else self._what_happened(error, write, begun)
            self._writer.refuse(text)
            kind = WriteTimeout if late else WriteError
            write.fail(kind(text, None if certain else write.stopped))
            if not certain and self._socket is not None:
                self._wait_for_last_answer(self._socket, write)
        else:
            write.done()

    def _what_happened(self, error: Exception, write: Write, begun: int) -> str:
        sent = f"{self._sequence - begun} of {len(write.pages)} pages were sent"
        if isinstance(error, TimeoutError):
            return f"{self._peer}: no answer by the deadline; {sent}; stopped, overloaded or unreachable"
        return f"{self._peer}: the connection for pages was lost ({error or 'ended by the peer'}); {sent}"

    def _join(self, write: Write) -> socket.socket:
        # First the socket, so that `close` can end what waits for it.
        connection = self._socket = socket.socket(socket.AF_INET6 if ":" in self._address[0] else socket.AF_INET)
        try:
            connection.settimeout(write.seconds_left())
            if not self.closed:
                connection.connect(self._address)
        except TimeoutError:
            raise
        except OSError as error:
            raise WriteError(f"{self._peer}: no connection for pages: {error}") from error
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            steps = as_first(self._key, PURPOSE, self._memory, self._peer)
            shake_hands(connection, steps, self._peer, write.deadline)
        except TimeoutError:
            raise
        except OSError as error:
            raise WriteError(str(error)) from error
        return connection

    def _send(self, connection: socket.socket, write: Write) -> None:
        ready = select.poll()  # not select.select, which knows only the first 1,024 descriptors
        ready.register(connection, select.POLLIN | select.POLLOUT)
        connection.settimeout(0)
        for at in range(0, len(write.pages), _AT_ONCE):
            buffers = list[memoryview | bytes]()
            for number, (content, slot) in enumerate(write.pages[at : at + _AT_ONCE], at):
                last = number == len(write.pages) - 1
                buffers += [FRAME.pack(self._sequence, len(content), slot, last), content]
                self._sequence += 1
            while buffers:
                events = ready.poll(1000 * write.seconds_left())
                if not events or events[0][1] & ~select.POLLOUT:
                    self._read_answer(connection, write)  # which can only be a refusal, or the end of the connection
                sent = connection.sendmsg(buffers)
                while buffers and sent >= len(buffers[0]):
                    sent -= len(buffers.pop(0))
                if sent:
                    buffers[0] = memoryview(buffers[0])[sent:]

    def _read_answer(self, connection: socket.socket, write: Write) -> None:
        """WriteError if it is a refusal, which is certain to be the receiver's last word."""
        sequence, length = ANSWER.unpack(self._read(connection, ANSWER.size, write))
        if length:
            self._refused(self._read(connection, min(length, MAX_TEXT), write))
        if sequence != self._sequence:
            raise EOFError(f"it confirmed {sequence} frames of {self._sequence}")

    def _refused(self, text: bytes) -> NoReturn:
        raise WriteError(f"{self._peer}: {text.decode(errors='replace')}")

    def _read(self, connection: socket.socket, length: int, write: Write | None) -> bytes:
        while len(self._partial) < length:
            connection.settimeout(None if write is None else write.seconds_left())
            if not (more := connection.recv(length - len(self._partial))):
                raise EOFError
            self._partial += more
        content, self._partial = self._partial, b""
        return content

    def _wait_for_last_answer(self, connection: socket.socket, write: Write) -> None:
        """Sends nothing any more, and waits until the receiver says that it reads nothing any more: only then is it
        certain that no page is left between the two. It may never say so."""
        with contextlib.suppress(OSError, EOFError):
            connection.shutdown(socket.SHUT_WR)
            while True:
                _, length = ANSWER.unpack(self._read(connection, ANSWER.size, None))
                if length:
                    write.stopped.set_result(None)
                    return
