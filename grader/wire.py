"""Whole messages over a stream socket: a JSON header and raw byte chunks.

    12 bytes: header length (u32), number of chunks (u32), zero (u32) | header: JSON | per chunk: length (u64), bytes

Shipped beside `codec.py` into the learner's process.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from typing import Any

import torch

from .codec import MAX_BODY, CannotCross, Malformed

MAX_HEADER = 16 << 20  # bytes
MAX_CHUNKS = 4096

_PREFIX = struct.Struct(">III")
_LENGTH = struct.Struct(">Q")


class Connection:
    """One end of a stream socket that carries whole messages.

    `deadline` is a time.monotonic() value or None; passing it raises TimeoutError. A closed or broken peer raises
    ConnectionError, nonsense raises Malformed.
    """

    def __init__(self, sock: socket.socket):
        self.sock = sock
        self.deadline: float | None = None

    def send(self, header: dict[str, Any], chunks: list[Any]) -> None:
        """Send one message; `chunks` are bytes-like. Raises CannotCross when it is over the limits."""
        text = json.dumps(header, separators=(",", ":")).encode("ascii")
        body = sum(memoryview(chunk).nbytes for chunk in chunks)
        if len(text) > MAX_HEADER or body > MAX_BODY or len(chunks) > MAX_CHUNKS:
            raise CannotCross(f"more than {MAX_BODY >> 20} MiB of tensors, or {MAX_HEADER >> 20} MiB of other values")
        self._set_timeout()
        self.sock.sendall(_PREFIX.pack(len(text), len(chunks), 0) + text)
        for chunk in chunks:
            self.sock.sendall(_LENGTH.pack(memoryview(chunk).nbytes))
            self.sock.sendall(memoryview(chunk).cast("B"))

    def receive(self) -> tuple[dict[str, Any], list[torch.Tensor]]:
        """The next message: its header and its chunks as uint8 tensors that own their memory."""
        header_length, num_chunks, reserved = _PREFIX.unpack(self._read(bytearray(_PREFIX.size)))
        if header_length > MAX_HEADER or num_chunks > MAX_CHUNKS or reserved:
            raise Malformed("not a message, or over the limits")
        try:
            header = json.loads(self._read(bytearray(header_length)))
        except (ValueError, RecursionError) as error:
            raise Malformed(f"the header is not JSON: {type(error).__name__}") from None
        if not isinstance(header, dict):
            raise Malformed("the header is not an object")
        chunks, left = [], MAX_BODY
        for _ in range(num_chunks):
            (length,) = _LENGTH.unpack(self._read(bytearray(_LENGTH.size)))
            left -= length
            if left < 0:
                raise Malformed(f"a message of more than {MAX_BODY >> 20} MiB")
            chunk = torch.empty(length, dtype=torch.uint8)
            self._read(chunk.numpy())
            chunks.append(chunk)
        return header, chunks

    def _set_timeout(self) -> None:
        if self.deadline is None:
            self.sock.settimeout(None)
            return
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self.sock.settimeout(left)

    def _read(self, buffer: Any) -> Any:
        view = memoryview(buffer)
        while view.nbytes:
            self._set_timeout()
            count = self.sock.recv_into(view)
            if count == 0:
                raise ConnectionResetError("the other process has closed the connection")
            view = view[count:]
        return buffer
