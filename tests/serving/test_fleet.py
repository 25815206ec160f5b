"""Several engines behind one server: who gets a request, and that one engine's end is no other's."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from reference_impl import LLM, SamplingParams, course_model
from reference_impl.assembly.parts import Parts
from reference_impl.features.handover.progress import Progress
from reference_impl.serving.app import ServerConfig
from reference_impl.serving.fleet import MOVES, Fleet, pages_of
from reference_impl.serving.metrics import WatchedTrace
from reference_impl.serving.server import ModelServer, make
from reference_impl.simulation.workloads.request import PAGE_TOKENS
from tests.serving.conftest import Running
from tests.serving.engine_thread import EngineThread
from tests.serving.test_restarts import children

COMPLETIONS = "/v1/completions"
LONG = {"prompt": "x", "max_tokens": 1900, "ignore_eos": True, "temperature": 0, "stream": True}
SHORT = {"prompt": "def add(a, b):", "max_tokens": 12, "ignore_eos": True, "temperature": 0}


# --- without engines --------------------------------------------------------------------------------------------------


class Recorded:
    """An engine that only keeps what it was sent."""

    prompts, vocab_size, max_model_len, acceptance = None, 97, 64, "exact"
    embedding_defaults = None
    is_alive = True

    def __init__(self) -> None:
        self.sampling_defaults: dict[str, Any] = {}
        self.got: list[Any] = []
        self.send = self.got.append

    async def begin(self, receive: Any) -> None:
        self.say = receive

    async def end(self, seconds: float) -> None:
        self.got.append(("end", seconds))


class Bench:
    """A fleet of recorded engines in an event loop, and what it said."""

    def __init__(self, count: int, router: str = "round_robin"):
        self.engines = [Recorded() for _ in range(count)]
        self.fleet, self.said = Fleet(self.engines, router), list[Any]()  # type: ignore[arg-type]

    async def begin(self) -> None:
        await self.fleet.begin(self.said.append)

    def start(self, number: int, prompt: list[int] | None = None, n: int = 1, **options: Any) -> int:
        """The engine that got it."""
        before = [len(engine.got) for engine in self.engines]
        self.fleet.send(("start", number, f"r{number}", [prompt or [1, 2, 3]], SamplingParams(n=n), options))
        [got] = [i for i, engine in enumerate(self.engines) if len(engine.got) > before[i]]
        return got


def in_a_loop(test: Any) -> Any:
    def run() -> None:
        asyncio.run(test())

    run.__name__ = test.__name__
    return run


@in_a_loop
async def test_requests_go_round_and_leave_where_they_went() -> None:
    b = Bench(3)
    await b.begin()
    assert [b.start(number) for number in range(4)] == [0, 1, 2, 0]
    b.fleet.send(("leave", 1))
    b.fleet.send(("leave", 1))
    b.fleet.send(("leave", 77))
    assert b.engines[1].got[1:] == [("leave", 1)]
    b.engines[2].say(("answer", 2, [], "too long"))
    b.engines[0].say(("answer", 0, [5], None))
    b.engines[0].say(("step", [row(0, "a", [7]), row(1, "it has left", [7])], [(0, (3, 1, 0))]))
    assert b.said == [
        ("answer", 2, None, "too long"), ("answer", 0, None, None), ("step", [row(0, "a", [7])], [(0, (3, 1, 0))])
    ]  # fmt: skip


def row(number: int, text: str, tokens: list[int], index: int = 0, finish_reason: str | None = None) -> tuple[Any, ...]:
    """The number of a stream, and the fields of a `Piece`."""
    return (number, index, text, tokens, [], finish_reason, None, None, None, None, None)


@in_a_loop
async def test_streams_of_a_lost_engine_go_on_in_another_one_without_a_gap_or_a_repeat() -> None:
    b = Bench(2)
    await b.begin()
    assert [b.start(0, n=2), b.start(1), b.start(2)] == [0, 1, 0]
    b.engines[0].say(("answer", 0, [55], None))
    pieces = [row(0, "one ", [7, 8]), row(0, "two", [9], 1), row(0, "", [10], 1, "stop")]
    b.engines[0].say(("step", pieces, []))
    b.said.clear()
    b.engines[0].say(("restarting", "restarting (try 1 of 3): killed"))
    again, anew = b.engines[1].got[-2:]
    assert b.said == [("lost", [], "engine 0 is restarting (try 1 of 3): killed", True)]
    assert anew[:3] == ("start", 2, "r2"), "nothing was known of it"
    kind, part, _, prompts, sampling, options = again
    assert (kind, prompts, sampling.n, part < 0) == ("start", [[1, 2, 3]], 1, True)
    assert options["resume"] == Progress(55, (7, 8), num_unstreamed=2)
    b.engines[1].say(("answer", part, [55], None))
    b.engines[1].say(("step", [row(part, "one th", [9])], []))  # it reads the text from its beginning
    b.engines[1].say(("step", [row(part, "ree", [4], 0, "length")], [(part, (3, 5, 0))]))
    assert b.said[1:] == [
        ("step", [row(0, "th", [9])], []), ("step", [row(0, "ree", [4], 0, "length")], [(0, (3, 6, 0))])
    ]  # fmt: skip
    b.fleet.send(("leave", 0))
    assert b.engines[1].got[-1] == ("leave", part)


@in_a_loop
async def test_what_moves_no_more_is_lost() -> None:
    b = Bench(4)
    await b.begin()
    assert [b.start(number) for number in range(2)] == [0, 1]
    b.start(9, pooling="last")
    for number in (0, 1):
        b.engines[number].say(("answer", number, [5], None))
    b.engines[2].say(("failed", "a bad step"))
    assert b.said[-1][1] == [9], "what is pooled has no answer to go on with"
    where = 0
    for _ in range(MOVES):
        b.engines[where].say(("failed", "this request's"))
        assert b.said[-1][1] == []
        where = next(n for n in (1, 3) if any(c[1] < 0 for c in b.engines[n].got) and n in b.fleet.serving)
    part = b.engines[where].got[-1][1]
    b.engines[where].say(("answer", part, [5], "too long here"))
    assert b.said[-1] == ("lost", [0], "another engine does not go on: too long here", False)


@in_a_loop
async def test_an_engine_that_restarts_gets_no_new_streams_until_it_serves() -> None:
    b = Bench(2)
    await b.begin()
    assert [b.start(number) for number in range(3)] == [0, 1, 0]
    b.engines[0].say(("restarting", "restarting (try 1 of 3): killed"))
    assert b.said == [("lost", [], "engine 0 is restarting (try 1 of 3): killed", True)]
    assert [b.start(number) for number in range(10, 14)] == [1, 1, 1, 1]
    b.engines[0].say(("restarted",))
    assert len(b.said) == 1, "the server served all the time"
    assert sorted(b.start(number) for number in range(20, 22)) == [0, 1]
    b.fleet.send(("leave", 0))
    assert b.engines[0].got[-1][0] == "start"
    assert b.engines[1].got[-1] == ("leave", 0), "it went there"


@in_a_loop
async def test_when_none_serves_the_fleet_restarts_or_has_failed() -> None:
    b = Bench(2)
    await b.begin()
    b.engines[0].say(("failed", "a bad step"))
    assert b.said == [("lost", [], "engine 0: a bad step", False)]
    b.engines[1].say(("restarting", "restarting (try 1 of 3): killed"))
    b.engines[1].say(("restarted",))
    assert b.said[1:] == [("restarting", "restarting (try 1 of 3): killed"), ("restarted",)]
    b.engines[1].say(("failed", "killed again"))
    assert b.said[-1] == ("failed", "engine 0: a bad step; engine 1: killed again")
    b.engines[0].is_alive = False
    b.fleet.send(("ask", 5, "metrics", ()))  # the other one's process lives
    assert b.engines[0].got == []
    assert b.engines[1].got == [("ask", 5, "metrics", ())]
    b.engines[1].is_alive = False
    b.fleet.send(("ask", 6, "metrics", ()))
    assert b.said[-1] == ("answer", 6, None, "no engine serves"), "and not waited for without end"


@in_a_loop
async def test_questions_are_answered_by_all_that_serve_also_if_one_is_lost_meanwhile() -> None:
    b = Bench(3)
    await b.begin()
    b.fleet.send(("ask", 5, "timeline", ("cmpl-1",)))
    assert all(engine.got[-1] == ("ask", 5, "timeline", ("cmpl-1",)) for engine in b.engines)
    b.engines[0].say(("answer", 5, None, "no request"))
    b.engines[1].say(("failed", "gone"))
    assert [said[0] for said in b.said] == ["lost"]
    life = {"id": "cmpl-1", "arrived_at": 3.0}
    b.engines[2].say(("answer", 5, {"id": "cmpl-1", "requests": [life]}, None))
    known = {"id": "cmpl-1", "requests": [{"engine": 2, "role": "", **life}], "ttft_parts": None}
    assert b.said[-1] == ("answer", 5, known, None)
    b.fleet.send(("ask", 6, "timeline", ("cmpl-2",)))
    for engine in (0, 2):
        b.engines[engine].say(("answer", 6, None, "no request 'cmpl-2'"))
    assert b.said[-1] == ("answer", 6, None, "no request 'cmpl-2'")
    b.fleet.send(("ask", 7, "timeline", ("cmpl-3",)))
    b.engines[0].say(("answer", 7, {"id": "cmpl-3"}, None))
    b.engines[2].say(("answer", 7, None, "no request 'cmpl-3'"))
    assert b.said[-1] == ("answer", 7, None, "KeyError: 'requests'")


@in_a_loop
async def test_the_prefix_router_sends_what_begins_alike_to_one_engine() -> None:
    b = Bench(2, "prefix")
    await b.begin()
    ours, theirs = [7] * (2 * PAGE_TOKENS), [8] * (2 * PAGE_TOKENS)
    first, second = b.start(0, ours), b.start(1, theirs)
    assert first != second
    assert b.start(2, [*ours, 1, 2]) == first
    assert b.start(3, [*theirs, 1, 2]) == second


def test_a_page_stands_for_all_before_it() -> None:
    prompt = list(range(3 * PAGE_TOKENS + 5))
    pages = pages_of(prompt, "")
    assert len(pages) == 3
    assert pages_of(prompt[: 2 * PAGE_TOKENS], "") == pages[:2]
    assert set(pages_of([5, *prompt[1:]], "")).isdisjoint(pages), "another beginning, other pages"
    assert set(pages_of(prompt, "salt")).isdisjoint(pages)
    assert pages_of(prompt[: PAGE_TOKENS - 1], "") == ()


def test_a_router_that_there_is_not_is_named() -> None:
    with pytest.raises(ValueError, match="router: expected one of round_robin, least_tokens, prefix, got 'nearest'"):
        make(course_model("draft"), "127.0.0.1", 0, name="course", data_parallel_size=2, router="nearest")


# --- with engines -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fleet(until: Any) -> Iterator[Running]:
    """Two engines in threads, by turns."""
    hosts = [
        EngineThread(
            LLM(course_model("draft"), dtype="float32", parts=Parts(trace=WatchedTrace(20_000)), num_blocks=200)
        )
        for _ in range(2)
    ]
    running = Running(ModelServer(Fleet(hosts, "round_robin"), ServerConfig("course"), "127.0.0.1", 0))
    until(lambda: running.runner.is_ready, "it is ready")
    yield running
    running.end()


def test_all_engines_write_the_texts_of_one(fleet: Running, serial: LLM) -> None:
    prompts = [f"def f{i}(a):" for i in range(6)]
    with httpx.Client(base_url=fleet.url, timeout=600) as client:
        for prompt in prompts:
            sampling = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
            answer = client.post(COMPLETIONS, json=SHORT | {"prompt": prompt}).json()
            assert answer["choices"][0]["text"] == serial.generate(prompt, sampling)[0].text
            assert client.get(f"/requests/{answer['id']}/timeline").json()["id"] == answer["id"]
        families = {f.name: f for f in text_string_to_metric_families(client.get("/metrics").text)}
        finished = [s for s in families["inferlab:request_success"].samples if s.labels["finished_reason"] == "length"]
        assert {sample.labels["engine"]: sample.value for sample in finished} == {"0": 3.0, "1": 3.0}
        assert families["inferlab:engine_up"].samples[0].value == 1
        shown = [client.get("/status.json", params={"engine": n}).json() for n in (0, 1, 9)]
    assert [status["engine"] for status in shown] == [0, 1, 0], "the first where there is no such engine"
    assert [status["num_finished"] for status in shown] == [3, 3, 3]
    assert [line["serves"] for line in shown[0]["engines"]] == [True, True]
    assert [line["blocks"] for line in shown[0]["engines"]] == [200, 200]


def engines_of(server: int) -> list[int]:
    command = "serving.process"
    return [child for child in children(server) if command in Path(f"/proc/{child}/cmdline").read_text()]


def test_when_an_engine_is_killed_another_goes_on_with_its_streams(inferlab: Any, until: Any) -> None:
    options = ("--dtype", "float32", "--dp", "2", "--router", "round_robin", "--engine-restart-wait", "0.2")
    running = inferlab(*options)
    texts: dict[int, list[str]] = {}
    with httpx.Client(base_url=running.url, timeout=600) as client:
        whole = client.post(COMPLETIONS, json=LONG | {"stream": False}).json()["choices"][0]["text"]
        expected = client.post(COMPLETIONS, json=SHORT).json()["choices"][0]["text"]
        first, second = engines_of(running.pid)
        begun = [threading.Event(), threading.Event()]

        def stream(number: int) -> None:
            with client.stream("POST", COMPLETIONS, json=LONG) as answer:
                texts[number] = []
                for line in answer.iter_lines():
                    texts[number].append(line)
                    begun[number].set()

        streams = [threading.Thread(target=stream, args=(number,)) for number in (0, 1)]
        for number, thread in enumerate(streams):
            thread.start()
            begun[number].wait(600)
        os.kill(second, signal.SIGKILL)
        for thread in streams:
            thread.join(600)
        for lines in texts.values():
            events = [line.removeprefix("data: ") for line in lines if line]
            assert events[-1] == "[DONE]"
            pieces = [choice["text"] for event in events[:-1] for choice in json.loads(event)["choices"]]
            assert "".join(pieces) == whole
        assert client.get("/health").status_code == client.get("/ready").status_code == 200
        assert [client.post(COMPLETIONS, json=SHORT).json()["choices"][0]["text"] for _ in range(3)] == [expected] * 3
        until(lambda: all(e["serves"] for e in client.get("/status.json").json()["engines"]), "it is back")
        assert len(engines_of(running.pid)) == 2
        assert first in engines_of(running.pid)
