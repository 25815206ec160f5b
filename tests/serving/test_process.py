"""The engine in a process of its own: either end of the socket is killed, stopped, or slow; nobody waits for ever."""

from __future__ import annotations

import asyncio
import functools
import importlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from reference_impl import LLM, SamplingParams, course_model
from reference_impl.features.chat.prompts import ChatEncoder
from reference_impl.serving.app import ServerConfig
from reference_impl.serving.process import EngineProcess
from reference_impl.serving.runner import Piece, Runner, Stream
from reference_impl.serving.server import ModelServer
from reference_impl.serving.worker import load
from tests.serving import programs
from tests.warm import Warm

COMPLETIONS = "/v1/completions"
LONG = {"prompt": "x", "max_tokens": 1900, "ignore_eos": True, "temperature": 0, "stream": True}


def state(pid: int) -> str:
    """Of a process, as the kernel has it: R, S, T, Z ...; "" where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def engine_of(server: int) -> int:
    """Its process. Another child of a server renders chat templates."""
    [engine] = [child for child in children(server) if "serving.process" in Path(f"/proc/{child}/cmdline").read_text()]
    return engine


def has_ended(pid: int) -> bool:
    return state(pid) in ("", "Z")  # whoever is started by nobody in particular may stay a zombie in a container


@pytest.fixture(scope="module")
def apart(serve: Any) -> Any:
    return serve(process=True, cold=True)


@pytest.fixture
def http(apart: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=apart.url, timeout=600) as client:
        yield client


def test_openai_s_clients_see_no_difference(apart: Any, serial: LLM) -> None:
    client = openai.OpenAI(base_url=f"{apart.url}/v1", api_key="none", max_retries=0)
    prompt, sampling = "def fibonacci(n):\n", {"max_tokens": 24, "temperature": 0}
    expected = serial.generate(prompt, SamplingParams(**sampling, logprobs=2))[0]  # type: ignore[arg-type]
    asked: Any = {"model": "course", "prompt": prompt, **sampling}
    whole = client.completions.create(**asked, logprobs=2)
    assert whole.choices[0].text == expected.text
    assert whole.choices[0].logprobs.token_logprobs == pytest.approx([r.logprob for r in expected.logprobs], abs=1e-4)
    usage = (whole.usage.prompt_tokens, whole.usage.completion_tokens)
    assert usage == (len(expected.prompt_token_ids), len(expected.token_ids))
    stop = expected.text[5:9]
    cut = client.completions.create(**asked, stop=stop)
    assert (cut.choices[0].text, cut.choices[0].finish_reason) == (expected.text.partition(stop)[0], "stop")
    messages: Any = [{"role": "user", "content": "Write a function that adds two numbers."}]
    expected = serial.generate(serial.chat_prompt(messages), SamplingParams(**sampling))[0]  # type: ignore[arg-type]
    chunks = client.chat.completions.create(
        model="course", messages=messages, max_completion_tokens=24, temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected.text

    async def several() -> list[tuple[str, int]]:
        async with openai.AsyncOpenAI(base_url=f"{apart.url}/v1", api_key="none", max_retries=0) as together:
            answers = await asyncio.gather(*(together.completions.create(**asked) for _ in range(8)))
        return [(answer.choices[0].text, answer.usage.completion_tokens) for answer in answers]

    assert asyncio.run(several()) == [(whole.choices[0].text, whole.usage.completion_tokens)] * 8


def test_what_the_engine_refuses_comes_back_as_400_and_leaves_nothing(apart: Any, http: Any, until: Any) -> None:
    refused = http.post(COMPLETIONS, json={"prompt": [[5, 6], [5, 100_000]], "max_tokens": 500})
    assert refused.status_code == 400
    assert "100000 is outside the vocabulary" in refused.json()["error"]["message"]
    until(apart.is_idle, "the first prompt has left")


def test_after_a_disconnect_at_most_the_step_that_runs_computes_for_it(
    apart: Any, http: httpx.Client, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine stops, the client goes, the engine goes on: it has been told, so no other step has the request."""
    put, received = Stream.put, Counter[int]()

    def counting(stream: Stream, piece: Piece) -> None:
        received[stream.number] += len(piece.tokens)
        put(stream, piece)

    monkeypatch.setattr(Stream, "put", counting)
    for turn in range(12):
        with (
            httpx.Client(base_url=apart.url, timeout=600) as client,
            client.stream("POST", COMPLETIONS, json=LONG) as answer,
        ):
            lines = answer.iter_lines()
            name = json.loads(next(lines).removeprefix("data: "))["id"]
            for _ in range(2 * turn):  # so that the engine is stopped in one step or another
                next(lines)
            os.kill(apart.host.pid, signal.SIGSTOP)
            until(lambda: state(apart.host.pid) == "T", "the engine stands still")
            for _ in range(5):  # the event loop turns and takes what has come
                http.get("/health")
            before = received[max(received)]
        until(lambda: not apart.runner.num_streams, "the server knows that the client has gone")
        until(lambda: not apart.host._writer.transport.get_write_buffer_size(), "the engine can know")
        os.kill(apart.host.pid, signal.SIGCONT)
        until(apart.is_idle, "all blocks are back")
        [found] = http.get(f"/requests/{name}/timeline").json()["requests"]
        assert found["finish_reason"] == "abort"
        assert 0 < before <= found["output_tokens"] <= before + 1


# --- the engine ends ------------------------------------------------------------------------------------------------


def last_event(lines: Iterator[str]) -> str:
    return [line for line in lines if line][-1].removeprefix("data: ")


@pytest.fixture
def as_it_is_typed() -> Iterator[subprocess.Popen[str]]:
    """`inferlab serve`, started as a learner starts it."""
    program = str(Path(sys.executable).with_name("inferlab"))
    words = [program, "serve", "draft", "--port", "0", "--trace", "unused.json", "--engine-restarts", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        yield running
        running.kill()


def test_when_the_engine_s_process_is_killed_clients_get_an_error_and_the_server_says_so(
    as_it_is_typed: subprocess.Popen[str],
) -> None:
    running = as_it_is_typed
    assert running.stdout is not None
    url = running.stdout.readline().split("/v1")[0]
    engine = engine_of(running.pid)
    with httpx.Client(base_url=url, timeout=600) as client:
        with client.stream("POST", COMPLETIONS, json=LONG) as answer:
            lines = answer.iter_lines()
            next(lines)
            os.kill(engine, signal.SIGKILL)
            error = json.loads(last_event(lines))["error"]
        assert "the engine's process was killed by signal 9 (SIGKILL)" in error["message"]
        for path in ("/health", "/ready", "/status.json", "/requests/x/timeline"):
            refused = client.get(path)
            assert refused.status_code == 503
            assert "SIGKILL" in refused.json()["error"]["message"]
        assert client.post(COMPLETIONS, json={"prompt": "x"}).status_code == 503
        assert "inferlab:engine_up 0.0" in client.get("/metrics").text
    running.terminate()
    _, said = running.communicate(timeout=600)
    assert running.returncode == 1
    assert "error: the engine has failed: the engine's process was killed by signal 9" in said


def test_the_model_may_compute_in_a_third_process_which_is_killed(inferlab: Any, serial: LLM, until: Any) -> None:
    """Steps go there as messages: the same text, and an error that names worker and step."""
    options = ("--worker", "process", "--dtype", "float32", "--engine-restarts", "0")
    running = inferlab(*options, cold_engine=True)
    engine = engine_of(running.pid)
    asked = {"prompt": "def add(a, b):", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    expected = serial.generate(asked["prompt"], SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))[0].text
    (worker,) = [
        child for child in children(engine) if "features.process" in Path(f"/proc/{child}/cmdline").read_text()
    ]
    with httpx.Client(base_url=running.url, timeout=600) as client:
        assert client.post(COMPLETIONS, json=asked).json()["choices"][0]["text"] == expected
        with client.stream("POST", COMPLETIONS, json=LONG) as answer:
            lines = answer.iter_lines()
            next(lines)
            os.kill(worker, signal.SIGKILL)
            error = json.loads(last_event(lines))["error"]
        assert f"worker 0 (process {worker}) was killed by signal 9 (SIGKILL) before step" in error["message"]
        assert client.get("/health").status_code == 503
    running.terminate()
    _, said = running.communicate(timeout=600)
    assert running.returncode == 1
    assert "was killed by signal 9 (SIGKILL) before step" in said
    until(lambda: has_ended(engine) and has_ended(worker), "both have ended")


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm_engines: None) -> str:
    """A module that the engine's process can import: its models go wrong, or take for ever."""
    code = """
        import os, time
        from reference_impl import course_model
        from reference_impl.serving.worker import load

        def _with(step):
            llm = load(course_model("draft"), kv_cache_bytes=64 << 20)
            real = llm.step
            llm.step = lambda: real() if len(llm.engine.trace.steps()) < 5 else step()
            return llm

        def fails():
            return _with(lambda: 1 / 0)

        def hangs():
            return _with(lambda: time.sleep(10_000))

        def ends():
            os._exit(3)
    """
    (tmp_path / "wrong_models.py").write_text(textwrap.dedent(code))
    monkeypatch.syspath_prepend(tmp_path)
    return str(tmp_path)


def made(name: str) -> EngineProcess:
    return EngineProcess(getattr(importlib.import_module("wrong_models"), name), ChatEncoder(course_model("draft")))


def test_an_engine_that_fails_in_its_process_can_still_be_asked_what_it_did(module: str, until: Any) -> None:
    server = ModelServer(made("fails"), ServerConfig("course"), "127.0.0.1", 0)
    thread = threading.Thread(target=server.run)
    thread.start()
    with httpx.Client(base_url=server.url, timeout=600) as client:
        with client.stream("POST", COMPLETIONS, json=LONG) as answer:
            last = last_event(answer.iter_lines())
        assert "ZeroDivisionError" in json.loads(last)["error"]["message"]
        assert client.get("/health").status_code == 503
        assert client.post(COMPLETIONS, json={"prompt": "x"}).status_code == 503
        assert "inferlab:engine_steps_total 5.0" in client.get("/metrics").text
    server.stop()
    thread.join(600)
    assert server.failure == "the engine has failed: ZeroDivisionError: division by zero"


def test_an_engine_that_cannot_be_started_is_an_error_that_says_why(module: str) -> None:
    with pytest.raises(ChildProcessError, match="the engine's process ended with code 3 before it was ready"):
        made("ends")
    refused = functools.partial(load, course_model("draft"), max_num_seqs=0)
    with pytest.raises(ValueError, match="max_num_seqs"):
        EngineProcess(refused, ChatEncoder(course_model("draft")))


async def steps_and_then_hangs(host: EngineProcess) -> Runner:
    """A runner whose engine is in a step that never ends."""
    runner, got = Runner(host, 8), 0
    await runner.begin()
    stream = await runner.start("r", [[5, 6]], SamplingParams(max_tokens=50, ignore_eos=True))
    async for pieces in stream:
        got += sum(len(piece.tokens) for piece in pieces)
        if got == 5:
            break
    return runner


def test_a_step_that_never_ends_does_not_keep_the_server_from_ending(module: str) -> None:
    async def ends() -> int:
        host = made("hangs")
        await (await steps_and_then_hangs(host)).end(0.1)
        return host.pid

    assert has_ended(asyncio.run(ends()))


# --- the server ends ------------------------------------------------------------------------------------------------


def test_when_the_server_is_killed_its_engine_ends_in_mid_step(module: str, until: Any, imported: Warm) -> None:
    words = f"""
import asyncio, os, sys
sys.path[:0] = {[module, str(Path(__file__).parents[2])]!r}
from tests.serving import programs, test_process as tests
programs.start_engines_warm({programs.engines(imported)!r})

async def main():
    host = tests.made("hangs")
    await tests.steps_and_then_hangs(host)
    print(os.getpid(), host.pid, flush=True)
    await asyncio.sleep(1000)

asyncio.run(main())
"""
    with subprocess.Popen(imported.command(("-c", words)), stdout=subprocess.PIPE, text=True) as front:
        assert front.stdout is not None
        server, engine = map(int, front.stdout.readline().split())
        assert not has_ended(engine)
        os.kill(server, signal.SIGKILL)  # and not what stands for it, with which all would end
        until(lambda: has_ended(engine), "the engine's process has ended")


@pytest.fixture(scope="module")
def stood_still(until: Any, inferlabs: Any) -> Iterator[Any]:
    """A server that was stopped while its engine computed, and went on: it, what its client got, and the timelines."""
    with inferlabs() as start:
        running = start("--dtype", "float32", "--shutdown-seconds", "600", cold_engine=True)
        url, engine = running.url, engine_of(running.pid)
        body = {**LONG, "max_tokens": 60, "logprobs": 20, "n": 32}  # some 20 KB in a step

        def ticks() -> int:
            """Of processor time that the engine has had."""
            fields = Path(f"/proc/{engine}/stat").read_text().rpartition(")")[2].split()
            return int(fields[11]) + int(fields[12])

        def stands_still() -> bool:
            """For half a second it computes nothing, and does not wait for a processor either: it waits to be read."""
            before, end = ticks(), time.monotonic() + 0.5
            while time.monotonic() < end:
                if state(engine) == "R" or ticks() != before:
                    return False
                time.sleep(0.02)
            return True

        with httpx.Client(base_url=url, timeout=600) as client:
            with client.stream("POST", COMPLETIONS, json=body) as answer:
                lines = answer.iter_lines()
                first = next(lines).removeprefix("data: ")
                name = json.loads(first)["id"]
                running.send_signal(signal.SIGSTOP)
                until(stands_still, "the engine computes nothing")
                running.send_signal(signal.SIGCONT)
                events = [first, *(line.removeprefix("data: ") for line in lines if line)]
            requests = client.get(f"/requests/{name}/timeline").json()["requests"]
        yield (running, url, engine), events, requests


def test_ctrl_c_reaches_both_processes_and_those_that_run_finish(stood_still: Any) -> None:
    (running, url, engine), _, _ = stood_still
    body = {**LONG, "max_tokens": 300}
    with httpx.Client(base_url=url, timeout=600) as client, client.stream("POST", COMPLETIONS, json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        for number in (signal.SIGINT, signal.SIGTERM):
            os.killpg(running.pid, number)
        assert last_event(lines) == "[DONE]"
    assert running.wait(600) == 0
    assert has_ended(engine)


def test_an_engine_whose_server_stands_still_waits_for_it_and_loses_nothing(stood_still: Any, serial: LLM) -> None:
    _, events, requests = stood_still
    name = json.loads(events[0])["id"]
    assert events[-1] == "[DONE]"
    texts = {request["id"]: "" for request in requests}
    for event in events[:-1]:
        [choice] = json.loads(event)["choices"]
        index = choice["index"]
        texts[name if index == 0 else f"{name}/{index}"] += choice["text"]
    expected = serial.generate("x", SamplingParams(max_tokens=60, temperature=0, ignore_eos=True))[0].text
    assert set(texts.values()) == {expected}
    waited = [max(b - a for a, b in pairwise(request["token_times"])) for request in requests]
    assert min(waited) > 0.4, "it went on, so what it wrote was kept somewhere"
