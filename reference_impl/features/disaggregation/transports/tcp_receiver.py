"""The receiver's end of pages over TCP: see `tcp_frames.py`. One thread accepts, and each connection has its own."""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import socket
import threading
import time

import numpy as np

from reference_impl.features.disaggregation.authentication import PeerError, Session, as_second
from reference_impl.features.disaggregation.transports.pages import Shape, Slots
from reference_impl.features.disaggregation.transports.tcp_frames import (
    ANSWER,
    FRAME,
    MAX_TEXT,
    PURPOSE,
    fill,
    shake_hands,
    shut,
)

logger = logging.getLogger("inferlab.disaggregation")

_STRANGER_SECONDS = 10.0  # for the handshake
_MAX_STRANGERS = 64  # connections at a time that have not proved the key
_LAST_SECONDS = 1.0  # for which a receiver that refused a frame waits until the writer has read why


class Shared:
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
            shut(self._current[0])
            self._current[1].join()
        self._current = None


class Listener:
    """Accepts connections, each of which has a thread. shared: memories by token."""

    def __init__(self, owner: str, key: bytes, host: str, port: int):
        self._owner, self._key = owner, key
        self.shared: dict[str, Shared] = {}
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=64)
        self._socket.settimeout(0.5)  # where shutting it down does not wake who accepts
        self.port: int = self._socket.getsockname()[1]
        self._closing = False
        self._strangers = threading.BoundedSemaphore(_MAX_STRANGERS)
        self._connections: dict[threading.Thread, socket.socket] = {}
        self._thread = threading.Thread(target=self._accept, name=f"pages for {owner}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing = True
        shut(self._socket)
        self._thread.join()
        self._socket.close()
        for thread, connection in list(self._connections.items()):
            shut(connection)
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
            if not self._strangers.acquire(blocking=False):
                logger.warning("refused a connection for pages: %d others have not proved the key yet", _MAX_STRANGERS)
                connection.close()
                continue
            thread = threading.Thread(target=self._serve, args=(connection, text), name=f"pages of {text}", daemon=True)
            self._connections[thread] = connection
            thread.start()

    def _meet(self, connection: socket.socket, address: str) -> Session:
        try:
            steps = as_second(self._key, PURPOSE, self._owner, address)
            return shake_hands(connection, steps, address, time.monotonic() + _STRANGER_SECONDS)
        finally:
            self._strangers.release()

    def _serve(self, connection: socket.socket, address: str) -> None:
        with connection:
            try:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                session = self._meet(connection, address)
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


def _receive(connection: socket.socket, shared: Shared, writer: str) -> None:
    """Frames into slots, until the connection ends or a frame is refused."""
    header, expected = bytearray(FRAME.size), 0
    while True:
        got = fill(connection, memoryview(header))
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
            if fill(connection, page) < length:
                _refuse(connection, expected, f"the connection ended in the page for slot {slot}")
                return
        expected += 1
        if last:
            connection.sendall(ANSWER.pack(expected, 0))


def _refuse(connection: socket.socket, sequence: int, text: str) -> None:
    """The last answer; what still comes is thrown away until the writer has read it and ends the connection."""
    content = text.encode()[:MAX_TEXT]
    until = time.monotonic() + _LAST_SECONDS
    connection.settimeout(_LAST_SECONDS)
    with contextlib.suppress(OSError):
        connection.sendall(ANSWER.pack(sequence, len(content)) + content)
        connection.shutdown(socket.SHUT_WR)
        while time.monotonic() < until and connection.recv(1 << 16):
            pass
