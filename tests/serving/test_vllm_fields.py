"""What vLLM's server and OpenAI's completions take besides: biases, least lengths, echoes, prompts' probabilities.
OpenAI's own client asks."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from reference_impl import LLM, SamplingParams

PROMPT = "def f(x):"


@pytest.fixture
def client(server: Any) -> Any:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=600) as client:
        yield client


def complete(client: openai.OpenAI, **fields: Any) -> Any:
    extra = {name: fields.pop(name) for name in EXTRA if name in fields}
    fields = {"model": "course", "prompt": PROMPT, "max_tokens": 8, "temperature": 0} | fields
    return client.completions.create(**fields, extra_body=extra)


EXTRA = (
    "allowed_token_ids", "min_tokens", "include_stop_str_in_output", "skip_special_tokens", "prompt_logprobs",
    "ignore_eos", "top_k", "bad_words",
)  # fmt: skip
FREE: dict[str, Any] = {"max_tokens": 8, "temperature": 0}


@pytest.mark.parametrize(
    ("asked", "means"),
    [
        ({"logit_bias": {"300": 12, "301": -100}}, {"logit_bias": {300: 12, 301: -100}}),
        ({"logit_bias": {"7": 100}}, {"logit_bias": {7: 100}}),
        ({"logit_bias": {}}, {}),
        ({"min_tokens": 4, "ignore_eos": True}, {"min_tokens": 4, "ignore_eos": True}),
        ({"top_k": -1, "seed": 3}, {"top_k": 0, "seed": 3}),
        ({"stop": ["("], "include_stop_str_in_output": True}, {"stop": ["("], "include_stop_str_in_output": True}),
        ({"skip_special_tokens": False}, {"skip_special_tokens": False}),
        ({"allowed_token_ids": [300, 301, 17], "seed": 2}, {"allowed_token_ids": (300, 301, 17), "seed": 2}),
        ({"bad_words": ["return", " x"]}, {"bad_words": ["return", " x"]}),
    ],
    ids=str,
)
def test_fields_mean_what_they_mean_in_python(asked: dict, means: dict, client: openai.OpenAI, serial: LLM) -> None:
    [expected] = serial.generate([PROMPT], SamplingParams(**FREE | means))
    assert complete(client, **asked).choices[0].text == expected.text
    streamed = complete(client, **asked, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == expected.text


def test_text_offsets_are_places_in_the_text(client: openai.OpenAI, serial: LLM) -> None:
    """A token may be a part of a character: its place is that character's."""
    assert serial.tokenizer is not None
    prompt = "x = '日本 é'  # 😀"
    ids = serial.encode(prompt)
    assert any("\ufffd" in serial.tokenizer.decode([token]) for token in ids)
    for stream in (False, True):
        answer = complete(client, prompt=prompt, echo=True, logprobs=0, ignore_eos=True, stream=stream)
        parts = [c.choices[0] for c in answer if c.choices[0].logprobs] if stream else [answer.choices[0]]
        tokens = [token for part in parts for token in part.logprobs.tokens]
        found = [place for part in parts for place in part.logprobs.text_offset]
        text, raw, expected = "".join(part.text for part in parts), b"", []
        for token in tokens:
            expected.append(len(raw.decode("utf-8", "ignore")))
            raw += bytes.fromhex(token[8:].replace("\\x", "")) if token.startswith("bytes:") else token.encode()
        assert len(tokens) == len(ids) + 8
        assert found[: len(ids)] == expected[: len(ids)]
        assert found == sorted(found)
        assert found[-1] <= len(text)
        assert text.startswith(prompt)


def test_a_chat_takes_them_too(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="course", messages=[{"role": "user", "content": "x"}], max_tokens=5, logit_bias={"300": 100},
        extra_body={"min_tokens": 3, "prompt_logprobs": 1},
    )  # fmt: skip
    assert answer.choices[0].finish_reason == "length"
    assert answer.model_extra is not None
    assert len(answer.model_extra["prompt_logprobs"]) == answer.usage.prompt_tokens  # type: ignore[union-attr]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_echo_gives_the_prompt_before_the_text(stream: bool, n: int, client: openai.OpenAI, serial: LLM) -> None:
    assert serial.tokenizer is not None
    prompts: list[Any] = [[5, 6, 7], [9, 300]]
    plain = complete(client, prompt=prompts, n=n, temperature=1, seed=4)
    asked = complete(client, prompt=prompts, n=n, temperature=1, seed=4, echo=True, stream=stream)
    texts = dict.fromkeys(range(2 * n), "")
    for part in asked if stream else [asked]:
        for choice in part.choices:
            texts[choice.index] += choice.text
    assert len(texts) == 2 * n
    for choice in plain.choices:
        assert texts[choice.index] == serial.tokenizer.decode(prompts[choice.index // n]) + choice.text
    assert complete(client, echo=True).choices[0].text.startswith(PROMPT)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 4])
def test_echo_with_logprobs_scores_the_prompt(
    stream: bool, max_tokens: int, client: openai.OpenAI, serial: LLM
) -> None:
    """As evaluation harnesses ask; with max_tokens 0 there is nothing but the prompt."""
    ids = serial.encode(PROMPT)
    p = SamplingParams(max_tokens=max(1, max_tokens), temperature=0, logprobs=2, prompt_logprobs=2, ignore_eos=True)
    [expected] = serial.generate([ids], p)
    assert expected.prompt_logprobs is not None
    answer = complete(
        client, prompt=ids, logprobs=2, echo=True, max_tokens=max_tokens, ignore_eos=True, stream=stream, n=2
    )
    values: dict[int, list[Any]] = {0: [], 1: []}
    tops: dict[int, list[Any]] = {0: [], 1: []}
    text, ends = {0: "", 1: ""}, {}
    for part in answer if stream else [answer]:
        for choice in part.choices:
            values[choice.index] += choice.logprobs.token_logprobs
            tops[choice.index] += choice.logprobs.top_logprobs
            text[choice.index] += choice.text
            ends[choice.index] = choice.finish_reason
    reports = [*expected.prompt_logprobs, *(expected.logprobs if max_tokens else [])]
    for index in (0, 1):
        assert text[index] == PROMPT + (expected.text if max_tokens else "")
        assert values[index][0] is tops[index][0] is None
        assert values[index][1:] == pytest.approx([r.logprob for r in reports if r is not None], abs=1e-4)
        assert len(tops[index]) == len(reports)
        assert all(2 <= len(top) <= 3 for top in tops[index][1:])
    assert ends == {0: "length", 1: "length"}
    if not stream:
        assert answer.usage.completion_tokens == 2 * max_tokens
        assert answer.choices[0].logprobs.text_offset[0] == 0
        assert len(answer.choices[0].logprobs.tokens) == len(reports)


def test_prompt_logprobs_are_vllms(client: openai.OpenAI, serial: LLM) -> None:
    prompts: list[Any] = [[5, 6, 7], [9, 300, 301, 302]]
    answer = complete(client, prompt=prompts, prompt_logprobs=2, n=2)
    outputs = serial.generate(prompts, SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=2))
    assert serial.tokenizer is not None
    for choice in answer.choices:
        found = choice.model_extra["prompt_logprobs"]
        expected = outputs[choice.index // 2].prompt_logprobs
        assert expected is not None
        assert found[0] is None
        assert len(found) == len(expected) == len(prompts[choice.index // 2])
        for entry, report in zip(found[1:], expected[1:], strict=True):
            assert report is not None
            assert entry[str(report.token)]["logprob"] == pytest.approx(report.logprob, abs=1e-4)
            ranked = sorted((e["rank"], int(t)) for t, e in entry.items() if e["rank"] is not None)
            assert ranked == [(rank, token) for rank, (token, _) in enumerate(report.top, 1)]
            assert entry[str(report.token)]["decoded_token"] == serial.tokenizer.decode([report.token])


def test_usage_can_come_with_every_chunk(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = complete(
        client, prompt=[[5, 6], [7, 8, 9]], n=2, ignore_eos=True, stream=True, stream_options=options
    )
    seen = dict.fromkeys(range(4), 0)
    for chunk in chunks:
        [choice] = chunk.choices
        assert chunk.usage.prompt_tokens == (2, 3)[choice.index // 2]
        assert chunk.usage.completion_tokens > seen[choice.index]
        assert chunk.usage.total_tokens == chunk.usage.prompt_tokens + chunk.usage.completion_tokens
        seen[choice.index] = chunk.usage.completion_tokens
    assert seen == dict.fromkeys(range(4), 8)
    assert (last.choices, last.usage.prompt_tokens, last.usage.completion_tokens) == ([], 5, 32)
    chat = client.chat.completions.create(
        model="course", messages=[{"role": "user", "content": "x"}], max_tokens=3, stream=True, stream_options=options
    )
    used = [chunk.usage.completion_tokens for chunk in chat if chunk.usage]
    assert used[0] == 0
    assert used == sorted(used)
    alone: Any = {"continuous_usage_stats": True}
    assert all(c.usage is None for c in complete(client, stream=True, stream_options=alone))  # as vLLM has it


def test_what_ended_a_choice_is_said(client: openai.OpenAI, serial: LLM) -> None:
    [free] = serial.generate([PROMPT], SamplingParams(**FREE))
    stop, token = free.text[2], free.token_ids[3]
    by_text, by_token = (
        complete(client, stop=[stop]),
        client.completions.create(
            model="course", prompt=PROMPT, max_tokens=8, temperature=0, extra_body={"stop_token_ids": [token]}
        ),
    )
    assert by_text.choices[0].model_extra["stop_reason"] == stop
    assert by_token.choices[0].model_extra["stop_reason"] == token  # type: ignore[index]
    assert not complete(client).choices[0].model_extra


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_the_cache_cuts_says_so(stream: bool, serve: Any, caplog: pytest.LogCaptureFixture) -> None:
    tight = serve(num_blocks=3, block_size=16)
    with openai.OpenAI(base_url=f"{tight.url}/v1", api_key="none", max_retries=0, timeout=600) as client:
        for asked, cut in ((500, "kv_cache"), (5, None)):
            answer = complete(client, max_tokens=asked, ignore_eos=True, stream=stream)
            *_, last = [part.choices[0] for part in (answer if stream else [answer])]
            assert (last.finish_reason, last.model_extra.get("cut_by")) == ("length", cut)
    assert sum("KV cache (3 blocks of 16)" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"temperature": -1}, "temperature", "invalid_value"),
        ({"max_tokens": "many"}, "max_tokens", "invalid_type"),
        ({"logit_bias": {"5": 1000}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"4096": 1}}, "logit_bias", "invalid_value"),
        ({"min_tokens": 9}, "min_tokens", "invalid_value"),
        ({"allowed_token_ids": [4096]}, "allowed_token_ids", "invalid_value"),
        ({"allowed_token_ids": []}, "allowed_token_ids", "invalid_value"),
        ({"suffix": "x"}, "suffix", "unsupported_parameter"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
    ],
    ids=str,
)
def test_a_wrong_field_is_a_bad_request_with_its_name(
    fields: dict, param: str, code: str, client: openai.OpenAI
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        complete(client, **fields)
    assert (str(refused.value.param).split(".")[0], refused.value.code) == (param, code)
    assert refused.value.type == "invalid_request_error"


def test_an_unknown_field_is_named_and_a_missing_one_too(server: Any) -> None:
    for body, param, code in (
        ({"prompt": "x", "temprature": 1}, "temprature", "unknown_parameter"),
        ({}, "prompt", "missing_required_parameter"),
    ):  # fmt: skip
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=600)
        assert answer.status_code == 400
        assert (answer.json()["error"]["param"], answer.json()["error"]["code"]) == (param, code)


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        complete(client, model="gpt-4")
    assert (refused.value.param, refused.value.code) == ("model", "model_not_found")
    assert "gpt-4" in refused.value.message
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")
    assert client.models.retrieve("course").id == "course"


def test_tokens_with_and_without_those_that_the_tokenizer_adds(server: Any, serial: LLM) -> None:
    for added in (True, False):
        body = {"prompt": PROMPT, "add_special_tokens": added}
        answer = httpx.post(f"{server.url}/tokenize", json=body, timeout=600).json()
        assert answer["tokens"] == serial.tokens_of(PROMPT, add_special_tokens=added)
        assert (answer["count"], answer["token_strs"]) == (len(answer["tokens"]), None)
        assert answer["max_model_len"] == server.engine.max_model_len
