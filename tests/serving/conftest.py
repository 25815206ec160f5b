"""Servers in threads of this process, on free ports, over the course model."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from reference_impl import LLM, course_model
from reference_impl.engine import Parts
from reference_impl.serving.app import ServerConfig
from reference_impl.serving.metrics import WatchedTrace
from reference_impl.serving.server import ModelServer


class Running:
    """A server that serves, and the engine behind it."""

    def __init__(self, server: ModelServer):
        self.server, self.llm, self.url = server, server.llm, server.url
        self.engine, self.runner = server.llm.engine, server._runner
        self._thread = threading.Thread(target=server.run)
        self._thread.start()

    def end(self) -> None:
        self.server.stop()
        self._thread.join(60)
        assert not self._thread.is_alive()

    def is_idle(self) -> bool:
        """Nothing runs, waits or holds a block."""
        return (
            not (self.engine.requests or self.runner.num_streams)
            and self.engine.kv.num_available == self.engine.num_blocks
        )


@pytest.fixture(scope="session")
def until() -> Callable[[Callable[[], Any], str], Any]:
    """until(condition, what): polls; the limit is only for what hangs."""

    def wait(condition: Callable[[], Any], what: str) -> Any:
        end = time.monotonic() + 120
        while not (found := condition()):
            assert time.monotonic() < end, f"waited in vain until {what}"
            time.sleep(0.01)
        return found

    return wait


@pytest.fixture(scope="module")
def serve(until: Any) -> Iterator[Callable[..., Running]]:
    """serve(ServerConfig fields as `server=dict`, parts=dict, **engine options): a server of its own."""
    started: list[Running] = []

    def make(server: dict[str, Any] | None = None, parts: dict[str, Any] | None = None, **options: Any) -> Running:
        everything = Parts(trace=WatchedTrace(20_000), **(parts or {}))
        options = {"kv_cache_bytes": 128 << 20} | options  # of every server; the default is twice that
        llm = LLM(course_model("draft"), dtype="float32", parts=everything, **options)
        running = Running(
            ModelServer(llm, ServerConfig("course", **(server or {})), "127.0.0.1", 0, shutdown_seconds=5)
        )
        started.append(running)
        until(lambda: running.runner.is_ready, "it is ready")
        return running

    yield make
    for running in started:
        running.end()


@pytest.fixture(scope="module")
def server(serve: Callable[..., Running]) -> Running:
    return serve()


@pytest.fixture(scope="module")
def serial() -> LLM:
    """The same model without a server: what it says to one prompt at a time is right."""
    return LLM(course_model("draft"), dtype="float32", kv_cache_bytes=128 << 20)
