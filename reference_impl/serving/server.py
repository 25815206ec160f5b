"""Starts the server and ends it: new requests are refused, and running ones get some seconds to finish."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import functools
import ipaddress
import logging
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from reference_impl.features.chat.prompts import ChatEncoder
from reference_impl.serving.app import ServerConfig, make_app
from reference_impl.serving.engines import make_engines
from reference_impl.serving.limits import LimitedProtocol
from reference_impl.serving.runner import EngineHost, Runner, Unavailable

logger = logging.getLogger("inferlab.serving")
TRACE_SECONDS = 30.0  # for the timeline at the end


class _Server(uvicorn.Server):
    """uvicorn, which waits on shutdown for open connections. The runner refuses new requests at once, and ends the
    streams that remain after `seconds`."""

    def __init__(self, config: uvicorn.Config, runner: Runner, seconds: float):
        super().__init__(config)
        self.runner, self.seconds = runner, seconds

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        if not self.runner.draining:
            self.runner.draining = True
            asyncio.get_running_loop().call_later(self.seconds, self.runner.fail_streams, "the server has shut down")

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handles signals in the event loop, where streams may be touched. Only the main thread gets signals."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop, numbers = asyncio.get_running_loop(), (signal.SIGINT, signal.SIGTERM)

        def handle(number: int, frame: FrameType | None) -> None:
            loop.call_soon_threadsafe(self.handle_exit, number, frame)

        before = [signal.signal(number, handle) for number in numbers]
        try:
            yield
        finally:
            for number, handler in zip(numbers, before, strict=True):
                signal.signal(number, handler)


class ModelServer:
    """A model behind a socket that is bound, so that its address is known before it serves.

    trace: at the end, a timeline for ui.perfetto.dev is written there.
    """

    def __init__(
        self,
        engine: EngineHost,
        config: ServerConfig,
        host: str,
        port: int,
        shutdown_seconds: float = 10.0,
        trace: Path | None = None,
    ):
        self.engine, self.host, self._trace = engine, host, trace
        self.failure: str | None = None  # after `run`: what went wrong
        self._socket = _bind(host, port)
        bound, self.port = self._socket.getsockname()[:2]
        if _is_loopback(bound) and not config.api_keys:
            config = dataclasses.replace(config, only_host=host)
        self._runner = Runner(engine, config.max_unfinished)
        app = make_app(self._runner, config)
        app.router.lifespan_context = self._lifespan
        settings = uvicorn.Config(
            app,
            log_level="warning",
            timeout_graceful_shutdown=int(shutdown_seconds) + 2,
            timeout_keep_alive=30,
            ws="none",
            # mypy knows of classes only
            http=functools.partial(LimitedProtocol, config.limits, {}),  # type: ignore[arg-type]
            backlog=2048,
        )
        self._server = _Server(settings, self._runner, shutdown_seconds)

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        await self._runner.begin()
        yield
        if self._trace is not None:
            await self._write_trace(self._trace)
        if self._runner.failure is not None:
            self.failure = f"the engine has failed: {self._runner.failure}"
        await self._runner.end()

    async def _write_trace(self, file: Path) -> None:
        try:
            await asyncio.wait_for(self._runner.ask("write_trace", str(file)), TRACE_SECONDS)
            print(f"\nwrote {file}; open it in ui.perfetto.dev", file=sys.stderr)
        except TimeoutError:
            self.failure = f"the timeline was not written within {TRACE_SECONDS:g} s"
        except (ValueError, Unavailable) as error:
            self.failure = f"the timeline could not be written: {error}"

    def run(self) -> None:
        """Serves until `stop`, or in the main thread SIGINT or SIGTERM, in its own event loop (uvloop's, if there)."""
        self._server.run(sockets=[self._socket])

    def stop(self) -> None:
        """Ends the server; may be called in any thread. Open connections get the time to finish."""
        self._server.should_exit = True

    def serve(self) -> None:
        """Prints the server's address, and runs."""
        print(f"{self.url}/v1 serves; {self.url}/status shows what the engine does; Ctrl-C ends it", flush=True)
        self.run()


def make(
    model: Path,
    host: str,
    port: int,
    *,
    name: str,
    api_keys: tuple[str, ...] = (),
    max_unfinished: int = 512,
    max_body_bytes: int = 4 << 20,
    shutdown_seconds: float = 10.0,
    trace: Path | None = None,
    tool_call_parser: str | None = None,
    chat_template: Path | None = None,
    **engine_options: Any,
) -> ModelServer:
    """Loads the model in one process or several. ValueError or OSError where model, options or address are wrong.

    chat_template: a file, for the folder's own. Other options: see ServerConfig, ModelServer, `make_engines`.
    """
    if not api_keys and not _is_loopback(host):
        logger.warning("any client that reaches %s can use this server: no API key was given", host)
    config = ServerConfig(name, api_keys, max_unfinished, max_body_bytes, tool_call_parser=tool_call_parser)
    prompts = ChatEncoder(model)
    if chat_template is not None:
        prompts.templates.take(chat_template)
    for broken in prompts.templates.broken():
        logger.warning("conversations will be refused: %s", broken)
    engine = make_engines(model, prompts, **engine_options)
    if engine.acceptance != "exact":
        logger.warning(
            "draft tokens are kept by %s acceptance, which is lossy: with a temperature texts are not distributed as "
            "the model's, nor those of their seeds", engine.acceptance,
        )  # fmt: skip
    return ModelServer(engine, config, host, port, shutdown_seconds, trace)


def _bind(host: str, port: int) -> socket.socket:
    try:
        [(family, *_), *_] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        bound = socket.socket(family, socket.SOCK_STREAM)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
        bound.listen(2048)  # connections wait until the model is ready
    except OSError as error:
        raise OSError(f"cannot listen on {host} port {port}: {_refused(error)}") from None
    return bound


def _refused(error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return "another program listens there. Stop it, or choose another port with --port"
    if error.errno in (errno.EACCES, errno.EPERM):
        return "no permission; ports below 1024 are the system's. Choose another with --port"
    if error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
        return "this machine has no such address. Choose one with --host: 127.0.0.1, or 0.0.0.0 for all"
    return f"{error.strerror or error}. Choose others with --host and --port"


def _is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"
