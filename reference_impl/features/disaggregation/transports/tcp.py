"""Pages over TCP, between any two machines. The receiver listens; each writer has one connection for each memory.

A connection begins with the handshake of `authentication.py`, in which the writer names the memory. Frames follow:

    sequence u64, length u64, slot u32, last u32, then `length` bytes

and the receiver checks a frame's numbers before it reads the bytes, straight into the slot. After the last frame of a
write it answers that all is there:

    sequence u64 of the next frame, length u32 = 0

An answer with a text (length > 0) is the receiver's last: why it reads no more. Only that says that nothing of a write
that failed is on its way any longer. An answer that never comes is what the deadline is for. Nothing is encrypted.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import select
import socket
import struct
import threading
import time
from concurrent.futures import Future
from typing import NoReturn

import numpy as np

from reference_impl.features.disaggregation.authentication import (
    LENGTH,
    Handshake,
    PeerError,
    Session,
    as_first,
    as_second,
    check_address,
    step_length,
)
from reference_impl.features.disaggregation.transports.interface import Link, PageMemory, WriteError, WriteTimeout
from reference_impl.features.disaggregation.transports.pages import (
    Description,
    Pages,
    Shape,
    Slots,
    Write,
    Writer,
    describe,
)

logger = logging.getLogger("inferlab.disaggregation")

PURPOSE = "pages"
FRAME = struct.Struct("<QQII")  # sequence, length, slot, last of its write
ANSWER = struct.Struct("<QI")  # sequence, length of the text
_MAX_TEXT = 2000  # bytes
_AT_ONCE = 32  # pages in one call of the system
_STRANGER_SECONDS = 10.0  # for the handshake
_LAST_SECONDS = 1.0  # for which a receiver that refused a frame waits until the writer has read why


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
        self._listener: _Listener | None = None
        self._shared: dict[str, _Shared] = {}
        self._links = set[_Link]()

    def share(self, peer: str, num_slots: int, slot_bytes: int) -> tuple[PageMemory, bytes]:
        shape = Shape(num_slots, slot_bytes)
        with self._lock:
            if peer in self._shared:
                raise ValueError(f"{peer} has a memory already: cut it off before it gets another")
            self._listener = self._listener or _Listener(self.owner, self._key, self._host, self._port)
            shared = self._shared[peer] = _Shared(shape, peer)
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


class _Shared:
    """The receiver's end of a memory: at most one connection at a time writes into it."""

    def __init__(self, shape: Shape, peer: str):
        self.peer, self.shape = peer, shape
        self.token = os.urandom(16).hex()
        self.slots = Slots(shape, np.frombuffer(mmap.mmap(-1, shape.num_bytes), np.uint8), peer)
        self._lock = threading.Lock()
        self._over = False
        self._current: tuple[socket.socket, threading.Thread] | None = None

    def take(self, connection: socket.socket) -> None:
        """The calling thread receives from now on; a connection before this one has ended when it returns."""
        with self._lock:
            self._end_current()
            if self._over:
                raise PeerError(f"{self.peer} was cut off")
            self._current = connection, threading.current_thread()

    def end(self) -> None:
        with self._lock:
            self._over = True
            self._end_current()
            self.slots.end()

    def _end_current(self) -> None:
        if self._current is not None:
            _shut(self._current[0])
            self._current[1].join()
        self._current = None


class _Listener:
    """Accepts connections, each of which has a thread. shared: memories by token."""

    def __init__(self, owner: str, key: bytes, host: str, port: int):
        self._owner, self._key = owner, key
        self.shared: dict[str, _Shared] = {}
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=64)
        self._socket.settimeout(0.5)  # where shutting it down does not wake who accepts
        self.port: int = self._socket.getsockname()[1]
        self._closing = False
        self._connections: dict[threading.Thread, socket.socket] = {}
        self._thread = threading.Thread(target=self._accept, name=f"pages for {owner}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing = True
        _shut(self._socket)
        self._thread.join()
        self._socket.close()
        for thread, connection in list(self._connections.items()):
            _shut(connection)
            thread.join()

    def _accept(self) -> None:
        while not self._closing:
            try:
                connection, address = self._socket.accept()
            except OSError:  # also of a connection that was gone before we came; TimeoutError
                if not self._closing:
                    time.sleep(0.01)  # do not spin, should files have run out
                continue
            text = f"{address[0]}:{address[1]}"
            thread = threading.Thread(target=self._serve, args=(connection, text), name=f"pages of {text}", daemon=True)
            self._connections[thread] = connection
            thread.start()

    def _serve(self, connection: socket.socket, address: str) -> None:
        with connection:
            try:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                steps = as_second(self._key, PURPOSE, self._owner, address)
                session = _shake_hands(connection, steps, address, time.monotonic() + _STRANGER_SECONDS)
                shared = self.shared.get(session.peer)
                if shared is None:
                    _refuse(connection, 0, "this memory is not shared: cut off, or of a process before this one")
                    return
                shared.take(connection)
                connection.settimeout(None)
                _receive(connection, shared, f"{shared.peer} at {address}")
            except OSError as error:
                if not self._closing:
                    logger.warning("a connection for pages ended: %s: %s", address, error)
            finally:
                self._connections.pop(threading.current_thread(), None)


def _receive(connection: socket.socket, shared: _Shared, writer: str) -> None:
    """Frames into slots, until the connection ends or a frame is refused."""
    header, expected = bytearray(FRAME.size), 0
    while True:
        got = _fill(connection, memoryview(header))
        if got < FRAME.size:
            _refuse(connection, expected, f"the connection ended {'in a header' if got else 'between pages'}")
            return
        sequence, length, slot, last = FRAME.unpack(header)
        try:
            if sequence != expected or last > 1:
                raise ValueError(f"expected frame {expected}, got frame {sequence} with {last} for its last field")
            page = shared.slots.part(slot, length)
        except ValueError as error:
            logger.warning("a page was refused: %s: %s", writer, error)
            _refuse(connection, expected, str(error))
            return
        with page:
            if _fill(connection, page) < length:
                _refuse(connection, expected, f"the connection ended in the page for slot {slot}")
                return
        expected += 1
        if last:
            connection.sendall(ANSWER.pack(expected, 0))


def _fill(connection: socket.socket, view: memoryview) -> int:
    """Reads into all of the view. Returns how many bytes came, fewer only if the connection has ended."""
    got = 0
    while got < len(view):  # a signal can end a call early
        if not (more := connection.recv_into(view[got:], flags=socket.MSG_WAITALL)):
            break
        got += more
    return got


def _refuse(connection: socket.socket, sequence: int, text: str) -> None:
    """The last answer; what still comes is thrown away until the writer has read it and ends the connection."""
    content = text.encode()[:_MAX_TEXT]
    until = time.monotonic() + _LAST_SECONDS
    connection.settimeout(_LAST_SECONDS)
    with contextlib.suppress(OSError):
        connection.sendall(ANSWER.pack(sequence, len(content)) + content)
        connection.shutdown(socket.SHUT_WR)
        while time.monotonic() < until and connection.recv(1 << 16):
            pass


class _Link:
    """The writer's end. The thread of its Writer connects, sends and waits for answers."""

    def __init__(self, description: Description, key: bytes):
        more = description.more
        self._owner, self._shape, self._key = description.owner, description.shape, key
        self._address, self._memory = (more["host"], more["port"]), more["memory"]
        self._peer = f"{description.owner} at {more['host']}:{more['port']}"
        self._socket: socket.socket | None = None
        self._sequence = 0
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
            _shut(self._socket)

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
        try:
            connection = socket.create_connection(self._address, timeout=write.seconds_left())
        except TimeoutError:
            raise
        except OSError as error:
            raise WriteError(f"{self._peer}: no connection for pages: {error}") from error
        self._socket = connection  # for _interrupt
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            steps = as_first(self._key, PURPOSE, self._memory, self._peer)
            _shake_hands(connection, steps, self._peer, write.deadline)
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
            self._refused(self._read(connection, min(length, _MAX_TEXT), write))
        if sequence != self._sequence:
            raise EOFError(f"it confirmed {sequence} frames of {self._sequence}")

    def _refused(self, text: bytes) -> NoReturn:
        raise WriteError(f"{self._peer}: {text.decode(errors='replace')}")

    def _read(self, connection: socket.socket, length: int, write: Write | None) -> bytes:
        content = b""
        while len(content) < length:
            connection.settimeout(None if write is None else write.seconds_left())
            if not (more := connection.recv(length - len(content))):
                raise EOFError
            content += more
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


def _shut(connection: socket.socket) -> None:
    """Wakes every thread that waits for it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _shake_hands(connection: socket.socket, steps: Handshake, address: str, until: float) -> Session:
    """until: seconds of `time.monotonic`; then a TimeoutError."""
    try:
        connection.sendall(next(steps))
        while True:
            length = step_length(_exactly(connection, LENGTH.size, address, until), address)
            connection.sendall(steps.send(_exactly(connection, length, address, until)))
    except StopIteration as done:
        session: Session = done.value
    connection.sendall(session.last)
    return session


def _exactly(connection: socket.socket, length: int, address: str, until: float) -> bytes:
    content = b""
    while len(content) < length:
        if (left := until - time.monotonic()) <= 0:
            raise TimeoutError(f"{address}: did not prove the join key in time")
        connection.settimeout(left)
        if not (more := connection.recv(length - len(content))):
            raise PeerError(f"{address}: ended the connection in the handshake: is its join key another one?")
        content += more
    return content
