"""The client of the load generator against servers good and bad: every failure is counted, under its own name."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from reference_impl.bench.load import client as client_module
from reference_impl.bench.load import probe as probe_module
from reference_impl.bench.load.client import Client, Cut, Form, Outcome
from reference_impl.bench.load.probe import connect
from reference_impl.simulation.workloads import PAGE_TOKENS, WorkloadRequest

from .fake_server import Call, FakeServer, Script, broken, cut_off, nobody, overload, running


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


def test_connections_are_used_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(client_module, "REST_SECONDS", 600.0)  # however long this process waits for a processor
    monkeypatch.setattr(probe_module, "IDLE_SECONDS", 600.0)
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


async def _whole_answer(call: Call) -> None:
    await call.whole(200, '{"choices": [{"text": "not streamed"}]}')


async def _closed_early(call: Call) -> None:
    """Closed in order, but in the middle of an answer in chunks."""
    await call.head()
    await call.token()
    call.writer.close()


async def _without_done(call: Call) -> None:
    await call.head()
    await call.token()
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
        (overload, "HTTP 429", "come back later"),
        (broken, "HTTP 500", "Traceback"),
        (_whole_answer, "not a stream", "application/json"),
        (cut_off, "connection cut", "Error"),
        (_closed_early, "connection cut", "Error"),
        (_without_done, "ended without [DONE]", "nor a finish_reason, after 1 chunks"),
        (_stalled, "timeout", "0.3 s"),
        (_silent, "timeout", "0.3 s"),
        (_error_event, "error in the stream", "the engine has failed"),
        (_bad_json, "bad event", "not json"),
        (_bad_utf8, "bad event", "utf-8"),
        (_bad_shape, "bad event", "text"),
        (_a_list, "bad event", "object"),
        (_no_tokens, "no tokens", "no token before it"),
        (_after_done, "bad event", "after [DONE]"),
    ],
)
def test_what_goes_wrong_is_a_failure_with_its_reason(script: Script, kind: str, detail: str):
    with running(script) as fake:
        (outcome,) = ask(fake, timeout=0.3 if kind == "timeout" else 60.0)
    assert (outcome.error, detail in outcome.detail) == (kind, True), outcome
    assert outcome.metrics(outcome.planned).ttft is None
    assert not outcome.metrics(outcome.planned).meets(1e9, 1e9)


@pytest.mark.parametrize("cut", [False, True])
def test_a_finish_reason_and_the_end_of_the_body_are_an_end_too_and_a_cut_is_none(cut: bool):
    async def script(call: Call) -> None:
        await call.head(kind="Text/Event-Stream")
        await call.token()
        await call.token(finish_reason="length")
        if cut:
            call.writer.close()
        else:
            await call.end()

    with running(script) as fake:
        (outcome,) = ask(fake)
    assert (outcome.error, outcome.num_output_tokens, outcome.has_done) == ("connection cut" if cut else None, 2, False)
    assert outcome.ended >= outcome.token_times[-1]


def test_a_refusal_says_when_to_come_back():
    with running(overload) as fake:
        assert ask(fake)[0].retry_after == 7.0
    with running(broken) as fake:
        assert ask(fake)[0].retry_after == 0.0


@pytest.mark.parametrize("value", ["Wed, 21 Oct 2026 07:28:00 GMT", "-1", "soon", "86400"])
def test_a_retry_after_that_is_a_date_or_a_day_holds_nobody_up(value: str):
    async def script(call: Call) -> None:
        await call.whole(503, "no", more=f"retry-after: {value}\r\n")

    with running(script) as fake:
        assert ask(fake)[0].retry_after == (60.0 if value.isdecimal() else 0.0)


def test_a_server_that_is_not_there_is_a_failure_and_not_a_crash():
    with nobody() as fake:
        (outcome,) = ask(fake)
    assert outcome.error == "not connected"


def test_a_failure_says_how_far_it_came():
    with running(cut_off) as fake:
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
