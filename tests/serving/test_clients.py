"""The server as OpenAI's own client sees it: the answers are those of serial runs, whole or in pieces."""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
from importlib import metadata
from typing import Any

import httpx
import openai
import pytest

from reference_impl import LLM, SamplingParams

PROMPT = "def fibonacci(n):\n"
MESSAGES: Any = [{"role": "user", "content": "Write a function that adds two numbers."}]


@pytest.fixture
def client(server: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def greedy(serial: LLM, prompt: Any, max_tokens: int, **more: Any) -> Any:
    return serial.generate(prompt, SamplingParams(max_tokens=max_tokens, temperature=0, **more))[0]


def test_a_completion(client: openai.OpenAI, serial: LLM) -> None:
    expected = greedy(serial, PROMPT, 40)
    got = client.completions.create(model="course", prompt=PROMPT, max_tokens=40, temperature=0)
    assert got.choices[0].text == expected.text
    assert got.choices[0].finish_reason == expected.finish_reason
    assert got.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert got.usage.completion_tokens == len(expected.token_ids)


def test_the_pieces_of_a_stream_are_the_whole(client: openai.OpenAI, serial: LLM) -> None:
    expected = greedy(serial, PROMPT, 40)
    options = {"include_usage": True}
    chunks = list(
        client.completions.create(
            model="course", prompt=PROMPT, max_tokens=40, temperature=0, stream=True, stream_options=options
        )
    )
    assert len(chunks) > 10
    assert "".join(c.choices[0].text for c in chunks if c.choices) == expected.text
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == expected.finish_reason
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == len(expected.token_ids)
    assert len({c.id for c in chunks}) == 1


def test_a_chat(client: openai.OpenAI, serial: LLM) -> None:
    expected = greedy(serial, serial.chat_prompt(MESSAGES), 40)
    got = client.chat.completions.create(model="course", messages=MESSAGES, max_completion_tokens=40, temperature=0)
    assert got.choices[0].message.content == expected.text
    chunks = list(
        client.chat.completions.create(
            model="course", messages=MESSAGES, max_completion_tokens=40, temperature=0, stream=True
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == expected.text
    assert chunks[-1].choices[0].finish_reason == expected.finish_reason


def test_a_chat_without_a_limit_ends_with_the_model_or_where_the_memory_of_the_model_does(
    client: openai.OpenAI,
) -> None:
    got = client.chat.completions.create(model="course", messages=MESSAGES, temperature=0)
    assert got.choices[0].finish_reason in ("stop", "length")


def test_content_in_parts_is_the_text(client: openai.OpenAI) -> None:
    parts: Any = [
        {
            "role": "user",
            "content": [{"type": "text", "text": t} for t in ("Write a function ", "that adds two numbers.")],
        }
    ]
    answers = [
        client.chat.completions.create(model="course", messages=m, max_tokens=12, temperature=0)
        .choices[0]
        .message.content
        for m in (parts, MESSAGES)
    ]
    assert answers[0] == answers[1]


def test_the_async_client_and_many_streams_at_once(server: Any, serial: LLM) -> None:
    prompts = [f"class C{i}:\n    def " + "x" * (3 * i) for i in range(24)]
    expected = [greedy(serial, prompt, 4 + i % 12).text for i, prompt in enumerate(prompts)]

    async def one(client: openai.AsyncOpenAI, i: int) -> str:
        stream = await client.completions.create(
            model="course", prompt=prompts[i], max_tokens=4 + i % 12, temperature=0, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            return list(await asyncio.gather(*(one(client, i) for i in range(len(prompts)))))

    assert asyncio.run(all_of_them()) == expected


def test_several_prompts_and_samples_have_their_own_indices(client: openai.OpenAI, serial: LLM) -> None:
    prompts = ["import os\n", "class Queue:\n", "def main():\n"]
    got = client.completions.create(model="course", prompt=prompts, n=2, max_tokens=8, temperature=0)
    assert [c.index for c in got.choices] == list(range(6))
    assert [c.text for c in got.choices] == [greedy(serial, p, 8).text for p in prompts for _ in range(2)]
    assert got.usage.prompt_tokens == sum(len(serial.encode(p)) for p in prompts)
    assert got.usage.completion_tokens == 48


def test_token_ids_are_a_prompt_too(client: openai.OpenAI, serial: LLM) -> None:
    ids = serial.encode(PROMPT)
    texts = [
        client.completions.create(model="course", prompt=p, max_tokens=8, temperature=0).choices[0].text
        for p in (PROMPT, ids, [ids])
    ]
    assert len(set(texts)) == 1


def test_the_same_seed_gives_the_same_samples(client: openai.OpenAI, serial: LLM) -> None:
    def ask(seed: int) -> list[str]:
        got = client.completions.create(model="course", prompt=PROMPT, n=3, seed=seed, temperature=1.0, max_tokens=12)
        return [c.text for c in got.choices]

    expected = serial.generate(PROMPT, SamplingParams(max_tokens=12, n=3, seed=5))[0]
    assert ask(5) == ask(5) == [expected.text, *(o.text for o in expected.others)]
    assert ask(5) != ask(6)
    assert ask(-1) == ask(-1)


def test_penalties_filters_and_bans_reach_the_sampler(client: openai.OpenAI, serial: LLM) -> None:
    asked = {"presence_penalty": 1.5, "frequency_penalty": 0.5, "top_p": 0.9, "seed": 3, "temperature": 0.8}
    extra = {"top_k": 7, "min_p": 0.05, "repetition_penalty": 1.2, "ignore_eos": True}
    got = client.completions.create(model="course", prompt=PROMPT, max_tokens=20, **asked, extra_body=extra)
    expected = serial.generate(PROMPT, SamplingParams(max_tokens=20, **asked, **extra))[0]
    assert got.choices[0].text == expected.text


def test_a_stop_string_ends_the_text_before_it(client: openai.OpenAI, serial: LLM) -> None:
    whole = greedy(serial, PROMPT, 40).text
    stop = whole[len(whole) // 2 :][:5]
    for stream in (False, True):
        answer = client.completions.create(
            model="course", prompt=PROMPT, max_tokens=40, temperature=0, stop=stop, stream=stream
        )
        choices = [c.choices[0] for c in answer] if stream else answer.choices
        assert "".join(c.text for c in choices) == whole[: whole.index(stop)]
        assert choices[-1].finish_reason == "stop"


def test_logprobs_of_a_completion(client: openai.OpenAI, serial: LLM) -> None:
    expected = greedy(serial, PROMPT, 12, logprobs=3)
    got = client.completions.create(model="course", prompt=PROMPT, max_tokens=12, temperature=0, logprobs=3)
    report = got.choices[0].logprobs
    assert report.token_logprobs == pytest.approx([r.logprob for r in expected.logprobs], abs=1e-4)
    assert "".join(report.tokens) == got.choices[0].text
    assert report.text_offset == [len("".join(report.tokens[:i])) for i in range(12)]
    assert all(len(top) >= 3 for top in report.top_logprobs)
    streamed = client.completions.create(
        model="course", prompt=PROMPT, max_tokens=12, temperature=0, logprobs=3, stream=True
    )
    chunks = [c.choices[0].logprobs for c in streamed if c.choices[0].logprobs.tokens]
    assert [t for c in chunks for t in c.tokens] == report.tokens
    assert [o for c in chunks for o in c.text_offset] == report.text_offset


def test_logprobs_of_a_chat_say_the_bytes(client: openai.OpenAI) -> None:
    got = client.chat.completions.create(
        model="course", messages=MESSAGES, max_tokens=12, temperature=0, logprobs=True, top_logprobs=4
    )
    report = got.choices[0].logprobs.content
    assert bytes(b for entry in report for b in entry.bytes).decode() == got.choices[0].message.content
    assert all(len(entry.top_logprobs) == 4 for entry in report)
    assert all(math.isclose(e.logprob, max(t.logprob for t in e.top_logprobs)) for e in report)


def test_characters_of_several_tokens_arrive_whole(client: openai.OpenAI) -> None:
    """Random ids at a high temperature make broken UTF-8; no piece may end inside a character that the text has."""
    for seed in range(3):
        asked: Any = {
            "model": "course",
            "prompt": "naïve 日本語 🙂 ",
            "max_tokens": 30,
            "temperature": 3.0,
            "seed": seed,
        }
        whole = client.completions.create(**asked).choices[0].text
        pieces = [c.choices[0].text for c in client.completions.create(**asked, stream=True)]
        assert "".join(pieces) == whole
        assert "日本語" not in whole


def test_models(client: openai.OpenAI) -> None:
    assert [m.id for m in client.models.list()] == ["course"]
    assert client.models.retrieve("course").id == "course"
    with pytest.raises(openai.NotFoundError, match="this server has 'course'"):
        client.models.retrieve("gpt-5")
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.completions.create(model="gpt-5", prompt="x")


def test_a_prompt_that_was_there_before_is_found_in_the_cache(client: openai.OpenAI) -> None:
    asked: Any = {"model": "course", "prompt": "# the same beginning\n" * 20, "max_tokens": 1}
    used = [client.completions.create(**asked).usage.prompt_tokens_details.cached_tokens for _ in range(2)]
    assert used[0] == 0
    assert used[1] > 100
    salted = client.completions.create(**asked, extra_body={"cache_salt": "mine"})
    assert salted.usage.prompt_tokens_details.cached_tokens == 0


@pytest.mark.parametrize("apart", [False, True], ids=["thread", "process"])
def test_embeddings(apart: bool, server: Any, serve: Any, serial: LLM) -> None:
    """OpenAI's client asks for base64 by itself."""
    url = serve(process=True).url if apart else server.url
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    texts = [PROMPT, "x", "import os\n" * 30]
    answer = client.embeddings.create(model="course", input=texts)
    assert [one.index for one in answer.data] == [0, 1, 2]
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(len(serial.encode(text)) for text in texts)
    for one, expected in zip(answer.data, serial.embed(texts), strict=True):
        assert math.hypot(*one.embedding) == pytest.approx(1, abs=1e-5)
        assert one.embedding == pytest.approx(expected.outputs.embedding, abs=1e-4)
    [raw] = client.embeddings.create(
        model="course", input=serial.encode(PROMPT), encoding_format="float",
        extra_body={"pooling": "last", "normalize": False},
    ).data  # fmt: skip
    [expected] = serial.embed(PROMPT, "last", normalize=False)
    assert raw.embedding == pytest.approx(expected.outputs.embedding, rel=1e-3, abs=1e-3)


def test_tokens_of_a_text_and_of_a_conversation_and_back(server: Any, serial: LLM) -> None:
    text = "def f(x):\n    return 'é'\n"
    with httpx.Client(base_url=server.url, timeout=600) as http:
        found = http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
        assert found["tokens"] == serial.encode(text)
        assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
        assert found["max_model_len"] == server.engine.max_model_len
        assert http.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": text}
        chat = http.post("/tokenize", json={"messages": MESSAGES}).json()
        assert chat["tokens"] == serial.chat_prompt(MESSAGES)
        assert chat["token_strs"] is None
        assert http.post("/tokenize", json={"prompt": ""}).json()["count"] == 0
        assert http.get("/version").json() == {"version": metadata.version("inferlab")}
        for path, body, said in (
            ("/tokenize", {}, "prompt or messages"), ("/tokenize", {"prompt": "x", "messages": MESSAGES}, "not both"),
            ("/detokenize", {"tokens": [5, 100_000]}, "100000 is outside the vocabulary"),
            ("/detokenize", {"tokens": "x"}, "tokens"), ("/tokenize", {"prompt": "x", "model": "gpt-5"}, "gpt-5"),
            ("/tokenize", {"prompt": "\ud83d"}, "half a surrogate pair"),
        ):  # fmt: skip
            answer = http.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
            assert answer.status_code in (400, 404)
            assert said in answer.json()["error"]["message"]


def test_what_cannot_be_embedded_is_refused_by_name(client: openai.OpenAI, server: Any) -> None:
    longest = server.engine.max_model_len
    with pytest.raises(openai.BadRequestError, match=str(longest)) as caught:
        client.embeddings.create(model="course", input=[5] * (longest + 3))
    assert caught.value.body["param"] == "input"  # type: ignore[index]
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.embeddings.create(model="ada", input="x")
    for wrong, said in (
        ({"dimensions": 64}, "dimensions"), ({"extra_body": {"pooling": "max"}}, "pooling"), ({"input": ""}, "input"),
        ({"extra_body": {"truncate": True}}, "truncate"),
    ):  # fmt: skip
        with pytest.raises(openai.APIStatusError, match=said):
            client.embeddings.create(**{"model": "course", "input": "x"} | wrong)


@pytest.mark.curl
def test_curl(server: Any, serial: LLM) -> None:
    body = json.dumps({"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "stream": True})
    command = ["curl", "-sN", f"{server.url}/v1/completions", "-H", "Content-Type: application/json", "-d", body]
    said = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True).stdout
    events = [line.removeprefix("data: ") for line in said.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    texts = [json.loads(event)["choices"][0]["text"] for event in events[:-1]]
    assert "".join(texts) == greedy(serial, PROMPT, 8).text


def test_it_is_idle_in_the_end(server: Any, until: Any) -> None:
    until(server.is_idle, "it is idle")  # a client has its answer before the server has closed the stream
