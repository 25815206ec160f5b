"""Tools through the server, by OpenAI's own client: shown by the chat template, and calls found in the answer."""

from __future__ import annotations

import asyncio
import functools
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from reference_impl import LLM, course_model
from reference_impl.features.chat.prompts import ChatEncoder
from reference_impl.models.embedding_defaults import EmbeddingDefaults
from reference_impl.serving.app import ServerConfig
from reference_impl.serving.process import EngineProcess
from reference_impl.serving.server import ModelServer
from reference_impl.serving.worker import load
from tests.serving.conftest import Running

TEMPLATE = """{% for tool in tools or [] %}{{ tool | tojson }}
{% endfor %}
{% for message in messages %}
<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}<|im_end|>
{% endfor %}
{% if endless %}{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}{% endif %}
{% if broken %}{{ 1 / 0 }}{% endif %}
{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is false %}<think></think>{% endif %}{% endif %}"""
TOOL: Any = {
    "type": "function",
    "function": {"name": "add", "description": "a < b", "parameters": {"type": "object", "properties": {}}},
}
ASKED: list[Any] = [{"role": "user", "content": "1 + 1?"}]
CALL = '{"name": "add", "arguments": {"a": 1, "s": "é </tool_call>"}}'
SAID = f"Wait.\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{CALL}\n</tool_call>"


class Scripted:
    """An engine that says what it is told to, a character at a time."""

    vocab_size, max_model_len, is_alive, acceptance, sampling_defaults = 4096, 1024, True, "exact", {}
    embedding_defaults = EmbeddingDefaults()

    def __init__(self, folder: Path, said: str, reason: str):
        self.prompts, self.said, self.reason = ChatEncoder(folder), said, reason
        self.prompts.templates.renderer.seconds = (
            0.5  # of the processor: these templates take a thousandth, or for ever
        )
        self.given: list[list[int]] = []

    async def begin(self, receive: Callable[[Any], None]) -> None:
        self._receive, self._loop = receive, asyncio.get_running_loop()

    def send(self, command: Any) -> None:
        if command is None or command[0] != "start":
            return
        _, number, _, prompts, sampling, _ = command
        self.given = [list(prompt) for prompt in prompts]
        self._loop.call_soon(self._receive, ("answer", number, None, None))
        for at, character in enumerate(self.said):
            reason = self.reason if at == len(self.said) - 1 else None
            rows = [(number, sample, character, [5], [], reason, None) for sample in range(sampling.n)]
            usages = [] if reason is None else [(number, (len(prompts[0]), len(self.said), 0))]
            self._loop.call_soon(self._receive, ("step", rows, usages))

    async def end(self, seconds: float) -> None:
        pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("model") / "draft"
    shutil.copytree(course_model("draft"), found)
    (found / "chat_template.jinja").write_text(TEMPLATE)
    return found


@pytest.fixture
def scripted(folder: Path, until: Any) -> Iterator[Callable[..., tuple[openai.OpenAI, Scripted]]]:
    started: list[Running] = []

    def make(said: str, parser: str = "hermes", reason: str = "stop") -> tuple[openai.OpenAI, Scripted]:
        host = Scripted(folder, said, reason)
        server = ModelServer(host, ServerConfig("course", tool_call_parser=parser), "127.0.0.1", 0)
        started.append(running := Running(server))
        until(lambda: running.runner.is_ready, "it is ready")
        return openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0), host

    yield make
    for running in started:
        running.end()


def ask(client: openai.OpenAI, **more: Any) -> Any:
    return client.chat.completions.create(model="course", messages=ASKED, **({"tools": [TOOL]} | more))


def collected(chunks: Any) -> tuple[str, list[Any], list[Any]]:
    """Text, calls and finish reasons of a stream of one sample."""
    text, calls, reasons = "", [], []
    for chunk in chunks:
        [choice] = chunk.choices
        text += choice.delta.content or ""
        calls += choice.delta.tool_calls or []
        reasons += [choice.finish_reason] if choice.finish_reason else []
    return text, calls, reasons


def test_calls_are_tool_calls_whole_and_streamed(scripted: Any) -> None:
    client, _ = scripted(SAID)
    [choice] = ask(client).choices
    assert choice.message.content == "Wait.\n"
    assert choice.finish_reason == "tool_calls"
    assert [json.loads(c.function.arguments) for c in choice.message.tool_calls] == [
        {"a": 1, "s": "é </tool_call>"}
    ] * 2
    assert len({c.id for c in choice.message.tool_calls}) == 2
    text, calls, reasons = collected(ask(client, stream=True))
    assert (text, reasons) == ("Wait.\n", ["tool_calls"])
    assert [(c.index, c.type, c.function.name) for c in calls] == [(0, "function", "add"), (1, "function", "add")]
    assert [c.function.arguments for c in calls] == [c.function.arguments for c in choice.message.tool_calls]
    several = ask(client, n=3).choices
    assert [len(c.message.tool_calls) for c in several] == [2, 2, 2]


def test_llama_s_calls(scripted: Any) -> None:
    client, _ = scripted('{"name": "add", "parameters": {"a": 1}}; {"name": "add", "parameters": {}}', "llama3_json")
    [choice] = ask(client).choices
    assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")
    assert [c.function.arguments for c in choice.message.tool_calls] == ['{"a": 1}', "{}"]
    text, calls, reasons = collected(ask(client, stream=True))
    assert (text, len(calls), reasons) == ("", 2, ["tool_calls"])


@pytest.mark.parametrize(
    "said", ["<tool_call>\n{broken}\n</tool_call>", "No call, {x} <b", "<tool_call>", SAID[:-30] + '"', " \n"]
)
def test_what_is_no_call_stays_text(scripted: Any, said: str) -> None:
    client, _ = scripted(said)
    [choice] = ask(client).choices
    text, calls, reasons = collected(ask(client, stream=True))
    assert (choice.message.content, choice.finish_reason) == (text, reasons[0])
    assert len(choice.message.tool_calls or []) == len(calls) == said.count("</tool_call>\n<tool")
    if not calls:
        assert (text, reasons) == (said, ["stop"])


def test_without_tools_the_answer_is_text(scripted: Any) -> None:
    client, host = scripted(SAID)
    for more in ({"tools": openai.NOT_GIVEN}, {"tool_choice": "none"}, {"tools": []}):
        [choice] = ask(client, **more).choices
        assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (SAID, None, "stop")
        assert "add" not in host.prompts.tokenizer.decode(host.given[0])


def test_an_answer_that_is_cut_says_length(scripted: Any) -> None:
    client, _ = scripted(SAID, reason="length")
    assert ask(client).choices[0].finish_reason == "length"


def test_a_conversation_with_calls_is_shown_as_python_s_is(scripted: Any, folder: Path) -> None:
    client, host = scripted(SAID)
    answer = ask(client).choices[0].message
    result = {"role": "tool", "tool_call_id": answer.tool_calls[0].id, "content": [{"type": "text", "text": "2"}]}
    messages = [*ASKED, answer, result]
    client.chat.completions.create(
        model="course", messages=messages, tools=[TOOL],
        extra_body={"chat_template_kwargs": {"enable_thinking": False}},
    )  # fmt: skip
    options = {"chat_template_kwargs": {"enable_thinking": False}}
    assert host.given == [host.prompts.chat_prompt(messages, [TOOL], **options)]
    text = host.prompts.chat_text(messages, [TOOL], **options)
    assert '"arguments": {"a": 1, "s": "é </tool_call>"}' in text
    assert text.endswith("<think></think>")


def test_a_template_that_fails_or_never_ends_is_400_with_its_line(scripted: Any) -> None:
    client, _ = scripted("x")
    for name, said in (
        ("broken", "line 8: the chat template fails: ZeroDivision"),
        ("endless", "line 7: .*does not end"),
    ):
        with pytest.raises(openai.BadRequestError, match=f"chat_template.jinja, {said}"):
            ask(client, extra_body={"chat_template_kwargs": {name: True}})


def test_in_a_process_of_its_own(folder: Path, until: Any, warm_engines: None) -> None:
    host = EngineProcess(functools.partial(load, folder, "float32", kv_cache_bytes=128 << 20), ChatEncoder(folder))
    running = Running(ModelServer(host, ServerConfig("course", tool_call_parser="hermes"), "127.0.0.1", 0))
    until(lambda: running.runner.is_ready, "it is ready")
    try:
        llm = LLM(folder, dtype="float32", kv_cache_bytes=128 << 20, tool_call_parser="hermes")
        body = {"messages": ASKED, "tools": [TOOL], "chat_template_kwargs": {"enable_thinking": False}}
        shown = httpx.post(f"{running.url}/tokenize", json=body, timeout=600).json()
        assert shown["tokens"] == llm.chat_prompt(ASKED, [TOOL], chat_template_kwargs={"enable_thinking": False})
        begun = [*ASKED, {"role": "assistant", "content": "It is "}]
        continued = {"messages": begun, "continue_final_message": True, "add_generation_prompt": False}
        tokens = httpx.post(f"{running.url}/tokenize", json=continued, timeout=600).json()["tokens"]
        assert llm.tokenizer is not None
        assert llm.tokenizer.decode(tokens, skip_special_tokens=False).endswith("It is ")
        client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
        [choice] = ask(client, temperature=0, max_completion_tokens=12).choices
        from reference_impl import SamplingParams

        [expected] = llm.chat(ASKED, SamplingParams(max_tokens=12, temperature=0), tools=[TOOL])
        assert (choice.message.content, choice.finish_reason) == (expected.text, expected.finish_reason)
    finally:
        running.end()


def test_another_parser_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="tool_call_parser: expected 'hermes' or 'llama3_json', got 'mistral'"):
        ServerConfig("course", tool_call_parser="mistral")
