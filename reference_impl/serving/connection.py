"""One HTTP answer, which ends when the client goes; and what is checked before a request's body is read."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
from collections.abc import Callable, Coroutine
from typing import Any
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class Answer(Response):
    """Runs `respond(send)` while it watches whether the client is still there; `finally_` is called in any case."""

    def __init__(self, respond: Callable[[Send], Coroutine[Any, Any, None]], finally_: Callable[[], None]):
        super().__init__()
        self._respond, self._finally = respond, finally_

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.create_task(self._respond(send))
        watch = asyncio.create_task(_until_gone(receive))
        try:
            await asyncio.wait((work, watch), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        except OSError:  # the client left while we wrote
            pass
        finally:
            self._finally()
            for task in (work, watch):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await task


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_json(send: Send, content: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
    response = JSONResponse(content, status, headers)
    await send({"type": "http.response.start", "status": status, "headers": response.raw_headers})
    await send({"type": "http.response.body", "body": response.body})


EVENTS: Message = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")],
}


class BodyLimit:
    """ASGI middleware that reads the whole body first and refuses one that is too long. Where none comes, see
    limits.py.

    stop: called with a request before its body is read; if it returns an answer, that is sent.
    """

    def __init__(
        self,
        app: ASGIApp,
        max_bytes: int,
        refuse: Callable[[int, str], Response],
        stop: Callable[[Request], Response | None],
    ):
        self.app, self.max_bytes, self.refuse, self.stop = app, max_bytes, refuse, stop

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if (stopped := self.stop(Request(scope))) is not None:
            await stopped(scope, receive, send)
            return
        declared = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        too_long = self.refuse(413, f"the body is longer than {self.max_bytes} bytes")
        if declared.isdigit() and int(declared) > self.max_bytes:
            await too_long(scope, receive, send)
            return
        body, more = bytearray(), True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > self.max_bytes:
                await too_long(scope, receive, send)
                return
        whole: Message | None = {"type": "http.request", "body": bytes(body), "more_body": False}

        async def again() -> Message:
            nonlocal whole
            if whole is None:
                return await receive()
            message, whole = whole, None
            return message

        await self.app(scope, again, send)


def is_addressed_to(own: str, host: str) -> bool:
    """Whether a Host header names this machine: by an IP address, as localhost, or as `own`.

    This guards against DNS rebinding: to a browser, a page whose name turns into 127.0.0.1 has the origin of the server
    that listens there, and may read it. Such a page has a name of its own; it cannot have an address or be localhost.
    """
    try:
        name = urlsplit(f"//{host}").hostname or ""
        if name not in ("localhost", own.lower()):
            ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
