"""Prefill and decode in engines of their own: who gets what, equal texts, and what is lost with an engine."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from collections.abc import Iterator
from itertools import product
from typing import Any

import httpx
import pytest

from reference_impl import LLM, SamplingParams, course_model
from reference_impl.features.disaggregation.endpoint import Endpoint
from reference_impl.serving.app import ServerConfig
from reference_impl.serving.disaggregated import MIN_PAGES, Disaggregated
from reference_impl.serving.peers import load_peer
from reference_impl.serving.placing import Placement
from reference_impl.serving.server import ModelServer, make
from tests.serving.conftest import Running
from tests.serving.engine_thread import EngineThread
from tests.serving.test_fleet import Recorded, in_a_loop, row

COMPLETIONS = "/v1/completions"
LONG = [*range(16 * MIN_PAGES), 90, 91]


class Bench:
    """Recorded engines in an event loop: the first one or two compute prompts."""

    def __init__(self, num_prefill: int, num_decode: int, router: str = "round_robin"):
        self.engines = [Recorded() for _ in range(num_prefill + num_decode)]
        self.fleet = Disaggregated(self.engines, num_prefill, router)  # type: ignore[arg-type]
        self.said: list[Any] = []

    async def begin(self, **refusals: str) -> None:
        """refusals: of engines as d1, d2, ... that refuse pages."""
        beginning = asyncio.create_task(self.fleet.begin(self.said.append))
        await asyncio.sleep(0)
        for number in range(len(self.engines)):
            self.engines[number].say(("here", f"name {number}"))
        for p, d in product(self.fleet.prefill, self.fleet.decode):
            self.engines[p].say(("met", f"name {d}", refusals.get(f"d{d}", "")))
        await beginning

    def start(self, number: int, *prompts: list[int], sampling: SamplingParams | None = None, **options: Any) -> None:
        self.fleet.send(("start", number, f"r{number}", list(prompts), sampling or SamplingParams(), options))

    def got(self, engine: int, kind: str) -> list[Any]:
        return [command for command in self.engines[engine].got if command[0] == kind]


@in_a_loop
async def test_a_prompt_goes_to_both_roles_and_its_pages_from_one_to_the_other() -> None:
    b = Bench(1, 1)
    await b.begin()
    assert b.got(0, "meet") == [("meet", "name 1")]
    b.start(5, LONG, priority=3, cache_salt="s")
    [(_, number, _, prompts, sampling, options)] = b.got(0, "start")
    assert (number < 0, prompts, sampling.max_tokens) == (True, [LONG], 1)
    transfer, peer = options.pop("push_to")
    assert (peer, options) == ("name 1", {"priority": 3, "cache_salt": "s"})
    [(_, number_there, name, prompts, _, options)] = b.got(1, "start")
    assert (number_there, name, prompts, options["transfers"]) == (5, "r5", [LONG], {transfer: "name 0"})
    b.engines[0].say(("answer", number, [1], None))
    b.engines[0].say(("step", [row(number, "", [4], 0, "length")], [(number, (66, 1, 0))]))
    assert b.said == [("step", [], [])], "what a prefill engine samples is nobody's"
    assert b.got(0, "leave") == [("leave", number)]


@in_a_loop
async def test_what_is_short_or_was_there_before_or_needs_its_whole_prompt_stays_where_it_decodes() -> None:
    b = Bench(1, 1)
    await b.begin()
    b.start(0, LONG[: 16 * MIN_PAGES])  # its last token is computed where it is answered
    b.start(1, LONG)  # of which it has all but a page now
    b.start(2, [7, *LONG], pooling="last")
    b.start(3, [8, *LONG], sampling=SamplingParams(prompt_logprobs=1))
    assert b.got(0, "start") == []
    b.start(4, LONG, cache_salt="another's")
    assert len(b.got(0, "start")) == 1


@in_a_loop
async def test_a_prompt_goes_where_it_is_cheapest_and_a_next_turn_where_the_last_was_answered() -> None:
    b = Bench(2, 2, "prefix")
    await b.begin()
    b.start(0, LONG)
    b.start(1, [7, *LONG])
    assert [[len(b.got(n, "start")) for n in role] for role in ((0, 1), (2, 3))] == [[1, 1], [1, 1]], "one each"
    [(_, _, _, prompts, *_)] = b.got(3, "start")
    assert prompts == [[7, *LONG]]
    answer = [*range(200, 280)]
    b.engines[3].say(("answer", 1, [5], None))
    b.engines[3].say(("step", [row(1, "its answer", answer, 0, "stop")], []))
    b.start(2, [7, *LONG, *answer, 1, 2, 3])
    assert len(b.got(3, "start")) == 2
    assert "transfers" not in b.got(3, "start")[1][5], "it has all but the question"
    assert [len(b.got(n, "start")) for n in (0, 1)] == [1, 1]


def test_a_page_that_an_engine_lacks_ends_the_prefix() -> None:
    placement = Placement()
    placement.note(0, [1, 2, 4])
    assert placement.num_new(0, [1, 2, 3, 4]) == 2
    assert placement.num_new(1, [1, 2]) == 2
    assert placement.cheapest([1, 0], [1, 2], lambda engine: 0) == 0
    assert placement.cheapest([1, 0], [1, 2], lambda engine: 5 * (engine == 0)) == 1, "it has too much to do"
    placement.forget(0)
    assert placement.num_new(0, [1]) == 1


@in_a_loop
async def test_peers_speak_through_the_router_and_learn_who_is_gone() -> None:
    b = Bench(2, 2)
    await b.begin()
    assert [b.got(n, "meet") for n in (0, 1)] == [[("meet", "name 2"), ("meet", "name 3")]] * 2
    b.engines[0].say(("relay", "name 3", b"offer"))
    assert b.got(3, "relay") == [("relay", "name 0", b"offer")]
    b.engines[3].say(("relay", "nobody", b"reserved"))
    assert b.got(3, "gone") == [("gone", "nobody")]
    b.engines[2].say(("restarting", "restarting (try 1 of 3): killed"))
    assert all(b.got(n, "gone")[-1] == ("gone", "name 2") for n in (0, 1, 3))
    b.engines[2].say(("restarted",))
    b.engines[2].say(("here", "another life"))
    assert b.got(1, "meet")[-1] == ("meet", "another life")


@in_a_loop
async def test_a_role_without_engines_is_the_others_work() -> None:
    b = Bench(1, 1)
    await b.begin()
    b.engines[0].say(("restarting", "restarting (try 1 of 3): killed"))
    b.start(0, LONG)
    assert "transfers" not in b.got(1, "start")[0][5]
    b.engines[0].say(("restarted",))
    b.engines[1].say(("failed", "killed"))
    [(_, number, *_)] = b.got(0, "start")
    assert number == 0, "the engine for prompts goes on with it"
    assert b.said[-1] == ("lost", [], "engine 1: killed", False)


@in_a_loop
async def test_who_cannot_meet_sends_nothing_and_a_client_that_goes_is_left_in_both() -> None:
    b = Bench(1, 2)
    await b.begin(d1="other weights")
    b.start(0, LONG)
    assert (b.got(0, "start"), len(b.got(1, "start"))) == ([], 1)
    b.start(1, [5, *LONG])
    [(_, number, *_)] = b.got(0, "start")
    b.fleet.send(("leave", 1))
    assert b.got(0, "leave") == [("leave", number)]
    assert b.got(2, "leave") == [("leave", 1)]


def test_roles_that_do_not_fit_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="prefill, decode: expected at least one engine of each or none, got 2 and 0"):
        make(course_model("draft"), "127.0.0.1", 0, name="course", prefill=2)
    with pytest.raises(ValueError, match="data_parallel_size 2 beside prefill 1 and decode 1"):
        make(course_model("draft"), "127.0.0.1", 0, name="course", prefill=1, decode=1, data_parallel_size=2)


# --- with engines in threads ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served(until: Any) -> Iterator[tuple[Running, list[EngineThread]]]:
    hosts = [EngineThread(load_peer(course_model("draft"), "float64", num_blocks=300, block_size=16)) for _ in range(3)]
    server = ModelServer(Disaggregated(hosts, 1, "round_robin"), ServerConfig("course"), "127.0.0.1", 0)
    running = Running(server)
    until(lambda: running.runner.is_ready, "it is ready")
    until(lambda: len(_links(hosts[0])) == 2, "the engines have met")
    yield running, hosts
    running.end()


def _endpoint(host: EngineThread) -> Endpoint:
    return host.llm.engine.kv.store.endpoint  # type: ignore[attr-defined, no-any-return]


def _links(host: EngineThread) -> Any:
    return _endpoint(host)._links


@pytest.fixture(scope="module")
def alone() -> LLM:
    return LLM(course_model("draft"), dtype="float64", num_blocks=300)


ASKED: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9, "seed": 3},
    {"temperature": 1.0, "seed": 4, "top_p": 0.9, "repetition_penalty": 1.2, "frequency_penalty": 0.5},
    {"temperature": 0.8, "seed": 5, "n": 3},
    {"min_tokens": 6, "stop": ["return"], "include_stop_str_in_output": True},
    {"logprobs": 2},
]


@pytest.mark.parametrize("asked", ASKED, ids=lambda asked: "-".join(asked) or "greedy")
def test_texts_are_those_of_one_engine(
    served: tuple[Running, list[EngineThread]], alone: LLM, until: Any, asked: dict[str, Any]
) -> None:
    running, hosts = served
    prompt = f"# {asked}\n" + "def add(a, b):\n    return a + b\n\n" * 6
    body = {"prompt": prompt, "max_tokens": 20, "temperature": 0} | asked
    with httpx.Client(base_url=running.url, timeout=600) as client:
        answer = client.post(COMPLETIONS, json=body).json()
    sampling = SamplingParams(max_tokens=20, **({"temperature": 0} | asked))
    expected = alone.generate(prompt, sampling)[0]
    assert [choice["text"] for choice in answer["choices"]] == [out.text for out in expected.outputs]
    cached, length = answer["usage"]["prompt_tokens_details"]["cached_tokens"], len(alone.encode(prompt))
    assert cached == (length - 1) // 16 * 16, "all full pages came"
    if "logprobs" in asked:
        scores = answer["choices"][0]["logprobs"]["token_logprobs"]
        [out] = expected.outputs
        assert out.logprobs is not None
        each = zip(out.token_ids, out.logprobs, strict=True)
        assert scores == pytest.approx([found[token].logprob for token, found in each])
    until(lambda: all(_is_empty(host) for host in hosts), "nothing is held")


def _is_empty(host: EngineThread) -> bool:
    endpoint, engine = _endpoint(host), host.llm.engine
    free = [len(slots.free) == slots.num_slots for slots in endpoint.receiver._peers.values()]
    return (
        all(free) and not endpoint.sender.num_transfers and not endpoint._pushes and endpoint.pages.is_empty
        and not engine.requests and engine.kv.num_available == engine.num_blocks
    )  # fmt: skip


@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_prompts_around_a_pages_end(served: tuple[Running, list[EngineThread]], alone: LLM, extra: int) -> None:
    running, _ = served
    prompt = [(7 * i + extra) % 500 + 100 for i in range(16 * 8 + extra)]
    with httpx.Client(base_url=running.url, timeout=600) as client:
        answer = client.post(COMPLETIONS, json={"prompt": prompt, "max_tokens": 8, "temperature": 0}).json()
    expected = alone.generate([prompt], SamplingParams(max_tokens=8, temperature=0))[0]
    assert answer["choices"][0]["text"] == expected.outputs[0].text
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == (len(prompt) - 1) // 16 * 16


def test_many_at_once(served: tuple[Running, list[EngineThread]], alone: LLM, until: Any) -> None:
    running, hosts = served
    prompts = [f"# file {i}\n" + f"def f{i}(x):\n    return x * {i}\n\n" * (4 + i % 5) for i in range(12)]
    sampling = SamplingParams(max_tokens=12, temperature=0)

    async def all_of_them() -> list[str]:
        async with httpx.AsyncClient(base_url=running.url, timeout=600) as client:
            bodies = [{"prompt": prompt, "max_tokens": 12, "temperature": 0} for prompt in prompts]
            answers = await asyncio.gather(*(client.post(COMPLETIONS, json=body) for body in bodies))
        return [answer.json()["choices"][0]["text"] for answer in answers]

    assert asyncio.run(all_of_them()) == [out.outputs[0].text for out in alone.generate(prompts, sampling)]
    until(lambda: all(_is_empty(host) for host in hosts), "nothing is held")


# --- with processes ---------------------------------------------------------------------------------------------------


class Load:
    """Streams that run at the same time, and all that they got."""

    def __init__(self, url: str, bodies: list[dict[str, Any]]):
        self.lines: list[list[str]] = [[] for _ in bodies]
        self._threads = [threading.Thread(target=self._run, args=(url, *each)) for each in enumerate(bodies)]
        for thread in self._threads:
            thread.start()

    def _run(self, url: str, number: int, body: dict[str, Any]) -> None:
        with httpx.stream("POST", url + COMPLETIONS, json=body, timeout=600) as answer:
            for line in answer.iter_lines():
                self.lines[number].append(line)

    def texts(self) -> list[str]:
        """Of each stream, which ended as it should."""
        for thread in self._threads:
            thread.join(600)
        events = [[line.removeprefix("data: ") for line in lines if line] for lines in self.lines]
        assert all(each[-1] == "[DONE]" for each in events), [each[-1:] for each in events]
        return ["".join(c["text"] for e in each[:-1] for c in json.loads(e)["choices"]) for each in events]


def test_streams_go_on_when_engines_of_each_role_are_killed_and_stopped(inferlab: Any, alone: LLM, until: Any) -> None:
    """Four processes of engines, by `inferlab serve`."""
    running = inferlab("--dtype", "float64", "--prefill", "1", "--decode", "2", "--router", "round_robin",
                       "--step-seconds", "2", "--engine-restart-wait", "0.2")  # fmt: skip

    def engines() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = httpx.get(f"{running.url}/status.json", timeout=600).json()["engines"]
        return found

    def pids() -> list[int]:
        until(lambda: all(engine["serves"] and engine["pid"] for engine in engines()), "all serve")
        return [engine["pid"] for engine in engines()]

    assert [engine["role"] for engine in engines()] == ["prefill", "decode", "decode"]
    sampling = SamplingParams(max_tokens=150, temperature=0.7, seed=11, ignore_eos=True)
    kills = [(0, signal.SIGKILL), (1, signal.SIGKILL), (0, signal.SIGSTOP), (2, signal.SIGSTOP)]
    for turn, (victim, number) in enumerate(kills):
        prompts = [f"# turn {turn}, file {i}\n" + f"def f{i}(x):\n    return x\n\n" * 8 for i in range(4)]
        expected = [out.outputs[0].text for out in alone.generate(prompts, sampling)]
        body = {"max_tokens": 150, "temperature": 0.7, "seed": 11, "ignore_eos": True, "stream": True}
        pid = pids()[victim]
        load = Load(running.url, [body | {"prompt": prompt} for prompt in prompts])
        if victim:
            until(lambda load=load: all(len(lines) > 20 for lines in load.lines), "all stream")
        os.kill(pid, number)
        assert load.texts() == expected, f"turn {turn}"
        until(lambda pid=pid: pid not in {engine["pid"] for engine in engines()}, "it is replaced")
    pids()
    free = [engine["blocks_available"] == engine["blocks"] for engine in engines()]
    assert free == [True] * 3
