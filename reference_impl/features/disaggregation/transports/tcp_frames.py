"""How pages travel over TCP: what both ends know.

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
import socket
import struct
import time

from reference_impl.features.disaggregation.authentication import LENGTH, Handshake, PeerError, Session, step_length

PURPOSE = "pages"
FRAME = struct.Struct("<QQII")  # sequence, length, slot, last of its write
ANSWER = struct.Struct("<QI")  # sequence, length of the text
MAX_TEXT = 2000  # bytes


def shut(connection: socket.socket) -> None:
    """Wakes every thread that waits for it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def shake_hands(connection: socket.socket, steps: Handshake, address: str, until: float) -> Session:
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


def fill(connection: socket.socket, view: memoryview) -> int:
    """Reads into all of the view. Returns how many bytes came, fewer only if the connection has ended."""
    got = 0
    while got < len(view):  # a signal can end a call early
        if not (more := connection.recv_into(view[got:], flags=socket.MSG_WAITALL)):
            break
        got += more
    return got
