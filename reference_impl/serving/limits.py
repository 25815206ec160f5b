"""What a connection is given before there is a whole request, and after: time, bytes, and a place.

uvicorn waits for ever for a client that connects and sends nothing, half a header, or a byte now and then, and for one
that does not read its answer; and each of them holds a file descriptor. Here every wait for a client has an end:

    connected, or answered --headers--> a request --body--> read: the answer takes the time it takes, but a client that
    does not read it is left after `write` seconds. With too many open, the one that has sent nothing of what it owes
    for longest makes room.
"""

from __future__ import annotations

import json
import resource
from asyncio import TimerHandle, Transport
from dataclasses import dataclass
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from reference_impl.serving import answers

OTHER_FILES = 128  # descriptors that are not for connections: libraries, weights, the trace
PIPELINED = 8  # requests of a client that are read before their turn
FULL = "this server has no room for another connection: try again in a moment"


def _descriptors() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 16 if soft == resource.RLIM_INFINITY else soft


@dataclass(frozen=True)
class ConnectionLimits:
    """How long and for how much a server waits. headers: seconds until a request's headers have come, and without any
    more of its body; body: seconds until all of the body has come; write: seconds without reading.

    head_bytes: bytes that may come without completing a header block or adding to a body. connections: open at once;
    default: what the process's limit of open files leaves, at most 4096.
    """

    headers: float = 30.0
    body: float = 120.0
    write: float = 30.0
    head_bytes: int = 64 << 10
    connections: int | None = None

    @property
    def most(self) -> int:
        """Connections that may be open; each costs a file descriptor."""
        return max(16, min(4096, _descriptors() - OTHER_FILES)) if self.connections is None else self.connections


class _Parser(httptools.HttpRequestParser):
    """httptools' parser, which reads no body after an offer of another protocol, such as Java's client makes with its
    first request (`Upgrade: h2c`). A server may ignore the offer: the request is read again without it."""

    def __init__(self, protocol: LimitedProtocol):
        super().__init__(protocol)
        self._protocol = protocol

    def feed_data(self, data: Any) -> None:
        try:
            super().feed_data(data)
        except httptools.HttpParserUpgrade as stop:
            if self._protocol.scope["method"] == "CONNECT":
                raise httptools.HttpParserError("CONNECT is for proxies") from None
            self.feed_data(self._protocol.request_without_offer() + data[stop.args[0] :])


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's HTTP with limits. waiting: the connections of the server without a whole request, longest first."""

    def __init__(self, limits: ConnectionLimits, waiting: dict[LimitedProtocol, None], **given: Any):
        super().__init__(**given)
        self._limits, self._most, self._waiting = limits, limits.most, waiting
        self._timer: TimerHandle | None = None
        self._write_timer: TimerHandle | None = None
        self._num_bytes = 0  # since the last header block or piece of a body
        self._began = self._came = 0.0  # when a body began, and when its last piece came
        self._answered: RequestResponseCycle | None = None
        self.parser = _Parser(self)

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) <= self._most:
            self._limit()
        elif longest := next(iter(self._waiting), None):
            longest.end(503, FULL)
            self._limit()
        else:
            self.end(503, FULL, tell=True)

    def connection_lost(self, exc: Exception | None) -> None:
        self.pipeline.clear()
        super().connection_lost(exc)  # tells the newest request, which need not be the one that is answered
        if self._answered is not None and not self._answered.response_complete:
            self._answered.disconnected = True
            self._answered.message_event.set()
        self._forget()
        self.resume_writing()

    def data_received(self, data: bytes) -> None:
        self._num_bytes += len(data)
        super().data_received(data)
        if self._num_bytes > self._limits.head_bytes and not self.transport.is_closing():
            self.end(431, f"expected headers of at most {self._limits.head_bytes} bytes")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._num_bytes = max(1, self._num_bytes)  # it may begin in the packet in which the request before it ends

    def on_headers_complete(self) -> None:
        self._num_bytes = 0
        super().on_headers_complete()
        if 0 < len(self.pipeline) <= PIPELINED:  # only reading shows that a client has gone
            self.flow.resume_reading()
        self._limit()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answered = cycle
        if cycle.scope["http_version"] == "1.0":
            app = _without_chunks(app, cycle)
        super()._start_asgi_task(cycle, app)

    def _should_upgrade(self) -> bool:
        """True, so that uvicorn begins no answer to a request that offers an upgrade; `_Parser` reads it again."""
        return True

    def request_without_offer(self) -> bytes:
        """The request line and headers that have come, without `Upgrade`."""
        lines = [b"%b %b HTTP/1.1" % (self.scope["method"].encode(), self.url)]
        lines += [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    def on_body(self, body: bytes) -> None:
        self._num_bytes, self._came = 0, self.loop.time()
        if self in self._waiting:  # what comes is a sign of life: it is the last to make room
            self._waiting[self] = self._waiting.pop(self)
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._limit()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._limit()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(self._limits.write, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()

    def _forget(self) -> None:
        self._waiting.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _limit(self) -> None:
        """Starts the timer for what the client owes now."""
        self._forget()
        if self.pipeline:  # the next request is there; nothing is read until its turn comes
            return
        if self.cycle is None or self.cycle.response_complete:
            self._waiting[self] = None
            seconds = self._limits.headers
            self._timer = self.loop.call_later(seconds, self.end, 408, f"the headers did not come within {seconds:g} s")
        elif self.cycle.more_body:
            self._waiting[self] = None
            self._began = self._came = self.loop.time()
            self._wait_for_body()

    def _wait_for_body(self) -> None:
        """Waits until it is too late for the whole body, or for its next piece. A piece sets no timer of its own."""
        now, whole, pause = self.loop.time(), self._limits.body, self._limits.headers
        if now >= self._began + whole:
            self.end(408, f"the body did not come within {whole:g} s")
        elif now >= self._came + pause:
            self.end(408, f"nothing more of the body came within {pause:g} s")
        else:
            self._timer = self.loop.call_at(min(self._began + whole, self._came + pause), self._wait_for_body)

    def end(self, status: int, message: str, tell: bool = False) -> None:
        """Ends the connection, with the reason if a request has begun (or with `tell`) and nothing was answered yet."""
        self._forget()
        if self.transport.get_write_buffer_size():  # `close` would wait until the client reads, for ever
            self.transport.abort()
            return
        cycle = self.cycle
        between = cycle is None or cycle.response_complete
        in_body = cycle is not None and cycle.more_body and not cycle.response_started
        if in_body or (between and (self._num_bytes or tell)):
            kind = "server_error" if status >= 500 else "invalid_request_error"
            body = json.dumps(answers.error(message, kind)).encode()
            head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[status] + head + body)
        self.transport.close()


def _without_chunks(app: Any, cycle: RequestResponseCycle) -> Any:
    """HTTP/1.0 has no chunks: an answer whose length is not declared ends when the connection is closed.

    uvicorn sends chunks to all clients, and requires a declared length of an answer without them.
    """

    async def wrapped(scope: Any, receive: Any, send: Any) -> None:
        declared = True

        async def plain(message: Any) -> None:
            nonlocal declared
            if message["type"] == "http.response.start":
                declared = any(name.lower() == b"content-length" for name, _ in message["headers"])
                cycle.chunked_encoding = None if declared else False
            elif not declared:
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, plain)

    return wrapped
