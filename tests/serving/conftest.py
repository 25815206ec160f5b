"""Servers in threads of this process, on free ports, over the course model; the engine beside them, or in a process."""

from __future__ import annotations

import asyncio
import functools
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from reference_impl import LLM, course_model
from reference_impl.assembly.parts import Parts
from reference_impl.features.chat.prompts import ChatEncoder
from reference_impl.serving import process as process_module
from reference_impl.serving.app import ServerConfig
from reference_impl.serving.metrics import WatchedTrace
from reference_impl.serving.process import EngineProcess
from reference_impl.serving.server import ModelServer
from reference_impl.serving.worker import load
from tests.serving import programs
from tests.serving.engine_thread import EngineThread
from tests.warm import SHARED, Warm


class Running:
    """A server that serves. host: what runs its engine. llm, engine: where that is a thread of this process."""

    def __init__(self, server: ModelServer):
        self.server, self.url, self.runner = server, server.url, server._runner
        self.host: Any = server.engine
        self.in_thread = isinstance(server.engine, EngineThread)
        if isinstance(server.engine, EngineThread):
            self.llm, self.engine = server.engine.llm, server.engine.llm.engine
        begin = self.runner.begin

        async def kept() -> None:
            self._loop = asyncio.get_running_loop()
            await begin()

        self.runner.begin = kept  # type: ignore[method-assign]
        self._thread = threading.Thread(target=server.run)
        self._thread.start()

    def end(self) -> None:
        self.server.stop()
        self._thread.join(600)
        assert not self._thread.is_alive()

    def in_loop(self, look: Callable[[], Any]) -> Any:
        """look(), called in the event loop's thread between two callbacks: what that thread changes is whole there, and
        no container changes while it is read."""

        async def called() -> Any:
            return look()

        return asyncio.run_coroutine_threadsafe(called(), self._loop).result(600)

    def is_idle(self) -> bool:
        """Nothing runs, waits or holds a block."""
        if self.runner.num_streams:
            return False
        if self.in_thread:
            if self.engine.requests or self.engine.kv.num_available != self.engine.num_blocks:
                return False
            # What this thread sees may be half of a command or a step, which the trace does not have yet: a question is
            # answered when that has ended.
            asyncio.run_coroutine_threadsafe(self.runner.ask("status", 1, 1.0, 1.0), self._loop).result(600)
            return True
        status = httpx.get(f"{self.url}/status.json", timeout=600).json()
        return not status["num_requests"] and status["blocks_available"] == status["blocks"]


@pytest.fixture(scope="session")
def until() -> Callable[[Callable[[], Any], str], Any]:
    """until(condition, what): polls; the limit is only for what hangs."""

    def wait(condition: Callable[[], Any], what: str) -> Any:
        end = time.monotonic() + 600
        while not (found := condition()):
            assert time.monotonic() < end, f"waited in vain until {what}"
            time.sleep(0.01)
        return found

    return wait


@pytest.fixture(scope="session")
def imported() -> Iterator[Warm]:
    """A Python that has imported what engines and servers need of others: the one that a run of tests shares, or one of
    our own."""
    address = os.environ.get(SHARED)
    made = Warm(address=address) if address else Warm(*programs.MODULES)
    yield made
    made.close()


@pytest.fixture
def warm_engines(imported: Warm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that get a process during this test are forked: see `tests/serving/programs.py`."""
    monkeypatch.setattr(process_module, "start_beside", programs.start_beside(programs.engines(imported)))


@pytest.fixture(scope="session")
def inferlabs(imported: Warm) -> Callable[[], Any]:
    """`with inferlabs() as inferlab`: as the fixture of that name, and they end with the block."""
    return functools.partial(programs.running, imported)


@pytest.fixture
def inferlab(imported: Warm) -> Iterator[Callable[..., programs.Program]]:
    """inferlab(*options): starts `inferlab serve`, a `programs.Program`."""
    with programs.running(imported) as start:
        yield start


@pytest.fixture(scope="module")
def serve(until: Any, request: pytest.FixtureRequest) -> Iterator[Callable[..., Running]]:
    """serve(ServerConfig fields as `server=dict`, parts=dict, **engine options): a server of its own.

    process: its engine is in a process of its own, as that of `inferlab serve`; cold: and started as it starts it.
    folder: of another model than the course draft.
    """
    started: list[Running] = []

    def make(
        server: dict[str, Any] | None = None,
        parts: dict[str, Any] | None = None,
        process: bool = False,
        cold: bool = False,
        folder: Path | None = None,
        **options: Any,
    ) -> Running:
        if "num_blocks" not in options:
            options = {"kv_cache_bytes": 128 << 20} | options  # of every server; the default is twice that
        folder = folder or course_model("draft")
        host: Any
        if process:
            assert parts is None, "they would have to be pickled"
            with pytest.MonkeyPatch.context() as patch:
                if not cold:
                    command = programs.engines(request.getfixturevalue("imported"))
                    patch.setattr(process_module, "start_beside", programs.start_beside(command))
                host = EngineProcess(functools.partial(load, folder, "float32", **options), ChatEncoder(folder))
        else:
            everything = Parts(trace=WatchedTrace(20_000), **(parts or {}))
            host = EngineThread(LLM(folder, dtype="float32", parts=everything, **options))
        running = Running(
            ModelServer(host, ServerConfig("course", **(server or {})), "127.0.0.1", 0, shutdown_seconds=5)
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


@pytest.fixture(params=[False, True], ids=["thread", "process"])
def process(request: pytest.FixtureRequest) -> bool:
    """For `serve(process=process)`: a test of both."""
    return bool(request.param)


@pytest.fixture(scope="module")
def serial() -> LLM:
    """The same model without a server: what it says to one prompt at a time is right."""
    return LLM(course_model("draft"), dtype="float32", kv_cache_bytes=128 << 20)
