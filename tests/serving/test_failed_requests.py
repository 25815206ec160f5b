"""A request whose logits are not finite, or whose output cannot be given, is answered with an error that says why; the
server goes on."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from reference_impl.features.texts.tokens import TokenText
from tests.picky import Picky

pytestmark = pytest.mark.filterwarnings("ignore:request.*not all finite:RuntimeWarning")
PROMPT = "def fibonacci(n):\n"


def test_whole_answers_streams_and_embeddings_say_why(serve, until) -> None:
    server = serve()
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    asked: dict[str, Any] = {"model": "course", "prompt": PROMPT, "max_tokens": 6, "temperature": 0}
    before = client.completions.create(**asked).choices[0].text
    norm = server.llm.engine.model.layers[1].mlp_norm
    kept, norm[0] = norm[0].item(), float("nan")
    where = "what goes into model.layers.1.mlp.gate_up_proj"
    with pytest.raises(openai.InternalServerError, match=where) as whole:
        client.completions.create(**asked)
    assert whole.value.status_code == 500
    assert whole.value.body["type"] == "server_error"
    with pytest.raises(openai.APIError, match=where):
        list(client.completions.create(**asked, stream=True))
    with pytest.raises(openai.InternalServerError, match="hidden states are not all finite"):
        client.embeddings.create(model="course", input=PROMPT)
    norm[0] = kept
    salted = {"extra_body": {"cache_salt": "another"}}  # the prefix cache may hold such numbers
    assert client.completions.create(**asked, **salted).choices[0].text == before
    until(server.is_idle, "nothing runs")


def test_one_of_two_prompts_fails_their_request_and_no_other(serve, until) -> None:
    server = serve()
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    model = server.llm.engine.model
    if model.lm_head is None:
        head = model.embedding.clone()
        model.head = lambda x, _: x @ head.T  # a token's row is then used where it is read, only
    [odd] = server.llm.encode("import")
    asked: dict[str, Any] = {"model": "course", "max_tokens": 4, "temperature": 0}
    good = client.completions.create(prompt=PROMPT, **asked).choices[0].text
    model.embedding[odd] = float("inf")
    with pytest.raises(openai.InternalServerError, match="in the embedding"):
        client.completions.create(prompt=[PROMPT, "import"], **asked)
    assert client.completions.create(prompt=PROMPT, **asked).choices[0].text == good
    until(server.is_idle, "nothing runs")


def test_an_answer_whose_text_fails_is_an_error_and_its_neighbours_are_served(serve, until) -> None:
    server = serve()
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    asked: dict[str, Any] = {"model": "course", "max_tokens": 6, "temperature": 0}
    tokens = server.llm.encode(client.completions.create(prompt=PROMPT, **asked).choices[0].text)
    before = client.completions.create(prompt="The for", **asked).choices[0].text
    kept, server.llm.tokenizer = server.llm.tokenizer, Picky(server.llm.tokenizer, tokens[3])
    try:
        with client.completions.create(prompt="The for", **asked | {"max_tokens": 60}, stream=True) as neighbour:
            told = next(iter(neighbour)).choices[0].text
            with pytest.raises(openai.InternalServerError, match="no such token") as whole:
                client.completions.create(prompt=PROMPT, **asked)
            assert whole.value.status_code == 500
            with pytest.raises(openai.APIError, match="no such token"):
                list(client.completions.create(prompt=PROMPT, **asked, stream=True))
            with pytest.raises(openai.APIError, match="no such token"):  # the prompt's own text
                client.completions.create(prompt=tokens[3:4], **asked)
            told += "".join(event.choices[0].text for event in neighbour)
        assert told.startswith(before)
    finally:
        server.llm.tokenizer = kept
    assert client.completions.create(prompt="The for", **asked).choices[0].text == before
    until(server.is_idle, "nothing runs")


class Panic(BaseException):
    """As one of the tokenizers library, which Python's `except Exception` does not catch."""


def test_what_is_no_exception_is_an_error_too_and_is_not_waited_for(serve, monkeypatch: pytest.MonkeyPatch) -> None:
    server = serve()
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)
    asked: dict[str, Any] = {"model": "course", "max_tokens": 6, "temperature": 0}
    tokens = server.llm.encode(client.completions.create(prompt=PROMPT, **asked).choices[0].text)
    monkeypatch.setattr(Picky, "error", Panic)
    monkeypatch.setattr(server.llm, "tokenizer", Picky(server.llm.tokenizer, tokens[3]))
    with pytest.raises(openai.APIError, match="the request cannot be started: Panic"):
        client.completions.create(prompt=tokens[3:4], **asked)
    assert client.completions.create(prompt="The for", **asked).choices[0].text
    with pytest.raises(openai.InternalServerError, match="no such token"):
        client.completions.create(prompt=PROMPT, **asked)


def test_an_answer_that_cannot_be_written_is_an_error(server, until, monkeypatch: pytest.MonkeyPatch) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    asked: dict[str, Any] = {"model": "course", "prompt": PROMPT, "max_tokens": 6, "temperature": 0}

    def fails(self: TokenText, token: int) -> str:
        raise KeyError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(TokenText, "text", fails)
        with pytest.raises(openai.InternalServerError, match="a bug"):
            client.completions.create(**asked, logprobs=1)
        with pytest.raises(openai.APIError, match="a bug"):
            list(client.completions.create(**asked, logprobs=1, stream=True))
        assert client.completions.create(**asked).choices[0].text
    until(server.is_idle, "nothing runs")
