"""Whole messages over a stream socket: a JSON header and raw byte chunks.

    12 bytes: header length (u32), number of chunks (u32), zero (u32) | header: JSON | per chunk: length (u64), bytes

Shipped beside `codec.py` into the learner's process.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from .codec import MAX_BODY, CannotCross, Malformed

MAX_HEADER = 16 << 20  # bytes
MAX_CHUNKS = 4096
PATIENCE = 3.0

_PREFIX = struct.Struct(">III")
_LENGTH = struct.Struct(">Q")


@dataclass(frozen=True)
class Allowance:
    """How long the other side may take. deadline, last: time.monotonic() values; cpu: its processor time at the start.

    When the deadline passes, but the other process got less than `seconds` of processor time, because the machine is
    busy, the deadline moves, at most to `last`. A slow machine must not cost an honest submission its points.
    """

    seconds: float
    deadline: float
    last: float
    cpu: float | None


class Connection:
    """One end of a stream socket that carries whole messages.

    While `allowance` is not None, waiting longer than it allows raises TimeoutError. A closed or broken peer raises
    ConnectionError, nonsense raises Malformed. cpu_seconds() is the processor time of the other process, if known.
    """

    def __init__(self, sock: socket.socket, cpu_seconds: Callable[[], float | None] = lambda: None):
        self.sock = sock
        self.allowance: Allowance | None = None
        self._cpu_seconds = cpu_seconds

    def allow(self, seconds: float) -> None:
        """From now on the other side may take `seconds` of its processor time, and PATIENCE times as much in all."""
        now = time.monotonic()
        self.allowance = Allowance(seconds, now + seconds, now + PATIENCE * seconds, self._cpu_seconds())

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
        if self.allowance is None:
            self.sock.settimeout(None)
            return
        now, allowance = time.monotonic(), self.allowance
        if allowance.deadline <= now:
            cpu = self._cpu_seconds()
            left = 0.0 if cpu is None or allowance.cpu is None else allowance.seconds - (cpu - allowance.cpu)
            if left <= 0 or allowance.last <= now:
                raise TimeoutError
            allowance = self.allowance = replace(allowance, deadline=min(now + max(left, 0.05), allowance.last))
        self.sock.settimeout(max(allowance.deadline - now, 0.001))

    def _read(self, buffer: Any) -> Any:
        view = memoryview(buffer)
        while view.nbytes:
            self._set_timeout()
            try:
                count = self.sock.recv_into(view)
            except TimeoutError:
                continue  # `_set_timeout` decides
            if count == 0:
                raise ConnectionResetError("the other process has closed the connection")
            view = view[count:]
        return buffer
