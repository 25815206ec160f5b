"""A request whose logits are not finite is answered with an error that names the layer; the server goes on."""

from __future__ import annotations

from typing import Any

import openai
import pytest

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
