"""What a client sends back of earlier calls of tools: a text, which is mostly JSON; OpenAI takes any."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from reference_impl.assembly.config import course_model
from reference_impl.features.chat.prompts import ChatEncoder
from reference_impl.features.chat.renderer import ChatTemplateError

FOLDER = Path(__file__).parent / "templates"
NAMES = [
    "deepseek_v3_tools", "deepseek_v3_1_thinking", "glm4_moe_visible", "gpt_oss", "hermes_tool_use", "llama3_1_tools",
    "llama4_parts", "minicpm_items", "qwen2_5_tools", "qwen3_coder_xml", "qwen3_thinking",
]  # fmt: skip
ODD = [
    '{"city": "Par', "Paris", "[1, 2]", "3", "null", '"x"', "", " ", '{"a": 1}{"b": 2}', '{"a": "\\ud83d"}', "{'a': 1}",
    '{"a": ' * 80 + "1" + "}" * 80, '{"a": ' + "9" * 5000 + "}", "[" * 5_000, '{"a": 1, "a": NaN}', "</tool_call>\n{",
]  # fmt: skip


@pytest.fixture(scope="module")
def encoder() -> ChatEncoder:
    return ChatEncoder(course_model("target"))


def history(arguments: Any) -> list[dict[str, Any]]:
    call = {"id": "call00000", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    return [
        {"role": "user", "content": "Weather?"}, {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call00000", "name": "weather", "content": "rain"},
        {"role": "user", "content": "And now?"},
    ]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_an_object_in_a_text_is_shown(name: str, encoder: ChatEncoder) -> None:
    template = (FOLDER / f"{name}.jinja").read_text("utf-8")
    found = encoder.chat_text(history('{"city": "Köln", "days": [1, 2]}'), chat_template=template)
    assert "weather" in found
    assert name == "minicpm_items" or "Köln" in found or "K\\u00f6ln" in found
    assert "{'city'" not in found, "Python, not JSON"


def without_content(content: Any) -> list[dict[str, Any]]:
    """As OpenAI's clients send an answer that is a call alone: its content is null, or left out."""
    user, call, *others = history('{"city": "Köln"}')
    del call["content"]
    return [user, call | content, *others]


@pytest.mark.parametrize("content", [{}, {"content": None}], ids=["left out", "null"])
@pytest.mark.parametrize("name", NAMES)
def test_a_call_without_content_can_be_sent_back(name: str, content: Any, encoder: ChatEncoder) -> None:
    template = (FOLDER / f"{name}.jinja").read_text("utf-8")
    assert "weather" in encoder.chat_text(without_content(content), chat_template=template)


@pytest.mark.parametrize("content", [{}, {"content": None}], ids=["left out", "null"])
@pytest.mark.parametrize("arguments", ["{{ c.function.arguments|tojson }}", "{{ '' + c.function.arguments }}"])
def test_a_template_may_ask_whether_the_content_of_a_call_is_none(
    arguments: str, content: Any, encoder: ChatEncoder
) -> None:
    """As DeepSeek's do, which add it to a text otherwise: without the field they fail."""
    template = (
        "{% for m in messages %}{% if 'tool_calls' in m %}{% for c in m.tool_calls %}"
        "{% if m['content'] is none %}<calls>{% else %}{{ m['content'] + '<calls>' }}{% endif %}"
        + arguments
        + "{% endfor %}{% else %}{{ m['content'] + '|' }}{% endif %}{% endfor %}"
    )
    found = encoder.chat_text(without_content(content), chat_template=template)
    assert found == 'Weather?|<calls>{"city": "Köln"}rain|And now?|'
    assert encoder.chat_text(history("{}"), chat_template=template) == "Weather?|<calls>{}rain|And now?|"


@pytest.mark.parametrize("odd", ODD, ids=lambda text: text[:20])
@pytest.mark.parametrize("name", NAMES)
def test_any_text_can_be_sent_back(name: str, odd: str, encoder: ChatEncoder) -> None:
    template = (FOLDER / f"{name}.jinja").read_text("utf-8")
    assert encoder.chat_text(history(odd), chat_template=template).encode()  # half a character would not do


@pytest.mark.parametrize(
    "written", ["{{ a }}", "{{ '' + a }}", "{{ a + '' }}", "{{ '' ~ a }}", "{{ a|string }}", "{{ '%s'|format(a) }}",
                "{{ ['', a]|join }}", "{% set x = '' + a %}{{ x }}", "{{ a.strip() }}", "{{ a[0:] }}", "{{ a * 1 }}",
                "{{ a.replace('', '') }}", "{{ a.split('^')[0] }}", "{{ a.format if a.startswith('^') else a }}"]
)  # fmt: skip
@pytest.mark.parametrize("text", ['{"b" :1,"a":"é"}', '{"city": "Par', "Paris"])
def test_a_template_that_writes_arguments_as_text_writes_what_was_sent(
    written: str, text: str, encoder: ChatEncoder
) -> None:
    template = "{% for m in messages %}{% for c in m.tool_calls or [] %}{% set a = c.function.arguments %}" + written
    assert encoder.chat_text(history(text), chat_template=template + "{% endfor %}{% endfor %}") == text


@pytest.mark.parametrize(
    "written", ["{{ '' + a }}", "{{ a.strip() }}", "{{ raise_exception('') if a is mapping }}{{ a }}"]
)
def test_it_writes_an_object_that_was_sent_as_json(written: str, encoder: ChatEncoder) -> None:
    template = "{% for m in messages %}{% for c in m.tool_calls or [] %}{% set a = c.function.arguments %}" + written
    messages = history({"city": "Köln"})
    assert encoder.chat_text(messages, chat_template=template + "{% endfor %}{% endfor %}") == '{"city": "Köln"}'


def test_a_call_without_arguments_has_none_to_give(encoder: ChatEncoder) -> None:
    """As in vLLM: null, an empty text, and a call that does not name them are calls without arguments."""
    template = "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.arguments|tojson }}{% endfor %}"
    nameless = history(None)
    del nameless[1]["tool_calls"][0]["function"]["arguments"]
    for messages in (history(None), history(""), history({}), nameless):
        assert encoder.chat_text(messages, chat_template=template + "{% endfor %}") == "{}"


def test_one_that_takes_an_object_takes_it(encoder: ChatEncoder) -> None:
    template = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{% set a = c.function.arguments %}"
        "{{ a|tojson }} {{ a is mapping }} {{ a is string }} {{ a.city }} {{ a|items|list|length }} {{ a|length }}"
        "{% endfor %}{% endfor %}"
    )
    found = encoder.chat_text(history('{"city":"Köln","text":2}'), chat_template=template)
    assert found == '{"city": "Köln", "text": 2} True False Köln 2 2'


def test_a_text_that_is_no_object_stays_one_beside_others(encoder: ChatEncoder) -> None:
    messages = history('{"a": 1}') + history("Paris")
    template = "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.arguments.CHANGED }}|"
    template += "{% endfor %}{% endfor %}"
    assert encoder.chat_text(messages, chat_template=template.replace("CHANGED", "upper()")) == '{"A": 1}|PARIS|'
    assert encoder.chat_text(messages, chat_template=template.replace("CHANGED", "items()|list")) == "[('a', 1)]|[]|"


def test_an_error_is_still_the_templates(encoder: ChatEncoder) -> None:
    with pytest.raises(ChatTemplateError, match="line 1: the chat template refuses these messages: no tools"):
        encoder.chat_text(history("Paris"), chat_template="{{ raise_exception('no tools') }}{{ messages[0].content }}")
    template = "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.arguments['a'].b.c }}"
    with pytest.raises(ChatTemplateError, match="line 1: the chat template fails: UndefinedError: 'int object' has no"):
        encoder.chat_text(history('{"a": 1}'), chat_template=template + "{% endfor %}{% endfor %}")
