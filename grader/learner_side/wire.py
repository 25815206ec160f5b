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

import numpy
import torch

from .codec import MAX_BODY, CannotCross, Malformed

MAX_HEADER = 16 << 20  # bytes
MAX_VALUES = 1 << 20  # values in one header, about: each costs some hundred bytes of memory when it is read
MAX_CHUNKS = 4096
PATIENCE = 3.0

_PREFIX = struct.Struct(">III")
_LENGTH = struct.Struct(">Q")


@dataclass(frozen=True)
class Allowance:
    """How long the other side may take. deadline, last: time.monotonic() values; cpu: its processor time at the start;
    waited: how long it had waited for a processor by then.

    When the deadline passes, but the other process got less than `seconds` of processor time, because the machine is
    busy, the deadline moves, at most to `last`, which moves on while the process waits for a processor. Neither a slow
    machine nor a neighbour that keeps all of it busy must cost an honest submission its points.
    """

    seconds: float
    deadline: float
    last: float
    cpu: float | None
    waited: float = 0.0


class Connection:
    """One end of a stream socket that carries whole messages.

    While `allowance` is not None, waiting longer than it allows raises TimeoutError. A closed or broken peer raises
    ConnectionError, nonsense raises Malformed. cpu_seconds() is the processor time of the other process, if known,
    waited_seconds() the time it has waited for a processor.
    """

    def __init__(
        self,
        sock: socket.socket,
        cpu_seconds: Callable[[], float | None] = lambda: None,
        waited_seconds: Callable[[], float] = lambda: 0.0,
    ):
        self.sock = sock
        self.allowance: Allowance | None = None
        self._cpu_seconds, self._waited_seconds = cpu_seconds, waited_seconds

    def allow(self, seconds: float) -> None:
        """Gives the other side `seconds` of processor time from now on, and PATIENCE times as much besides for
        waiting."""
        now = time.monotonic()
        last = now + PATIENCE * seconds
        self.allowance = Allowance(seconds, now + seconds, last, self._cpu_seconds(), self._waited_seconds())

    def send(self, header: dict[str, Any], chunks: list[Any]) -> None:
        """Send one message; `chunks` are bytes-like. Raises CannotCross when it is over the limits."""
        text = json.dumps(header, separators=(",", ":")).encode("ascii")
        body = sum(memoryview(chunk).nbytes for chunk in chunks)
        if len(text) > MAX_HEADER or _num_values(text) > MAX_VALUES or body > MAX_BODY or len(chunks) > MAX_CHUNKS:
            raise CannotCross(
                f"more than {MAX_BODY >> 20} MiB of tensors, {MAX_HEADER >> 20} MiB of other values, or "
                f"{MAX_VALUES} of them cannot cross in one call; return tensors in place of long lists"
            )
        self._write(_PREFIX.pack(len(text), len(chunks), 0) + text)
        for chunk in chunks:
            self._write(_LENGTH.pack(memoryview(chunk).nbytes))
            self._write(chunk)

    def receive(self, max_header: int = MAX_HEADER, max_body: int = MAX_BODY) -> tuple[Any, list[torch.Tensor], int]:
        """The next message: its header, its chunks as uint8 tensors that own their memory, and the header's length."""
        header_length, num_chunks, reserved = _PREFIX.unpack(self._read(bytearray(_PREFIX.size)))
        if header_length > max_header or num_chunks > MAX_CHUNKS or reserved:
            raise Malformed("not a message, or over the limits")
        header = _parse(self._read(bytearray(header_length)))
        chunks, left = [], max_body
        for _ in range(num_chunks):
            (length,) = _LENGTH.unpack(self._read(bytearray(_LENGTH.size)))
            left -= length
            if left < 0:
                raise Malformed(f"messages of more than {MAX_BODY >> 20} MiB")
            chunk = numpy.empty(length, dtype=numpy.uint8)  # torch.empty would fill it first
            self._read(chunk)
            chunks.append(torch.from_numpy(chunk))
        return header, chunks, header_length

    def _set_timeout(self) -> None:
        if self.allowance is None:
            self.sock.settimeout(None)
            return
        now, allowance = time.monotonic(), self.allowance
        if allowance.deadline <= now:
            cpu = self._cpu_seconds()
            left = 0.0 if cpu is None or allowance.cpu is None else allowance.seconds - (cpu - allowance.cpu)
            last = allowance.last + self._waited_seconds() - allowance.waited
            if left <= 0 or last <= now:
                raise TimeoutError
            allowance = self.allowance = replace(allowance, deadline=min(now + max(left, 0.05), last))
        self.sock.settimeout(max(allowance.deadline - now, 0.001))

    def _write(self, data: Any) -> None:
        view = memoryview(data).cast("B")
        while view.nbytes:
            self._set_timeout()
            try:
                count = self.sock.send(view)
            except TimeoutError:
                continue  # `_set_timeout` decides
            view = view[count:]

    def _read(self, buffer: Any) -> Any:
        view = memoryview(buffer).cast("B")
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


def _num_values(text: bytes | bytearray) -> int:
    """A bound for the number of values in a header's JSON, never too small; counted before anything is built from
    it."""
    return text.count(b",") + text.count(b"[") + text.count(b"{")


def _parse(text: bytearray) -> dict[str, Any]:
    def refuse(constant: str) -> None:
        raise ValueError(constant)

    if _num_values(text) > MAX_VALUES:
        raise Malformed(f"more than {MAX_VALUES} values in one message")
    try:
        header = json.loads(text.decode("ascii"), parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"the header is not JSON: {type(error).__name__}") from None
    if not isinstance(header, dict):
        raise Malformed("the header is not an object")
    return header
