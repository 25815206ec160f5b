"""A server for the load generator's tests: it does what real ones do to their clients. It delays, cuts, refuses, and
splits bytes anywhere."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Call:
    """One request, and the means to answer it."""

    method: str
    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    writer: asyncio.StreamWriter
    number: int  # of the POSTs, from 0

    async def head(self, status: int = 200, kind: str = "text/event-stream", more: str = "") -> None:
        """Starts an answer in HTTP chunks."""
        lines = f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ntransfer-encoding: chunked\r\n{more}\r\n"
        await self._write(lines.encode())

    async def chunk(self, data: bytes) -> None:
        await self._write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    async def event(self, content: dict[str, Any] | str) -> None:
        text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
        await self.chunk(f"data: {text}\n\n".encode())

    async def token(self, text: str = "x", finish_reason: str | None = None) -> None:
        await self.event({"choices": [{"index": 0, "text": text, "finish_reason": finish_reason}]})

    async def usage(self, prompt: int, completion: int) -> None:
        await self.event({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion}})

    async def end(self) -> None:
        await self._write(b"0\r\n\r\n")

    async def whole(self, status: int, text: str, kind: str = "application/json", more: str = "") -> None:
        data = text.encode()
        head = f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {len(data)}\r\n{more}\r\n"
        await self._write(head.encode() + data)

    async def answer(self, num_tokens: int | None = None) -> None:
        """As a good server does."""
        num = self.body["max_tokens"] if num_tokens is None else num_tokens
        await self.head()
        for i in range(num):
            await self.token(finish_reason="length" if i == num - 1 else None)
        await self.usage(prompt_length(self.body), num)
        await self.event("[DONE]")
        await self.end()

    async def _write(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    def cut(self) -> None:
        """As when the process is killed: the end comes in the middle of an answer, after what was written."""
        self.writer.transport.abort()


def prompt_length(body: dict[str, Any]) -> int:
    prompt = body["prompt"] if "prompt" in body else body["messages"][0]["content"]
    return len(prompt.split()) if isinstance(prompt, str) else len(prompt)


Script = Callable[[Call], Awaitable[None]]


@dataclass
class FakeServer:
    """script: answers every POST. GET /v1/models names one model. locked: only to whoever has this key."""

    script: Script = Call.answer
    locked: str | None = None
    url: str = ""
    posts: list[Call] = field(default_factory=list)
    num_connections: int = 0

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while line := await reader.readline():
                method, path, _ = line.decode().split()
                headers = {}
                while (text := (await reader.readline()).decode().strip()) != "":
                    name, _, value = text.partition(":")
                    headers[name.lower()] = value.strip()
                data = await reader.readexactly(int(headers.get("content-length", 0)))
                call = Call(method, path, headers, json.loads(data or b"{}"), writer, len(self.posts))
                if method == "GET" and self.locked and headers.get("authorization") != f"Bearer {self.locked}":
                    await call.whole(401, "Incorrect API key provided")
                    continue
                if method == "GET":
                    await call.whole(200, json.dumps({"object": "list", "data": [{"id": "fake-model"}]}))
                    continue
                self.posts.append(call)
                await self.script(call)
                if writer.transport.is_closing():
                    return
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()


@contextmanager
def running(script: Script = Call.answer, locked: str | None = None) -> Iterator[FakeServer]:
    """The server in a thread with an event loop of its own, so that the client's may be started and ended."""
    fake, ready, stop = FakeServer(script, locked), threading.Event(), asyncio.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    async def main() -> None:
        server = await asyncio.start_server(fake._serve, "127.0.0.1", 0)
        fake.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        loops.append(asyncio.get_running_loop())
        ready.set()
        await stop.wait()
        server.close()

    thread = threading.Thread(target=asyncio.run, args=(main(),), daemon=True)
    thread.start()
    assert ready.wait(600)
    try:
        yield fake
    finally:
        loops[0].call_soon_threadsafe(stop.set)
        thread.join(600)
        assert not thread.is_alive()


@contextmanager
def nobody() -> Iterator[FakeServer]:
    """An address at which nothing listens. It stays bound: a port that was closed may be another's next."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield FakeServer(url=f"http://127.0.0.1:{held.getsockname()[1]}")


# --- scripts ----------------------------------------------------------------------------------------------------------


async def overload(call: Call) -> None:
    await call.whole(429, '{"error": {"message": "come back later"}}', more="retry-after: 7\r\n")


async def broken(call: Call) -> None:
    await call.whole(500, "Traceback", kind="text/plain")


async def cut_off(call: Call) -> None:
    await call.head()
    await call.token()
    call.cut()
