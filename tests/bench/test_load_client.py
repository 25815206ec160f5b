"""The load generator against servers good and bad: every failure is counted, under its own name.

The fake server does what real ones do to their clients: it delays, cuts, refuses, and splits bytes anywhere.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import json
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from reference_impl.bench.load.client import (
    Client,
    Cut,
    Form,
    Outcome,
    ServerError,
    choose_form,
    connect,
    first_model,
    forms,
)
from reference_impl.bench.load.run import Load
from reference_impl.bench.serve import serve
from reference_impl.workloads import PAGE_TOKENS, WorkloadRequest, write_jsonl


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
        """As when the process is killed: reset, not closed."""
        self.writer.transport.abort()


def prompt_length(body: dict[str, Any]) -> int:
    prompt = body["prompt"] if "prompt" in body else body["messages"][0]["content"]
    return len(prompt.split()) if isinstance(prompt, str) else len(prompt)


Script = Callable[[Call], Awaitable[None]]


@dataclass
class FakeServer:
    """script: answers every POST. GET /v1/models names one model."""

    script: Script = Call.answer
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
def running(script: Script = Call.answer) -> Iterator[FakeServer]:
    """The server in a thread with an event loop of its own, so that the client's may be started and ended."""
    fake, ready, stop = FakeServer(script), threading.Event(), asyncio.Event()
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
    assert ready.wait(30)
    try:
        yield fake
    finally:
        loops[0].call_soon_threadsafe(stop.set)
        thread.join(30)
        assert not thread.is_alive()


# --- one request ------------------------------------------------------------------------------------------------------


def request(name: str = "r", prompt: int = 8, output: int = 3, pages: tuple[int, ...] = ()) -> WorkloadRequest:
    return WorkloadRequest(name, 0.0, prompt, output, pages)


def ask(fake: FakeServer, *requests: WorkloadRequest, **options: Any) -> list[Outcome]:
    """Sends the requests one after another over one client."""

    async def main() -> list[Outcome]:
        async with connect() as http:
            client = Client(http, fake.url, "m", **options)
            now = asyncio.get_running_loop().time
            return [await client.send(r, client.body(r), now()) for r in requests or (request(),)]

    return asyncio.run(main())


def test_a_good_answer_is_counted_token_by_token():
    with running() as fake:
        (outcome,) = ask(fake)
    assert (outcome.error, outcome.num_output_tokens, outcome.num_prompt_tokens) == (None, 3, 8)
    assert len(outcome.token_times) == 3
    assert outcome.planned <= outcome.sent <= outcome.token_times[0]
    assert list(outcome.token_times) == sorted(outcome.token_times)
    assert outcome.token_times[-1] <= outcome.ended
    call = fake.posts[0]
    assert (call.path, call.body["stream"], call.body["ignore_eos"]) == ("/v1/completions", True, True)
    assert (call.body["max_tokens"], call.body["stream_options"]) == (3, {"include_usage": True})
    assert call.headers["accept-encoding"] == "identity"


def test_connections_are_used_again():
    with running() as fake:
        ask(fake, *(request(f"r{i}") for i in range(5)))
        assert (len(fake.posts), fake.num_connections) == (5, 1)


async def _no_end(call: Call) -> None:
    await call.head()
    await call.token()
    await call.event("[DONE]")
    await asyncio.sleep(600)


def test_the_answer_has_ended_with_done_although_the_connection_stays_open():
    with running(_no_end) as fake:
        first, second = ask(fake, request("a"), request("b"))
        assert first.error is second.error is None
        assert first.ended < second.planned


async def _overload(call: Call) -> None:
    await call.whole(429, '{"error": {"message": "come back later"}}', more="retry-after: 7\r\n")


async def _broken(call: Call) -> None:
    await call.whole(500, "Traceback", kind="text/plain")


async def _whole_answer(call: Call) -> None:
    await call.whole(200, '{"choices": [{"text": "not streamed"}]}')


async def _cut(call: Call) -> None:
    await call.head()
    await call.token()
    await asyncio.sleep(0.05)  # or the reset overtakes the token
    call.cut()


async def _closed_early(call: Call) -> None:
    """Closed in order, but in the middle of an answer in chunks."""
    await call.head()
    await call.token()
    call.writer.close()


async def _without_done(call: Call) -> None:
    await call.head()
    await call.token(finish_reason="length")
    await call.end()


async def _stalled(call: Call) -> None:
    await call.head()
    await call.token()
    await asyncio.sleep(600)


async def _silent(call: Call) -> None:
    await asyncio.sleep(600)


async def _error_event(call: Call) -> None:
    await call.head()
    await call.token()
    await call.event({"error": {"message": "the engine has failed"}})
    await call.end()


async def _bad_json(call: Call) -> None:
    await call.head()
    await call.event("{not json")
    await call.event("[DONE]")
    await call.end()


async def _bad_utf8(call: Call) -> None:
    await call.head()
    await call.chunk(b'data: {"choices": [{"text": "\xf0\x9f\xa6"}]}\n\ndata: [DONE]\n\n')
    await call.end()


async def _bad_shape(call: Call) -> None:
    await call.head()
    await call.event({"choices": ["text"]})
    await call.end()


async def _a_list(call: Call) -> None:
    await call.head()
    await call.event("[1, 2]")
    await call.end()


async def _no_tokens(call: Call) -> None:
    await call.head()
    await call.event("[DONE]")
    await call.end()


async def _after_done(call: Call) -> None:
    await call.head()
    await call.chunk(b'data: {"choices": [{"text": "a"}]}\n\ndata: [DONE]\n\ndata: {"choices": []}\n\n')
    await call.end()


@pytest.mark.parametrize(
    ("script", "kind", "detail"),
    [
        (_overload, "HTTP 429", "come back later"),
        (_broken, "HTTP 500", "Traceback"),
        (_whole_answer, "not a stream", "application/json"),
        (_cut, "connection cut", "Error"),
        (_closed_early, "connection cut", "Error"),
        (_without_done, "ended without [DONE]", "after 1 chunks"),
        (_stalled, "timeout", "0.3 s"),
        (_silent, "timeout", "0.3 s"),
        (_error_event, "error in the stream", "the engine has failed"),
        (_bad_json, "bad event", "not json"),
        (_bad_utf8, "bad event", "utf-8"),
        (_bad_shape, "bad event", "text"),
        (_a_list, "bad event", "object"),
        (_no_tokens, "no tokens", "[DONE]"),
        (_after_done, "bad event", "after [DONE]"),
    ],
)
def test_what_goes_wrong_is_a_failure_with_its_reason(script: Script, kind: str, detail: str):
    with running(script) as fake:
        (outcome,) = ask(fake, timeout=0.3 if kind == "timeout" else 60.0)
    assert (outcome.error, detail in outcome.detail) == (kind, True), outcome
    assert outcome.metrics(outcome.planned).ttft is None
    assert not outcome.metrics(outcome.planned).meets(1e9, 1e9)


def test_a_refusal_says_when_to_come_back():
    with running(_overload) as fake:
        assert ask(fake)[0].retry_after == 7.0
    with running(_broken) as fake:
        assert ask(fake)[0].retry_after == 0.0


@pytest.mark.parametrize("value", ["Wed, 21 Oct 2026 07:28:00 GMT", "-1", "soon", "86400"])
def test_a_retry_after_that_is_a_date_or_a_day_holds_nobody_up(value: str):
    async def script(call: Call) -> None:
        await call.whole(503, "no", more=f"retry-after: {value}\r\n")

    with running(script) as fake:
        assert ask(fake)[0].retry_after == (60.0 if value.isdecimal() else 0.0)


def test_a_server_that_is_not_there_is_a_failure_and_not_a_crash():
    with running() as fake:
        pass
    (outcome,) = ask(fake)
    assert outcome.error == "not connected"


def test_a_failure_says_how_far_it_came():
    with running(_cut) as fake:
        (outcome,) = ask(fake)
    assert outcome.num_output_tokens == len(outcome.token_times) == 1


async def _byte_by_byte(call: Call) -> None:
    await call.head()
    stream = 'data: {"choices": [{"text": "ä"}]}\r\n\r\n: ping\n\ndata: {"choices":\ndata: [{"text": "🦙"}]}\n\n'
    for byte in (stream + "data: [DONE]\n\n").encode():
        await call.chunk(bytes([byte]))
        await asyncio.sleep(0)
    await call.end()


def test_a_stream_may_be_split_in_the_middle_of_a_character():
    with running(_byte_by_byte) as fake:
        (outcome,) = ask(fake)
    assert (outcome.error, outcome.num_output_tokens) == (None, 2)


async def _several_at_once(call: Call) -> None:
    await call.head()
    await call.chunk(2 * b'data: {"choices": [{"text": "a"}]}\n\n')
    await call.usage(8, 5)
    await call.event("[DONE]")
    await call.end()


def test_tokens_are_counted_by_the_server_where_it_does_and_tpot_divides_by_them():
    with running(_several_at_once) as fake:
        (outcome,) = ask(fake)
    assert (outcome.error, outcome.num_output_tokens, outcome.has_usage) == (None, 5, True)
    assert len(outcome.token_times) == 2
    made = Outcome("r", 0.0, 1.0, 9.0, 8, 5, (2.0, 4.0), 5)
    assert made.metrics(made.planned).tpot == 2.0 / 4
    assert made.metrics(made.planned).itl == (2.0,)
    assert (made.metrics(made.planned).ttft, made.metrics(made.sent).ttft) == (2.0, 1.0)
    assert made.metrics(made.planned).latency == 4.0
    assert Outcome("r", 0.0, 1.0, 9.0, 8, 5, (2.0,), 1).metrics(0.0).tpot is None


@pytest.mark.parametrize(("counted", "wanted"), [(3, 3), (2, 2), (None, 2)])
def test_an_empty_last_chunk_is_a_token_only_where_the_server_counts_one_more(counted: int | None, wanted: int):
    """With the end-of-sequence token vLLM sends an empty text; others send an empty chunk beside the tokens."""

    async def script(call: Call) -> None:
        await call.head()
        await call.token("a")
        await call.token("")  # a token that gives no whole character yet
        await call.token("", finish_reason="stop")
        if counted is not None:
            await call.usage(8, counted)
        await call.event("[DONE]")
        await call.end()

    with running(script) as fake:
        (outcome,) = ask(fake)
    assert (len(outcome.token_times), outcome.num_output_tokens) == (wanted, wanted)


def test_in_a_chat_the_opening_chunk_is_no_token():
    async def script(call: Call) -> None:
        await call.head()
        for delta in ({"role": "assistant", "content": ""}, {"content": "a"}, {}, {"reasoning_content": "b"}):
            await call.event({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
        await call.event({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
        await call.event("[DONE]")
        await call.end()

    with running(script) as fake:
        (outcome,) = ask(fake, form=Form(chat=True, token_ids=False))
    assert (outcome.error, len(outcome.token_times)) == (None, 3)
    assert fake.posts[0].path == "/v1/chat/completions"
    assert len(fake.posts[0].body["messages"][0]["content"].split()) == 8


# --- prompts ----------------------------------------------------------------------------------------------------------


def bodies(*requests: WorkloadRequest, **options: Any) -> list[Any]:
    client = Client(None, "", "m", **options)  # type: ignore[arg-type]
    return [json.loads(client.body(r))["prompt"] for r in requests]


@pytest.mark.parametrize("token_ids", [True, False])
def test_prompts_share_what_the_workload_shares_and_nothing_under_another_salt(token_ids: bool):
    form = Form(token_ids=token_ids)
    a, b = (request(n, 2 * PAGE_TOKENS + 5, 3, (11, last)) for n, last in (("a", 12), ("b", 13)))
    first, second = (p if token_ids else p.split(" ") for p in bodies(a, b, form=form, salt=7))
    assert len(first) == len(second) == 2 * PAGE_TOKENS + 5
    assert first[:PAGE_TOKENS] == second[:PAGE_TOKENS]
    assert first[PAGE_TOKENS : 2 * PAGE_TOKENS] != second[PAGE_TOKENS : 2 * PAGE_TOKENS]
    other = bodies(a, form=form, salt=8)[0]
    other = other if token_ids else other.split(" ")
    assert first[:PAGE_TOKENS] != other[:PAGE_TOKENS]
    assert first[-5:] != other[-5:]
    assert bodies(a, form=form, salt=7) == bodies(a, form=form, salt=7)
    if token_ids:
        assert all(3 <= token < 1024 for token in first)


def test_long_requests_are_cut_with_their_pages_and_counted():
    pages = tuple(range(10))
    cut = Cut([request("a", 645, 50, pages), request("b", 130, 5, pages[:2])], max_prompt=200, max_output=20)
    first, second = cut
    assert (first.num_prompt_tokens, first.num_output_tokens, first.pages) == (200, 20, pages[:3])
    assert (second.num_prompt_tokens, second.num_output_tokens) == (130, 5)
    assert cut.cut == {"a"}
    assert len(bodies(first)[0]) == 200


# --- before the load --------------------------------------------------------------------------------------------------


def choose(fake: FakeServer, chat: bool = False, text: bool = False) -> tuple[Form, list[str]]:
    async def main() -> tuple[Form, list[str]]:
        async with connect("key") as http:
            client = Client(http, fake.url, await first_model(http, fake.url))
            refused = await choose_form(client, forms(chat, text))
            return client.form, refused

    return asyncio.run(main())


def test_a_server_is_asked_what_it_takes_and_what_it_refuses_is_told():
    async def plain(call: Call) -> None:
        if isinstance(call.body["prompt"], list):
            await call.whole(422, "token ids are not supported")
        elif "ignore_eos" in call.body:
            await call.whole(400, "unknown field ignore_eos")
        else:
            await call.answer()

    with running(plain) as fake:
        form, refused = choose(fake)
    assert form == Form(chat=False, token_ids=False, ignore_eos=False)
    assert len(refused) == 3
    assert "token ids are not supported" in refused[0]
    assert fake.posts[0].headers["authorization"] == "Bearer key"
    assert fake.posts[0].body["model"] == "fake-model"
    with running() as fake:
        assert choose(fake) == (Form(), [])
        assert choose(fake, text=True) == (Form(token_ids=False), [])


@pytest.mark.parametrize(
    ("status", "words"), [(401, "a first small request failed: HTTP 401"), (404, "takes no form of request")]
)
def test_a_server_that_takes_nothing_is_an_error(status: int, words: str):
    async def script(call: Call) -> None:
        await call.whole(status, "no")

    with running(script) as fake, pytest.raises(ServerError, match=words):
        choose(fake)


# --- the whole command ------------------------------------------------------------------------------------------------

app = typer.Typer()
app.command()(serve)


def command(fake: FakeServer, *options: str) -> Any:
    return CliRunner().invoke(
        app, ["--base-url", fake.url, *options], env={"COLUMNS": "160", "NO_COLOR": "1", "TERM": "dumb"}
    )


def test_the_command_offers_the_defaults_of_a_load():
    options = {"num_requests": "num", "num_warmup": "warmup"}
    offered = inspect.signature(serve).parameters
    for f in dataclasses.fields(Load):
        if f.name != "salt":
            assert offered[options.get(f.name, f.name)].default == f.default, f.name


def test_the_command_can_be_listed_without_the_extra_that_it_needs():
    code = "import sys; sys.modules['httpx'] = None; import reference_impl.bench.serve"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def trace(folder: Path, num: int) -> str:
    """A recorded workload in which nobody waits."""
    file = folder / "trace.jsonl"
    write_jsonl(file, [WorkloadRequest(f"r{i}", i / 1000, 8 + i, 3, ()) for i in range(num)])
    return str(file)


def test_warm_up_is_sent_and_not_counted_and_failures_are_counted_by_kind(tmp_path: Path):
    async def script(call: Call) -> None:
        measured = call.number - 1 - 4  # after the first small one and the warm-up
        if measured in (0, 5, 6):
            await _overload(call)
        elif measured == 7:
            await _cut(call)
        else:
            await call.answer()

    with running(script) as fake:
        file = tmp_path / "result.json"
        done = command(
            fake, "--workload", trace(tmp_path, 20), "--num", "20", "--warmup", "4", "--ttft", "100", "--tpot", "100",
            "--json", str(file),
        )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert len(fake.posts) == 1 + 4 + 20
    prompts = [tuple(call.body["prompt"]) for call in fake.posts]
    assert len(set(prompts)) == len(prompts)  # the warm-up has prompts of its own
    result = json.loads(file.read_text())
    assert (result["num_requests"], result["num_succeeded"]) == (20, 16)
    assert result["errors"] == {"HTTP 429": 3, "connection cut": 1}
    assert result["attainment"]["value"] == 16 / 20
    assert result["goodput"] * result["seconds"] == pytest.approx(16)
    assert (result["num_output_tokens"], result["lost_output_tokens"]) == (16 * 3, 1)
    assert result["tokens_counted_by_server"] == 16
    assert result["rows"]["TTFT from planned"]["num_values"] == 16
    assert result["rows"]["ITL"]["num_values"] == 32
    assert result["rows"]["delay of the client"]["num_values"] == 20
    assert len(result["requests"]) == 20
    assert result["setup"]["warmup"] == {"requests": 4, "failed": 0}
    assert "16 of 20 succeeded" in done.output
    assert "3 x HTTP 429" in done.output
    assert "come back later" in done.output
    assert "80.0%" in done.output


def test_a_closed_loop_of_a_course_workload_and_its_chat_form(tmp_path: Path):
    with running() as fake:
        done = command(
            fake, "--workload", "chat", "--concurrency", "3", "--num", "12", "--warmup", "0", "--max-prompt", "100",
            "--max-output", "4", "--chat",
        )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "closed loop, 3 users" in done.output
    assert "12 requests were cut" in done.output
    assert len(fake.posts) == 13
    assert {call.path for call in fake.posts} == {"/v1/chat/completions"}


def test_an_open_loop_of_a_course_workload():
    with running() as fake:
        outcomes: list[Outcome] = []
        load = Load(
            fake.url, "batch", rate=200.0, arrivals="poisson", num_requests=30, num_warmup=2, max_output=4, seed=3
        )
        load.run(outcomes.append)
    assert (len(outcomes), len(fake.posts)) == (30, 33)
    first = min(o.planned for o in outcomes)
    planned = sorted(o.planned - first for o in outcomes)
    arrivals = [r.arrival for r, _ in zip(load.requests(), range(30), strict=False)]
    assert planned == pytest.approx([a - arrivals[0] for a in arrivals])
    assert all(o.sent >= o.planned for o in outcomes)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--workload", "nothing"), "unknown workload"),
        (("--rate", "2", "--arrivals", "sometimes"), "arrivals: expected"),
        (("--vocab-size", "64", "--base-url", "127.0.0.1:8000"), "http://HOST:PORT"),
    ],
)
def test_what_cannot_be_sent_is_said_and_nothing_is(options: tuple[str, ...], words: str):
    with running() as fake:
        done = command(fake, *options)
    assert done.exit_code != 0
    assert words in done.output
    assert not fake.posts


@pytest.mark.parametrize(("script", "words"), [(_overload, "HTTP 429"), (_cut, "connection cut")])
def test_a_server_that_answers_nothing_ends_the_command_with_an_error(script: Script, words: str):
    with running(script) as fake:
        done = command(fake)
    assert done.exit_code == 1
    assert words in done.output


def test_a_load_of_which_nothing_succeeds_ends_with_an_error_and_its_report(tmp_path: Path):
    async def script(call: Call) -> None:
        await (call.answer() if call.number == 0 else _overload(call))

    with running(script) as fake:
        done = command(fake, "--workload", trace(tmp_path, 5), "--num", "5", "--warmup", "0")
    assert done.exit_code == 1
    assert "0 of 5 succeeded" in done.output
    assert "5 x HTTP 429" in done.output
