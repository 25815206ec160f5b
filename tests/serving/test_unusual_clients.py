"""Clients that do what OpenAI's own do not: each of these was refused, lost or let in once."""

from __future__ import annotations

import json
import socket
import threading
from typing import Any

import httpx
import openai
import pytest

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SHORT = {"prompt": "def f(", "max_tokens": 3, "temperature": 0}


def post(body: bytes, fields: str = "", version: str = "1.1", path: str = COMPLETIONS) -> bytes:
    head = f"POST {path} HTTP/{version}\r\nHost: localhost\r\nContent-Type: application/json\r\n{fields}"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def talk(running: Any, sent: bytes) -> bytes:
    """What comes until a whole answer with a length is there, or the end."""
    with socket.create_connection(("127.0.0.1", running.server.port), timeout=600) as sock:
        sock.sendall(sent)
        got = b""
        while piece := sock.recv(1 << 16):
            got += piece
            head, _, body = got.partition(b"\r\n\r\n")
            for line in head.lower().split(b"\r\n"):
                if line.startswith(b"content-length:") and len(body) >= int(line.split(b":")[1]):
                    return got
        return got


@pytest.fixture
def http(server: Any) -> Any:
    with httpx.Client(base_url=server.url, timeout=600) as client:
        yield client


def test_an_offer_of_another_protocol_is_declined_and_the_body_kept(server: Any, until: Any) -> None:
    """Java's HttpClient (Spring AI, LangChain4j) offers h2c with every first request of a connection."""
    offer = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\n"
    whole = post(json.dumps(SHORT).encode(), offer)
    assert talk(server, whole).startswith(b"HTTP/1.1 200 ")
    with socket.create_connection(("127.0.0.1", server.server.port), timeout=600) as sock:  # header, then the body
        head, _, body = whole.partition(b"\r\n\r\n")
        sock.sendall(head + b"\r\n\r\n")

        def is_read() -> bool:
            served = server.server._server.server_state.connections
            return any(one.client == sock.getsockname() and one.cycle for one in served)

        until(lambda: server.in_loop(is_read), "the header was read")
        sock.sendall(body)
        assert sock.recv(1 << 16).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("body", [
    b'{"prompt":' + b"[" * 900 + b"1" + b"]" * 900 + b"}",
    b'{"prompt":"a","foo":' + b"[" * 900 + b"1" + b"]" * 900 + b"}",
    b'{"prompt":"a","stop":' + b"[" * 900 + b"1" + b"]" * 900 + b"}",
], ids=["prompt", "unknown field", "stop"])  # fmt: skip
def test_lists_in_lists_are_a_wrong_field(http: httpx.Client, body: bytes) -> None:
    answer = http.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text


@pytest.mark.parametrize("body", [
    b"[" * 100_000, b'{"prompt":"a","seed":' + b"9" * 5000 + b"}", b'{"prompt":"\xff"}', b"\x1f\x8b\x08\x00",
], ids=["deep", "long number", "not UTF-8", "gzip"])  # fmt: skip
def test_bad_json_of_every_kind_is_400_and_says_why(http: httpx.Client, body: bytes) -> None:
    answer = http.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"] != "There was an error parsing the body"


def test_an_answer_is_a_message_of_the_next_request(server: Any) -> None:
    """How every program with OpenAI's client carries a conversation on."""
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    for as_sent in (lambda message: message, lambda message: message.model_dump()):
        answer = client.chat.completions.create(model="course", messages=messages, max_tokens=4)
        messages += [as_sent(answer.choices[0].message), {"role": "user", "content": "and now?"}]
        assert client.chat.completions.create(model="course", messages=messages, max_tokens=4).choices


@pytest.mark.parametrize("body", [
    {**SHORT, "stream": True, "stream_options": {"include_usage": None}}, {**SHORT, "n": 2, "best_of": 2},
])  # fmt: skip
def test_what_asks_for_nothing_is_taken(http: httpx.Client, body: dict[str, Any]) -> None:
    assert http.post(COMPLETIONS, json=body).status_code == 200


@pytest.mark.parametrize(("path", "body"), [
    (CHAT, {"messages": [{"role": "user", "content": [{}] * 20_000}]}),
    (CHAT, {"messages": [{"role": 1, "content": [{}]}] * 9_000}),
    (COMPLETIONS, {str(number): 1 for number in range(20_000)}),
], ids=["parts", "messages", "unknown fields"])  # fmt: skip
def test_validation_does_not_collect_every_mistake_of_a_large_body(http: httpx.Client, path: str, body: Any) -> None:
    """4 MB of {} as parts are 2.6 million errors and hold up the event loop, all streams, for 45 s."""
    answer = http.post(path, json=body)
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    more = int(message.rpartition("(")[2].split(" more")[0]) if message.endswith(" more)") else 0
    assert more < 1000, message[:200]


def test_the_loop_turns_while_a_long_text_is_tokenized(server: Any, until: Any) -> None:
    """Tokenizer.encode keeps the GIL (6 s for 4 MB), encode_batch and encode_batch_fast do not."""
    text, ticks, stop = "hello wo" * 100_000, 0, threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not stop.wait(0.001):
            ticks += 1

    thread = threading.Thread(target=tick)
    thread.start()
    until(lambda: ticks, "the other thread turns")
    most = 0
    for _ in range(20):  # it may get no processor meanwhile
        before = ticks
        server.llm.encode(text)
        most = max(most, ticks - before)
        if most > 30:
            break
    stop.set()
    thread.join()
    assert most > 30, "with the GIL kept it is one at the beginning and some at the end"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_with_another_request_in_the_pipe_frees_its_blocks(
    serve: Any, until: Any, stream: bool
) -> None:
    running = serve()
    body = json.dumps({**SHORT, "max_tokens": 1500, "ignore_eos": True, "stream": stream}).encode()
    with socket.create_connection(("127.0.0.1", running.server.port)) as sock:
        sock.sendall(post(body) + post(body))
        until(lambda: running.engine.requests, "it runs")
        [request] = running.engine.requests.values()
    until(running.is_idle, "its blocks are free")
    assert request.finish_reason == "abort", "it ran to its end"


def test_no_answer_leads_to_a_place_that_the_client_named(serve: Any) -> None:
    running = serve({"api_keys": ("key",)})  # without one, nobody may name it
    headers = {"content-type": "application/json", "host": "evil.example", "authorization": "Bearer key"}
    answer = httpx.post(f"{running.url}{COMPLETIONS}/", content=json.dumps(SHORT), headers=headers, timeout=600)
    assert answer.status_code == 404
    assert "evil.example" not in answer.headers.get("location", "")


def test_to_a_client_of_http_1_0_a_stream_comes_without_chunks_and_ends_with_the_connection(server: Any) -> None:
    """nginx speaks HTTP/1.0 to what is behind it unless told otherwise; chunks were part of the text to it."""
    streamed = post(json.dumps({**SHORT, "stream": True}).encode(), version="1.0")
    whole, wrong = post(json.dumps(SHORT).encode(), version="1.0"), post(b"{", version="1.0")
    said = []
    for sent in (streamed, whole, wrong):
        with socket.create_connection(("127.0.0.1", server.server.port), timeout=600) as sock:
            sock.sendall(sent)
            head, _, body = b"".join(iter(lambda: sock.recv(1 << 16), b"")).partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in head.lower()
        assert b"connection: close" in head.lower()
        said.append((head.split()[1], body))
    events = said[0][1].decode().removesuffix("\n\n").split("\n\n")
    assert events[-1] == "data: [DONE]"
    text = "".join(json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events[:-1])
    assert text == json.loads(said[1][1])["choices"][0]["text"]
    assert [status for status, _ in said] == [b"200", b"200", b"400"]


@pytest.mark.parametrize("body", [b"{", b"[" * 100_000], ids=["bad", "deep"])
def test_without_a_key_nothing_is_read(serve: Any, body: bytes) -> None:
    running = serve({"api_keys": ("secret",)})
    answer = httpx.post(
        running.url + COMPLETIONS, content=body, headers={"content-type": "application/json"}, timeout=600
    )
    assert answer.status_code == 401, answer.text
