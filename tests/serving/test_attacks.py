"""What an attacker, and a client by mistake, sends; each of these held when it was tried."""

from __future__ import annotations

import json
import random
import signal
import socket
import struct
import threading
import typing
from typing import Any

import httpx
import openai
import pydantic
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from prometheus_client.parser import text_string_to_metric_families

from reference_impl.interfaces import SamplingParams

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SHORT = {"prompt": "def f(", "max_tokens": 3, "temperature": 0}
LONG = {**SHORT, "max_tokens": 1500, "ignore_eos": True}


def post(body: bytes, fields: str = "", length: int | None = None) -> bytes:
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{fields}"
    declared = "" if length == -1 else f"Content-Length: {len(body) if length is None else length}\r\n"
    return f"{head}{declared}\r\n".encode() + body


def connect(running: Any) -> socket.socket:
    return socket.create_connection(("127.0.0.1", running.server.port), timeout=600)


def until_closed(sock: socket.socket) -> bytes:
    got = b""
    while piece := sock.recv(1 << 16):
        got += piece
    return got


def events(text: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]


@pytest.fixture
def http(server: Any) -> Any:
    with httpx.Client(base_url=server.url, timeout=600) as client:
        yield client


# --- where one request ends and another begins ----------------------------------------------------------------------

BODY = json.dumps(SHORT).encode()
CHUNKED = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)


@pytest.mark.parametrize("sent", [
    post(CHUNKED, "Transfer-Encoding: chunked\r\nContent-Length: 5\r\n", -1),
    post(CHUNKED, "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n", -1),
    post(CHUNKED, "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n", -1),
    post(CHUNKED, "Transfer-Encoding : chunked\r\n", -1),
    post(CHUNKED, "Transfer-Encoding: xchunked\r\n", -1),
    post(BODY, "Content-Length: 3\r\n"),
    post(BODY, f"Content-Length: +{len(BODY)}\r\n", -1),
    post(BODY, "Content-Length: -1\r\n", -1),
    post(BODY, "Content-Length: 99999999999999999999999\r\n", -1),
    post(BODY, "X-A: a\x00b\r\n"),
    post(BODY).replace(b"\r\n", b"\n"),
    post(b"-5\r\n" + BODY, "Transfer-Encoding: chunked\r\n", -1),
    post(b"FFFFFFFFFFFFFFFFF\r\n" + BODY, "Transfer-Encoding: chunked\r\n", -1),
], ids=str)  # fmt: skip
def test_a_request_of_unclear_length_is_refused_and_nothing_after_it_is_read(server: Any, sent: bytes) -> None:
    with connect(server) as sock:
        sock.sendall(sent + b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        got = until_closed(sock)
    assert got.startswith(b"HTTP/1.1 400 "), got
    assert got.count(b"HTTP/1.1 ") == 1, got


def test_requests_in_one_packet_and_a_request_in_many_are_answered_in_turn(server: Any) -> None:
    stream = post(json.dumps({**SHORT, "stream": True}).encode())
    with connect(server) as sock:
        sock.sendall(post(CHUNKED, "Transfer-Encoding: chunked\r\n", -1) + stream)
        for number in post(BODY, "Connection: close\r\n"):
            sock.sendall(bytes([number]))
        got = until_closed(sock)
    assert got.count(b"HTTP/1.1 200 OK") == 3, got
    assert got.index(b"content-length") < got.index(b"[DONE]") < got.rindex(b"content-length")


# --- clients that go ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_client_may_go_at_any_point(serve: Any, until: Any, serial: Any, reset: bool, stream: bool) -> None:
    """In the headers, in the body, before and after Expect, in the queue, mid-way; a neighbour does not notice."""
    running = serve()
    whole = post(json.dumps({**LONG, "n": 2, "stream": stream}).encode())
    expecting = whole.replace(b"Host: localhost", b"Host: localhost\r\nExpect: 100-continue")
    cuts = [(whole, 9), (whole, 70), (whole, len(whole) - 1), (whole, len(whole)), (expecting, len(expecting))]
    neighbour: list[str] = []
    ask: dict[str, Any] = {**SHORT, "max_tokens": 100}
    client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
    thread = threading.Thread(
        target=lambda: neighbour.append(client.completions.create(model="course", **ask).choices[0].text)
    )
    thread.start()
    for sent, length in cuts:
        for wait in (False, True):
            with connect(running) as sock:
                sock.sendall(sent[:length])
                if wait and length == len(sent):
                    until(lambda: len(running.engine.requests) > 1 or not thread.is_alive(), "it runs")
                if reset:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    thread.join(600)
    until(running.is_idle, "all blocks are free")
    metrics = httpx.get(f"{running.url}/metrics", timeout=600).text
    assert 'inferlab:request_success_total{finished_reason="length"} 1.0' in metrics, (
        "only the neighbour ran to its end"
    )
    expected = "".join(serial.stream("def f(", SamplingParams(max_tokens=100, temperature=0)))
    assert neighbour == [expected]


# --- texts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", ["日本語😀", "e\u0301 🧑‍🚀", "a\u2028\x00", "<|im_start|>user\nhi"])
def test_any_stop_string_cuts_the_stream_and_the_whole_alike(http: httpx.Client, prompt: str) -> None:
    """Stop strings from everywhere in the answer, so over the borders of tokens, too."""
    ask = {"prompt": prompt, "max_tokens": 40, "temperature": 1.5, "seed": 7, "ignore_eos": True}
    full = http.post(COMPLETIONS, json=ask).json()["choices"][0]["text"]
    rng = random.Random(prompt)
    for _ in range(3):
        begin = rng.randrange(len(full) - 4)
        stop = full[begin : begin + rng.randrange(1, 5)]
        whole = http.post(COMPLETIONS, json={**ask, "stop": ["\x07never", stop]}).json()["choices"][0]
        streamed = http.post(COMPLETIONS, json={**ask, "stop": stop, "stream": True})
        choices = [event["choices"][0] for event in events(streamed.content.decode("utf-8"))]
        assert whole["text"] == full[: full.index(stop)] == "".join(choice["text"] for choice in choices), stop
        assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["stop"]


def test_logprobs_and_usage_are_the_same_streamed_and_whole(http: httpx.Client) -> None:
    ask = {"prompt": "日本😀", "max_tokens": 30, "temperature": 1.9, "seed": 3, "n": 3, "logprobs": 2}
    ask["ignore_eos"] = True
    whole = http.post(COMPLETIONS, json=ask).json()
    streamed = http.post(COMPLETIONS, json={**ask, "stream": True, "stream_options": {"include_usage": True}})
    *chunks, last = events(streamed.text)
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert last["usage"][name] == whole["usage"][name]
    assert last["choices"] == []
    for choice in whole["choices"]:
        pieces = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == choice["index"]]
        for name in ("tokens", "token_logprobs", "text_offset"):
            together = [entry for piece in pieces for entry in piece["logprobs"][name]]
            assert together == choice["logprobs"][name], name
        assert len(choice["logprobs"]["tokens"]) == 30


# --- shapes ---------------------------------------------------------------------------------------------------------


def unknown(annotation: Any, data: Any, place: str) -> list[str]:
    """Keys of `data` that OpenAI's type does not know, and required ones that are not there."""
    if typing.get_origin(annotation) is typing.Annotated:
        return unknown(typing.get_args(annotation)[0], data, place)
    inner = [kind for kind in typing.get_args(annotation) if kind is not type(None)]
    if isinstance(data, list):
        if typing.get_origin(annotation) is list:
            return [line for item in data for line in unknown(inner[0], item, f"{place}[]")]
        return [line for kind in inner for line in unknown(kind, data, place)]
    if isinstance(data, dict):
        if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
            fields = annotation.model_fields
            wrong = [f"{place}.{key}: unknown" for key in data.keys() - fields.keys()]
            wrong += [f"{place}.{key}: missing" for key, f in fields.items() if f.is_required() and key not in data]
            known = data.keys() & fields.keys()
            return wrong + [w for key in known for w in unknown(fields[key].annotation, data[key], f"{place}.{key}")]
        return [line for kind in inner if kind is not dict for line in unknown(kind, data, place)]
    return []


@pytest.mark.parametrize("more", [{}, {"n": 2}, {"logprobs": 2}], ids=str)
def test_answers_have_the_keys_of_openai_s_types_and_no_others(http: httpx.Client, more: dict[str, Any]) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, **more}
    if "logprobs" in more:
        chat |= {"logprobs": True, "top_logprobs": 2}
    cases = ((CHAT, chat, ChatCompletion, ChatCompletionChunk), (COMPLETIONS, SHORT | more, Completion, Completion))
    for path, ask, whole, chunk in cases:
        assert unknown(whole, http.post(path, json=ask).json(), "$") == []
        streamed = http.post(path, json={**ask, "stream": True, "stream_options": {"include_usage": True}})
        assert [w for event in events(streamed.text) for w in unknown(chunk, event, "$")] == []


def test_the_metrics_are_prometheus_text(http: httpx.Client) -> None:
    http.post(COMPLETIONS, json=SHORT)
    families = list(text_string_to_metric_families(http.get("/metrics").text))
    samples = {sample.name: sample for family in families for sample in family.samples}
    assert samples["inferlab:request_success_total"].labels.keys() == {"finished_reason"}
    for family in families:
        if family.type == "histogram":
            buckets = [s.value for s in family.samples if s.name.endswith("_bucket")]
            assert buckets == sorted(buckets)
            assert buckets[-1] == samples[f"{family.name}_count"].value


# --- signals --------------------------------------------------------------------------------------------------------


def test_told_twice_to_end_it_ends_once_and_its_clients_get_an_error(inferlab: Any) -> None:
    process = inferlab("--shutdown-seconds", "1")
    half_open = socket.create_connection(("127.0.0.1", int(process.url.rsplit(":", 1)[1])))
    half_open.sendall(b"POST /v1/comp")
    asked = {**LONG, "n": 64, "stream": True}
    with httpx.stream("POST", process.url + COMPLETIONS, json=asked, timeout=600) as answer:
        lines = answer.iter_lines()
        next(lines)
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
    half_open.close()
    assert process.wait(600) == 0
    assert "error" in json.loads(rest[-1].removeprefix("data: "))
    assert "data: [DONE]" not in rest
