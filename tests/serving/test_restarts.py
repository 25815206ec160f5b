"""An engine that is lost is started again: who ran or comes meanwhile is told, and who comes after it sees no trace."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from reference_impl import LLM, SamplingParams, course_model
from reference_impl.features.chat.prompts import ChatEncoder
from reference_impl.serving.app import ServerConfig
from reference_impl.serving.server import ModelServer
from reference_impl.serving.supervision import Restarts, SupervisedEngine

COMPLETIONS = "/v1/completions"
LONG = {"prompt": "x", "max_tokens": 1900, "n": 4, "ignore_eos": True, "temperature": 0, "stream": True}
SHORT = {"prompt": "def add(a, b):", "max_tokens": 12, "ignore_eos": True, "temperature": 0}
KILLED = "the engine's process was killed by signal 9 (SIGKILL)"


@pytest.fixture(scope="module")
def text(serial: LLM) -> str:
    sampling = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    return serial.generate(SHORT["prompt"], sampling)[0].text


def said(client: httpx.Client) -> str:
    return client.post(COMPLETIONS, json=SHORT).json()["choices"][0]["text"]


def message(answer: httpx.Response) -> str:
    return answer.json()["error"]["message"]


def error_of(client: httpx.Client, loses_the_engine: Any) -> str:
    """Of a stream that runs while the engine is lost, its last event."""
    with client.stream("POST", COMPLETIONS, json=LONG) as answer:
        lines = answer.iter_lines()
        next(lines)
        loses_the_engine()
        last = [line for line in lines if line][-1]
    return json.loads(last.removeprefix("data: "))["error"]["message"]


# --- `inferlab serve` -----------------------------------------------------------------------------------------------


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def engine_of(server: int) -> int:
    """Its process. Another child of a server renders chat templates."""
    [engine] = [child for child in children(server) if "serving.process" in Path(f"/proc/{child}/cmdline").read_text()]
    return engine


def test_a_server_whose_rank_is_stopped_says_which_and_comes_back(
    inferlab: Any, text: str, until: Any, serial: LLM
) -> None:
    """Two ranks; the second one stops in a stream."""
    options = ("--dtype", "float32", "--tp", "2", "--step-seconds", "2", "--engine-restart-wait", "0.2")
    running = inferlab(*options, cold_engine=True)
    with httpx.Client(base_url=running.url, timeout=600) as client:
        assert said(client) == text
        [forks] = forks_of(engine_of(running.pid))
        reports = client.get("/status.json").json()["ranks"]
        ranks = [report["pid"] for report in reports]
        assert {*ranks} < {*children(forks)}, "the other one watches over it"
        # An all-reduce for the embedding and two for each layer; the rank's half of the logits of the last token.
        config = json.loads((course_model("draft") / "config.json").read_text())
        hidden, layers, words = (config[n] for n in ("hidden_size", "num_hidden_layers", "vocab_size"))
        tokens, sampled = len(serial.encode(SHORT["prompt"])) + 12 - 1, 12
        expected = 4 * (tokens * (2 * layers + 1) * hidden + sampled * words // 2)
        assert {report["num_bytes"] for report in reports} == {expected}
        assert f'inferlab:rank_collective_bytes{{rank="1"}} {float(expected)}' in client.get("/metrics").text
        second = ranks[1]
        error = error_of(client, lambda: os.kill(second, signal.SIGSTOP))
        assert f"rank 1 (process {second}) did not come to" in error
        until(lambda: client.get("/ready").status_code == 200, "it serves again")
        assert said(client) == text
        assert not any(command_of(pid) for pid in (forks, *ranks)), "none of them is left"


def forks_of(engine: int) -> list[int]:
    """What its threads have started to fork ranks."""
    lists = [path.read_text().split() for path in Path(f"/proc/{engine}/task").glob("*/children")]
    return [int(pid) for found in lists for pid in found if b"features.process" in command_of(int(pid))]


def command_of(pid: int) -> bytes:
    """Its words; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def test_a_server_whose_engine_is_killed_comes_back_with_the_same_texts(inferlab: Any, text: str, until: Any) -> None:
    running = inferlab("--dtype", "float32", "--engine-restarts", "2", "--engine-restart-wait", "0.2")
    with httpx.Client(base_url=running.url, timeout=600) as client:

        def kill() -> None:
            engine = engine_of(running.pid)
            os.kill(engine, signal.SIGKILL)

        def serves_or_says_why() -> bool:
            health = client.get("/health")
            assert health.status_code == 200 or message(health) == f"restarting (try {number} of 2): {KILLED}"
            return health.status_code == 200

        for number in (1, 2):
            assert said(client) == text
            assert f"the engine is restarting (try {number} of 2): {KILLED}" in error_of(client, kill)
            until(serves_or_says_why, "it serves again")
            assert said(client) == text
            assert f"inferlab:engine_restarts_total {number}.0\n" in client.get("/metrics").text
        last = error_of(client, kill)
        assert f"the engine has failed: {KILLED} (after 2 restarts within 30000 s)" in last
        for path in ("/health", "/ready", "/status.json"):
            assert KILLED in message(client.get(path))
        refused = client.post(COMPLETIONS, json=SHORT)
        assert (refused.status_code, "retry-after" in refused.headers) == (503, False)
        assert "inferlab:engine_up 0.0\n" in client.get("/metrics").text
    running.terminate()
    _, complaint = running.communicate(timeout=600)
    assert running.returncode == 1
    assert f"error: the engine has failed: {KILLED} (after 2 restarts" in complaint
    assert "Traceback" not in complaint


# --- an engine that fails when the test says so ---------------------------------------------------------------------


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose files say what the next engine does: `wait` before it is ready, `refuse`; `raise` in a step."""
    code = f"""
        import time
        from pathlib import Path
        from reference_impl import course_model
        from reference_impl.serving.worker import load

        PLACE = Path({str(tmp_path)!r})

        def made():
            while (PLACE / "wait").exists():
                time.sleep(0.01)
            if (PLACE / "refuse").exists():
                raise ValueError("there is no such model any more")
            llm = load(course_model("draft"), "float32", kv_cache_bytes=64 << 20)
            real = llm.step
            llm.step = lambda: 1 / 0 if (PLACE / "raise").exists() else real()
            return llm
    """
    (tmp_path / "obedient_model.py").write_text(textwrap.dedent(code))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "obedient_model", raising=False)
    return tmp_path


@pytest.fixture
def supervised(place: Path, until: Any, warm_engines: None) -> Iterator[Any]:
    """(**Restarts fields) -> a server in a thread, and a client of it."""
    started: list[tuple[ModelServer, threading.Thread, httpx.Client]] = []

    def start(**restarts: Any) -> tuple[ModelServer, httpx.Client]:
        make = importlib.import_module("obedient_model").made
        host = SupervisedEngine(make, ChatEncoder(course_model("draft")), Restarts(**{"wait": 0, **restarts}))
        server = ModelServer(host, ServerConfig("course"), "127.0.0.1", 0, shutdown_seconds=1)
        thread = threading.Thread(target=server.run)
        thread.start()
        client = httpx.Client(base_url=server.url, timeout=600)
        started.append((server, thread, client))
        until(lambda: client.get("/ready").status_code == 200, "it is ready")
        return server, client

    yield start
    for server, thread, client in started:
        client.close()
        server.stop()
        thread.join(600)
        assert not thread.is_alive()


def kill(server: ModelServer) -> None:
    assert isinstance(server.engine, SupervisedEngine)
    os.kill(server.engine.pid, signal.SIGKILL)


def test_while_the_engine_restarts_everybody_is_told_when_to_come_back(
    supervised: Any, place: Path, text: str, until: Any
) -> None:
    server, client = supervised()
    whole: list[httpx.Response] = []
    body = {**LONG, "stream": False}
    other = threading.Thread(target=lambda: whole.append(httpx.post(server.url + COMPLETIONS, json=body, timeout=600)))
    other.start()
    until(lambda: server._runner.num_streams, "an answer is being made")
    (place / "wait").touch()
    state = f"restarting (try 1 of 3): {KILLED}"
    assert state in error_of(client, lambda: kill(server))
    health = client.get("/health")
    assert (health.status_code, message(health)) == (503, state)
    for path in ("/ready", "/status.json", "/requests/x/timeline"):
        refused = client.get(path)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        assert state in message(refused)
    refused = client.post(COMPLETIONS, json=SHORT)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
    counts = client.get("/metrics")
    assert counts.status_code == 200
    assert "inferlab:engine_restarts_total 1.0\n" in counts.text
    assert "inferlab:engine_up 0.0\n" in counts.text
    assert client.get("/v1/models").status_code == 200
    assert client.post("/tokenize", json={"prompt": "x"}).status_code == 200  # needs no engine
    other.join(600)
    assert (whole[0].status_code, whole[0].headers["retry-after"]) == (503, "5")
    assert state in message(whole[0])
    (place / "wait").unlink()
    until(lambda: client.get("/health").status_code == 200, "it serves again")
    assert said(client) == text
    counts = client.get("/metrics")
    assert "inferlab:engine_up 1.0\n" in counts.text
    assert "inferlab:engine_steps_total 12.0\n" in counts.text
    until(lambda: not server._runner.num_streams, "no stream is left")
    assert server._runner.num_unfinished == 0
    assert client.get("/status.json").json()["num_requests"] == 0


def test_an_engine_in_which_a_step_raises_is_started_again(supervised: Any, place: Path, text: str, until: Any) -> None:
    server, client = supervised(tries=1, seconds=0.0)  # as often as need be: each try is out of date at once
    for number in (1, 2):
        before = server.engine.pid
        error = error_of(client, (place / "raise").touch)
        assert "restarting (try 1 of 1): ZeroDivisionError: division by zero" in error
        (place / "raise").unlink()
        until(lambda: client.get("/health").status_code == 200, "it serves again")
        assert said(client) == text
        assert server.engine.pid != before
        assert server._runner.num_restarts == number


def test_an_engine_that_cannot_be_started_again_uses_up_its_tries(supervised: Any, place: Path, until: Any) -> None:
    server, client = supervised(tries=2, seconds=30_000.0)
    (place / "refuse").touch()
    kill(server)
    until(lambda: "has failed" in client.get("/health").text, "it gives up")
    expected = f"the engine has failed: {KILLED}; it could not be started again: there is no such model any more"
    assert message(client.get("/health")) == f"{expected} (after 2 restarts within 30000 s)"
    assert server._runner.num_restarts == 2


def test_a_server_that_is_told_to_end_waits_for_no_restart(supervised: Any, place: Path, until: Any) -> None:
    server, _ = supervised()
    (place / "wait").touch()
    before = server.engine.pid
    kill(server)
    until(lambda: server.engine.pid != before, "the next process has begun")
    server.stop()
    until(lambda: not Path(f"/proc/{server.engine.pid}").exists(), "it has ended, though it was never ready")
