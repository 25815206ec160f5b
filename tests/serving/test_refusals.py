"""What the server refuses: the status, the place, and what to do; nothing is left behind."""

from __future__ import annotations

import http.client
import json
import socket
from typing import Any

import httpx
import pytest

from reference_impl.serving.app import ServerConfig
from reference_impl.serving.limits import ConnectionLimits

JSON = {"Content-Type": "application/json"}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def head(length: int) -> bytes:
    kind = "Content-Type: application/json"
    return f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\n{kind}\r\nContent-Length: {length}\r\n\r\n".encode()


@pytest.fixture
def asked(server: Any) -> Any:
    with httpx.Client(base_url=server.url, timeout=600, headers=JSON) as client:
        yield client


def error(answer: httpx.Response) -> dict[str, Any]:
    assert answer.headers["content-type"] == "application/json"
    found: dict[str, Any] = answer.json()["error"]
    assert set(found) == {"message", "type", "param", "code"}
    return found


@pytest.mark.parametrize(
    ("body", "place", "said"),
    [
        ({}, "prompt", "required"),
        ({"prompt": ""}, "prompt", "nothing empty"),
        ({"prompt": []}, "prompt", "nothing empty"),
        ({"prompt": ["x"] * 65}, "prompt", "at most 64"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"prompt": "x", "max_tokens": "3"}, "max_tokens", "valid integer"),
        ({"prompt": "x", "max_tokens": True}, "max_tokens", "valid integer"),
        ({"prompt": "x", "n": 129}, "n", "less than or equal to 128"),
        ({"prompt": "x", "temperature": -1}, "temperature", "greater than or equal to 0"),
        ({"prompt": "x", "top_p": 0}, "top_p", "greater than or equal to 0.000000001"),
        ({"prompt": "x", "stop": [""]}, "stop", "1 to 1000 characters"),
        ({"prompt": "x", "stop": ["a"] * 17}, "stop", "at most 16"),
        ({"prompt": "x", "stop": "a" * 1001}, "stop", "1 to 1000 characters"),
        ({"prompt": "x", "stream_options": {"include_use": True}}, "stream_options", "Extra inputs"),
        ({"prompt": ["x", [5]]}, "prompt", "list of either"),
        ({"prompt": [5, True]}, "prompt", "list of either"),
        ({"prompt": "x", "tempreature": 1}, "tempreature", "Extra inputs"),
        ({"prompt": "x", "best_of": 3}, "best_of", "best_of is not implemented"),
        ({"prompt": "x", "bad_words": [" "]}, "bad_words", "match pattern"),
        ({"prompt": "x", "bad_words": ["\x1c"]}, "bad_words", "strings that are not blank"),
        ({"prompt": "x", "bad_words": ["a"] * 257}, "bad_words", "at most 256"),
        ({"prompt": "x", "bad_words": ["a"], "allowed_token_ids": [67]}, "bad_words", "leave some out"),
        ({"prompt": "x", "logit_bias": {"1": 101}}, "logit_bias", "less than or equal to 100"),
        ({"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias", "valid integer"),
        ({"prompt": "x", "logit_bias": {"4096": 1}}, "logit_bias", "outside the vocabulary"),
        ({"prompt": "x", "logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", "at most 1024"),
        ({"prompt": "x", "min_tokens": 17}, "min_tokens", "0 to max_tokens, which is 16"),
        ({"prompt": "x", "stream": True, "prompt_logprobs": 1}, "prompt_logprobs", "not available with stream"),
        ({"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options", "for stream=true only"),
        ([], "body", "valid dictionary"),
    ],
)
def test_a_wrong_field_is_400_with_its_place(asked: httpx.Client, body: Any, place: str, said: str) -> None:
    answer = asked.post(COMPLETIONS, json=body)
    assert answer.status_code == 400
    assert said in error(answer)["message"]
    assert error(answer)["param"].split(".")[0] == place
    assert "SamplingParams" not in error(answer)["message"], "no name of a field of the body"


@pytest.mark.parametrize(
    ("body", "end"),
    [
        ('{"prompt": "x", "temperature": "0.5"}', "a valid number, got '0.5'"),
        ('{"prompt": "x", "temperature": NaN}', ", got nan"),
        ('{"prompt": "x", "n": 0, "seed": 1e400}', "greater than or equal to 1, got 0 (1 more)"),
        ('{"prompt": "x", "stop": ""}', "1 to 1000 characters, got ''"),
        ('{"prompt": ""}', "nothing empty, got ''"),
        ('{"prompt": "x", "foo": 1}', "not permitted"),
        ("{}", "required"),
    ],
)
def test_a_refusal_says_what_came(asked: httpx.Client, body: str, end: str) -> None:
    answer = asked.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert error(answer)["message"].endswith(end)


def test_of_what_is_long_only_the_beginning_is_said(asked: httpx.Client) -> None:
    answer = asked.post(COMPLETIONS, json={"prompt": "x", "n": "9" * 10_000})
    assert len(error(answer)["message"]) < 200


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"messages": []}, "at least 1"),
        ({"messages": [{"content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "audio": {"id": "x"}}]}, "messages.0: audio is not implemented"),
        ({"messages": [{"role": "user", "content": "x"}], "tools": [5]}, "tools.0"),
        ({"messages": [{"role": "user", "content": "x"}], "tool_choice": "required"}, "tool_choice: Input should be"),
        (
            {"messages": [{"role": "user", "content": "x"}], "tools": [{}], "parallel_tool_calls": False},
            "parallel_tool_calls=false is not implemented",
        ),
        ({"messages": [{"role": "user", "content": "x"}], "top_logprobs": 3}, "logprobs=true only"),
        (
            {"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_object"}},
            "not implemented",
        ),
    ],
)
def test_a_wrong_conversation_is_400(asked: httpx.Client, body: Any, said: str) -> None:
    answer = asked.post(CHAT, json=body)
    assert answer.status_code == 400
    assert said in error(answer)["message"]


@pytest.mark.parametrize(
    ("body", "place", "said"),
    [
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages.0.content.0", "a part of type 'image_url' is not implemented",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0", "expected"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": [1]}}]}]},
            "messages.0.tool_calls.0.function.arguments", "expected a text, or a JSON object",
        ),
        ({"messages": [{"role": "user", "content": "x"}], "tools": [{}]}, "tools", "without --tool-call-parser"),
        ({"messages": [{"role": "user"}], "chat_template_kwargs": {"tools": 1}}, "chat_template_kwargs.tools", "own"),
        ({"messages": [{"role": "user", "content": "x"}], "continue_final_message": True}, "messages", "choose"),
    ],
)  # fmt: skip
def test_what_the_chat_encoder_refuses_is_400(asked: httpx.Client, body: Any, place: str, said: str) -> None:
    answer = asked.post(CHAT, json=body)
    assert answer.status_code == 400
    assert said in error(answer)["message"]
    assert error(answer)["param"] == place


def test_brackets_that_are_too_deep_for_a_template_are_400(asked: httpx.Client) -> None:
    deep: Any = []
    for _ in range(300):
        deep = [deep]
    answer = asked.post(CHAT, json={"messages": [{"role": "user", "content": "x", "more": deep}]})
    assert answer.status_code == 400
    assert "more than 64 deep" in error(answer)["message"]


def test_fields_that_change_nothing_are_taken(asked: httpx.Client) -> None:
    harmless = {"user": "u", "metadata": {"a": "b"}, "best_of": 1, "echo": False, "logit_bias": {}, "suffix": None,
                "stop": None, "seed": None, "logprobs": None, "stream_options": None}  # fmt: skip
    assert asked.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 1, **harmless}).status_code == 200


@pytest.mark.parametrize("body", ['{"prompt": "x", ', "", "nonsense", '{"prompt": "x"} trailing', "[" * 5000])
def test_bad_json_is_400_with_the_place(asked: httpx.Client, body: str) -> None:
    answer = asked.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert error(answer)["message"]


def test_bytes_that_are_no_utf_8_are_refused(asked: httpx.Client) -> None:
    answer = asked.post(COMPLETIONS, content=b'{"prompt": "\xff"}', headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert "position 12" in error(answer)["message"]


def test_half_of_a_surrogate_pair_is_refused(asked: httpx.Client) -> None:
    for path, place, body in (
        (COMPLETIONS, "prompt", b'{"prompt": "a\\ud83d"}'),
        (COMPLETIONS, "prompt 1", b'{"prompt": ["a", "a\\ud83d"]}'),
        (CHAT, "messages.0.content", b'{"messages": [{"role": "user", "content": "a\\ud83d"}]}'),
        (CHAT, "messages.0.name", b'{"messages": [{"role": "user", "content": "a", "name": "a\\ud83d"}]}'),
    ):
        answer = asked.post(path, content=body)
        assert answer.status_code == 400
        assert error(answer)["message"].startswith(f"{place}: half a surrogate pair at character 1")


def test_numbers_that_json_does_not_have_are_refused(asked: httpx.Client) -> None:
    for word in ("NaN", "Infinity", "1e999"):
        body = f'{{"prompt": "x", "temperature": {word}}}'
        answer = asked.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 400, word


def test_a_prompt_that_is_too_long_is_400_with_the_numbers(asked: httpx.Client, server: Any) -> None:
    longest = server.engine.max_model_len
    answer = asked.post(COMPLETIONS, json={"prompt": [5] * (longest + 3)})
    assert answer.status_code == 400
    assert str(longest + 3) in error(answer)["message"]
    assert str(longest) in error(answer)["message"]
    chat = asked.post(CHAT, json={"messages": [{"role": "user", "content": "word " * 3 * longest}]})
    assert chat.status_code == 400
    assert str(longest) in error(chat)["message"]


def test_a_token_that_the_model_does_not_have_is_400(asked: httpx.Client) -> None:
    answer = asked.post(COMPLETIONS, json={"prompt": [5, 100_000]})
    assert answer.status_code == 400
    assert "100000 is outside the vocabulary" in error(answer)["message"]


def test_if_one_of_several_prompts_is_refused_none_runs(asked: httpx.Client, server: Any, until: Any) -> None:
    answer = asked.post(COMPLETIONS, json={"prompt": [[5, 6], [5, 100_000]], "max_tokens": 500})
    assert answer.status_code == 400

    until(server.is_idle, "the first prompt has left")


def test_other_places_and_methods(asked: httpx.Client) -> None:
    assert asked.get("/v1/nothing").status_code == 404
    assert asked.get(COMPLETIONS).status_code == 405
    assert error(asked.get("/v1/nothing"))["message"]


def test_keys(serve: Any) -> None:
    running = serve({"api_keys": ("first", "second")})
    body = {"prompt": "x", "max_tokens": 1}
    wrong = ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "first"}, {"Authorization": "Basic first"})
    with httpx.Client(base_url=running.url, timeout=600) as client:
        for headers in (*wrong, {"Authorization": "Bearer firs\u00e9".encode("latin-1")}):
            refused = client.post(COMPLETIONS, json=body, headers=headers)
            assert refused.status_code == 401
            assert refused.headers["www-authenticate"] == "Bearer"
            assert "first" not in refused.text
        assert client.get("/v1/models").status_code == 401
        for key in ("first", "second"):
            assert client.post(COMPLETIONS, json=body, headers={"Authorization": f"Bearer {key}"}).status_code == 200
        for path in ("/health", "/ready", "/metrics", "/status"):
            assert client.get(path).status_code == 200


@pytest.mark.parametrize("key", ["", "with space", "s\u00e9cond", "line\nbreak"])
def test_a_key_that_no_header_can_carry_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match="API key 2: expected visible ASCII"):
        ServerConfig("course", ("good", key))


def test_a_body_that_is_too_long(serve: Any) -> None:
    running = serve({"max_body_bytes": 1000})
    with httpx.Client(base_url=running.url, timeout=600, headers=JSON) as client:
        body = json.dumps({"prompt": "x" * 1000}).encode()
        assert client.post(COMPLETIONS, content=body).status_code == 413

        def in_pieces() -> Any:  # without a length that says so beforehand
            yield body[:500]
            yield body[500:]

        assert client.post(COMPLETIONS, content=in_pieces()).status_code == 413
        assert client.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 1}).status_code == 200


def test_a_body_that_does_not_come(serve: Any) -> None:
    running = serve({"limits": ConnectionLimits(body=0.2)})
    with socket.create_connection(("127.0.0.1", running.server.port), timeout=600) as sock:
        sock.sendall(head(50) + b"{")
        answer = http.client.HTTPResponse(sock)
        answer.begin()
        assert answer.status == 408
        assert json.loads(answer.read())["error"]["message"] == "the body did not come within 0.2 s"


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil", "["])
def test_without_keys_a_page_that_names_itself_127_0_0_1_is_421(server: Any, host: str) -> None:
    """DNS rebinding: to the browser such a page is of one origin with the server, so it could read what runs here."""
    for path in ("/status.json", "/v1/models", "/metrics"):
        refused = httpx.get(server.url + path, headers={"Host": host}, timeout=600)
        assert refused.status_code == 421
        assert f"expected the header Host: an IP address, localhost or 127.0.0.1, got {host!r}" in refused.text
        assert "--api-key" in refused.text


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1:9", "[::1]:8000", "192.168.1.5:80"])
def test_addresses_and_localhost_are_this_server(server: Any, host: str) -> None:
    assert httpx.get(f"{server.url}/health", headers={"Host": host}, timeout=600).status_code == 200


def test_a_server_with_keys_may_have_any_name(serve: Any) -> None:
    running = serve({"api_keys": ("key",)})
    headers = {"Host": "models.example", "Authorization": "Bearer key"}
    assert httpx.get(f"{running.url}/v1/models", headers=headers, timeout=600).status_code == 200


def test_too_many_unfinished_requests_are_429_with_retry_after(serve: Any, until: Any, process: bool) -> None:
    running = serve({"max_unfinished": 3}, process=process)
    with httpx.Client(base_url=running.url, timeout=600) as client:
        slow = {"prompt": "x", "max_tokens": 1900, "ignore_eos": True, "stream": True, "n": 3}
        with client.stream("POST", COMPLETIONS, json=slow) as streaming:
            lines = streaming.iter_lines()  # held: httpx closes the connection with it
            next(lines)
            refused = client.post(COMPLETIONS, json={"prompt": "y", "max_tokens": 1})
            assert refused.status_code == 429
            never = client.post(COMPLETIONS, json={"prompt": ["y", "z"], "n": 2})
            assert never.status_code == 400
            assert "2 prompts with n=2: this server takes 3 samples" in error(never)["message"]
            assert int(refused.headers["retry-after"]) >= 1
            assert error(refused)["type"] == "rate_limit_error"

        until(
            lambda: client.post(COMPLETIONS, json={"prompt": "y", "max_tokens": 1}).status_code == 200, "there is room"
        )


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
def test_what_is_not_said_to_be_json_is_415(server: Any, kind: str | None) -> None:
    headers = {} if kind is None else {"Content-Type": kind}
    answer = httpx.post(f"{server.url}{COMPLETIONS}", content=b'{"prompt": "x"}', headers=headers, timeout=600)
    assert answer.status_code == 415
    assert f"application/json, got {kind or 'none'}" in error(answer)["message"]
