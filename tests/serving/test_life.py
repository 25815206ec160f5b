"""Clients that go, do not read, or come by the hundred; an engine that fails; a server that ends, or is killed."""

from __future__ import annotations

import asyncio
import functools
import json
import random
import signal
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from reference_impl import LLM, SamplingParams, course_model
from reference_impl.assembly.parts import Parts
from reference_impl.serving.limits import ConnectionLimits
from reference_impl.serving.metrics import WatchedTrace
from tests.serving import programs
from tests.serving.engine_thread import EngineThread
from tests.warm import Warm

COMPLETIONS = "/v1/completions"


def head(length: int) -> bytes:
    kind = "Content-Type: application/json"
    return f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\n{kind}\r\nContent-Length: {length}\r\n\r\n".encode()


LONG: dict[str, Any] = {"prompt": "x", "max_tokens": 1900, "ignore_eos": True, "temperature": 0}


def test_a_client_that_goes_frees_its_blocks_before_the_next_step(serve: Any, until: Any) -> None:
    running = serve()
    steps_after: list[int] = []
    leave = running.host.worker._leave

    def watched(stream: int) -> None:  # in the engine's thread, between two steps
        before = len(running.engine.requests)
        leave(stream)
        steps_after.append(before - len(running.engine.requests))

    running.host.worker._leave = watched
    with (
        httpx.Client(base_url=running.url, timeout=600) as client,
        client.stream("POST", COMPLETIONS, json={**LONG, "stream": True, "n": 4}) as answer,
    ):
        lines = answer.iter_lines()  # held: httpx closes the connection with it
        next(lines)
        assert len(running.engine.requests) == 4
    until(running.is_idle, "all blocks are back")
    assert steps_after == [4]
    ended = running.engine.trace.counts.last
    assert [(one.reason, one.metrics.num_output_tokens < LONG["max_tokens"]) for one in ended] == [("abort", True)] * 4


def test_a_client_that_goes_while_it_waits_for_a_whole_answer(serve: Any, until: Any) -> None:
    running = serve()
    body = json.dumps(LONG).encode()
    sock = socket.create_connection(("127.0.0.1", running.server.port))
    sock.sendall(head(len(body)) + body)
    until(running.engine.trace.steps, "it runs")
    sock.close()
    until(running.is_idle, "all blocks are back")


def test_a_client_that_does_not_read_is_given_up_and_holds_nobody_up(serve: Any, until: Any) -> None:
    running = serve({"limits": ConnectionLimits(write=0.5)})
    body = json.dumps({**LONG, "stream": True, "n": 48, "logprobs": 20, "temperature": 1.0}).encode()
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    sock.connect(("127.0.0.1", running.server.port))
    sock.sendall(head(len(body)) + body)
    until(running.engine.trace.steps, "it runs, or has been given up")
    with httpx.Client(base_url=running.url, timeout=600) as client:
        assert client.post(COMPLETIONS, json={"prompt": "y", "max_tokens": 4, "ignore_eos": True}).status_code == 200
    until(running.is_idle, "the one that does not read was given up")
    assert Counter(one.reason for one in running.engine.trace.counts.last) == {"abort": 48, "length": 1}
    sock.close()


@pytest.fixture(scope="module")
def alone(serial: LLM) -> Callable[[str, int], str]:
    """alone(prompt, tokens): what the model says without a server. Threads and processes are asked the same."""

    @functools.cache
    def say(prompt: str, tokens: int) -> str:
        return serial.generate(prompt, SamplingParams(max_tokens=tokens, temperature=0))[0].text

    return say


def test_a_hundred_streams_with_disconnects_lose_and_leak_nothing(
    serve: Any, alone: Callable[[str, int], str], until: Any, process: bool
) -> None:
    running = serve(process=process, max_num_seqs=32, num_blocks=300)
    rng = random.Random(3)
    plans = [(f"# {i}\n" * rng.randint(1, 6), rng.randint(2, 9), rng.random() < 0.3) for i in range(100)]

    async def one(client: httpx.AsyncClient, prompt: str, tokens: int, goes: bool) -> str | None:
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True}
        # Pieces that a slow client has not taken are merged, so a line that is not the first may never come.
        text, goes_after = "", rng.choice((0, rng.randint(0, tokens // 2)))
        async with client.stream("POST", COMPLETIONS, json=body) as answer:
            assert answer.status_code == 200
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    return text
                if line:
                    text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
                goes_after -= 1
                if goes and goes_after < 0:
                    return None
        raise AssertionError("the stream ended without [DONE]")

    async def everybody() -> list[str | None]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=running.url, timeout=600, limits=limits) as client:
            return list(await asyncio.gather(*(one(client, *plan) for plan in plans)))

    texts = asyncio.run(everybody())
    until(running.is_idle, "all blocks are back")
    assert sum(text is None for text in texts) > 10
    for text, (prompt, tokens, _) in zip(texts, plans, strict=True):
        assert text is None or text == alone(prompt, tokens)


def test_when_the_engine_fails_nobody_waits(serve: Any) -> None:
    running = serve()
    real = running.llm.step
    running.llm.step = lambda: real() if len(running.engine.trace.steps()) < 5 else 1 / 0
    with httpx.Client(base_url=running.url, timeout=600) as client:
        with client.stream("POST", COMPLETIONS, json={**LONG, "stream": True}) as answer:
            lines = [line for line in answer.iter_lines() if line]
        last = json.loads(lines[-1].removeprefix("data: "))
        assert "ZeroDivisionError" in last["error"]["message"]
        assert "data: [DONE]" not in lines
        for path in ("/health", "/ready"):
            assert client.get(path).status_code == 503
        refused = client.post(COMPLETIONS, json={"prompt": "x"})
        assert refused.status_code == 503
        assert "failed" in refused.json()["error"]["message"]


# --- a process of its own -------------------------------------------------------------------------------------------


def ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", timeout=600).status_code == 200
    except httpx.TransportError:
        return False


def test_a_server_that_is_told_to_end_lets_those_that_run_finish(inferlab: Any, tmp_path: Path, until: Any) -> None:
    running = inferlab("--trace", str(tmp_path / "trace.json"), "--shutdown-seconds", "600")
    until(lambda: ready(running.url), "it is ready")
    body = {"prompt": "x", "max_tokens": 300, "ignore_eos": True, "stream": True}
    with (
        httpx.Client(base_url=running.url, timeout=600) as client,
        client.stream("POST", COMPLETIONS, json=body) as answer,
    ):
        lines = answer.iter_lines()
        next(lines)
        running.send_signal(signal.SIGTERM)
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert running.wait(600) == 0
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


@pytest.fixture(scope="module")
def killed_and_restarted(until: Any, reserved_port: int, inferlabs: Any) -> Iterator[Any]:
    """A server that was killed while a client read, and the next one, at the same port."""
    with inferlabs() as start:
        running = start("--port", str(reserved_port))
        until(lambda: ready(running.url), "it is ready")
        with (
            httpx.Client(base_url=running.url, timeout=600) as client,
            client.stream("POST", COMPLETIONS, json={**LONG, "stream": True}) as answer,
        ):
            lines = answer.iter_lines()
            next(lines)
            running.kill()
            with pytest.raises(httpx.TransportError):
                list(lines)
        again = start("--port", str(reserved_port), "--shutdown-seconds", "0.5")
        until(lambda: ready(again.url), "it is ready")
        body = {"prompt": "x", "max_tokens": 2}
        answered = httpx.post(f"{again.url}{COMPLETIONS}", json=body, timeout=600).status_code
        yield (running.url, answered), again


def test_a_kill_is_an_error_at_the_client_and_a_restart_is_clean(killed_and_restarted: Any) -> None:
    (url, answered), again = killed_and_restarted
    assert (again.url, answered) == (url, 200)


def test_those_that_run_for_too_long_get_an_error_and_the_server_ends(killed_and_restarted: Any) -> None:
    _, running = killed_and_restarted
    body = {"prompt": "x", "max_tokens": 900, "n": 60, "ignore_eos": True, "stream": True}
    with (
        httpx.Client(base_url=running.url, timeout=600) as client,
        client.stream("POST", COMPLETIONS, json=body) as answer,
    ):
        lines = answer.iter_lines()
        next(lines)
        running.send_signal(signal.SIGTERM)
        last = [line for line in lines if line][-1]
        assert "shut down" in json.loads(last.removeprefix("data: "))["error"]["message"]
    assert running.wait(600) == 0


def test_a_port_that_is_taken_is_said(imported: Warm) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = programs.run(imported, "serve", "draft", "--port", str(taken.getsockname()[1]))
    assert done.returncode == 1
    assert "--port" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_step_that_ends_after_the_event_loop_was_closed_ends_the_thread_in_peace(monkeypatch: Any) -> None:
    llm = LLM(course_model("draft"), num_blocks=8, parts=Parts(trace=WatchedTrace(10)))
    host, received, failed = EngineThread(llm), list[Any](), list[Any]()
    monkeypatch.setattr(threading, "excepthook", failed.append)
    asyncio.run(host.begin(received.append))
    host.send(("ask", 1, "status", (1, 1.0, 1.0)))
    host.send(None)
    host._thread.join(600)
    assert not host.is_alive
    assert (failed, received) == ([], [])
