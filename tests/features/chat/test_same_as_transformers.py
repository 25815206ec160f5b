"""Chat templates in the shapes of published families give what `transformers` gives, and are refused where it does."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils import chat_template_utils

from reference_impl import course_model
from reference_impl.features.chat import sandbox
from reference_impl.features.chat.prompts import ChatEncoder
from reference_impl.features.chat.renderer import Renderer
from reference_impl.features.chat.sandbox import render
from tests.features.chat.conversations import CLOCK, CONVERSATIONS, WEATHER

FOLDER = Path(__file__).parent / "templates"
TEMPLATES = sorted(file.stem for file in FOLDER.glob("*.jinja"))
READ_PARTS = {"gemma3_parts", "glm4_moe_visible", "llama3_2_date", "llama4_parts", "mistral_small_dated"}
OPTIONS: list[dict[str, Any]] = [
    {"add_generation_prompt": True},
    {"add_generation_prompt": False},
    {"add_generation_prompt": True, "tools": [WEATHER, CLOCK]},
    {"add_generation_prompt": False, "tools": []},
    {"add_generation_prompt": True, "kwargs": {"enable_thinking": False, "thinking": True, "controls": {"a": "b"}}},
    {"add_generation_prompt": True, "kwargs": {"documents": [{"title": "T", "text": "x <y>"}], "bos_token": "<B>"}},
    {"add_generation_prompt": True, "kwargs": {"builtin_tools": ["get_weather"], "tools_in_user_message": False}},
]  # fmt: skip
TOKENS = {"bos_token": "<s>", "eos_token": {"__type": "AddedToken", "content": "</s>"}, "image_token": "<image>"}


@pytest.fixture(autouse=True)
def today(monkeypatch: pytest.MonkeyPatch) -> None:
    class Frozen(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Frozen:
            return cls(2026, 2, 3, 4, 5, 6)

    monkeypatch.setattr(sandbox, "datetime", Frozen)
    for name in ("render", "reads_parts"):  # here, and not in a process that knows the real date
        monkeypatch.setattr(Renderer, name, staticmethod(getattr(sandbox, name)))
    monkeypatch.setattr(chat_template_utils, "datetime", Frozen)
    chat_template_utils._compile_jinja_template.cache_clear()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("model")
    (found / "tokenizer.json").write_bytes((course_model("target") / "tokenizer.json").read_bytes())
    (found / "tokenizer_config.json").write_text(json.dumps({**TOKENS, "tokenizer_class": "PreTrainedTokenizerFast"}))
    return found


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def ours(folder: Path) -> ChatEncoder:
    return ChatEncoder(folder)


def joined(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For a template that takes texts only."""
    return [
        {**m, "content": "".join(p["text"] for p in m["content"])} if isinstance(m.get("content"), list) else m
        for m in messages
    ]


def of_theirs(theirs: Any, template: str, messages: Any, options: dict[str, Any]) -> str | None:
    plain = {name: value for name, value in options.items() if name != "kwargs"}
    try:
        text: str = theirs.apply_chat_template(
            messages, chat_template=template, tokenize=False, **plain, **options.get("kwargs", {})
        )
    except Exception:
        return None
    return text


def of_ours(ours: ChatEncoder, template: str, messages: Any, options: dict[str, Any]) -> str | None:
    plain = {name: value for name, value in options.items() if name != "kwargs"}
    try:
        return ours.chat_text(messages, chat_template=template, chat_template_kwargs=options.get("kwargs"), **plain)
    except ValueError:
        return None


def test_there_are_enough() -> None:
    assert len(TEMPLATES) >= 40
    assert set(TEMPLATES) >= READ_PARTS


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_gives_what_transformers_gives(name: str, theirs: Any, ours: ChatEncoder) -> None:
    template = (FOLDER / f"{name}.jinja").read_text("utf-8")
    texts = 0
    for title, messages in CONVERSATIONS.items():
        taken = messages if name in READ_PARTS else joined(messages)
        for options in OPTIONS:
            expected = of_theirs(theirs, template, taken, options)
            assert of_ours(ours, template, messages, options) == expected, (title, options)
            texts += expected is not None
    assert texts >= 30  # that something was compared


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_last_message_is_continued_as_transformers_does(name: str, theirs: Any, ours: ChatEncoder) -> None:
    template, found = (FOLDER / f"{name}.jinja").read_text("utf-8"), 0
    options = {"add_generation_prompt": False, "continue_final_message": True}
    for title, messages in CONVERSATIONS.items():
        taken = messages if name in READ_PARTS else joined(messages)
        expected = of_theirs(theirs, template, taken, options)
        assert of_ours(ours, template, messages, options) == expected, title
        found += expected is not None
    assert found


def test_tokens_are_those_of_transformers(theirs: Any, ours: ChatEncoder) -> None:
    template = (FOLDER / "qwen3_thinking.jinja").read_text("utf-8")
    for messages in CONVERSATIONS.values():
        messages = joined(messages)
        ids = theirs.apply_chat_template(
            messages, chat_template=template, tools=[WEATHER], add_generation_prompt=True, return_dict=False
        )
        assert ours.chat_prompt(messages, [WEATHER], chat_template=template) == ids


def test_arguments_as_openai_s_clients_send_them_are_an_object_to_the_template(ours: ChatEncoder) -> None:
    template = (FOLDER / "qwen2_5_tools.jinja").read_text("utf-8")
    messages = CONVERSATIONS["two calls"]
    sent = json.loads(json.dumps(messages))
    for one in sent[1]["tool_calls"]:
        one["function"]["arguments"] = json.dumps(one["function"]["arguments"])
    assert ours.chat_text(sent, chat_template=template) == ours.chat_text(messages, chat_template=template)
    assert isinstance(sent[1]["tool_calls"][0]["function"]["arguments"], str)  # what was given is as it was


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)


@given(
    JSON,
    st.sampled_from(["", "indent=2", "ensure_ascii=True", "sort_keys=True", "separators=(',', ' : ')", "indent=0"]),
)
def test_tojson_of_any_value(value: Any, options: str) -> None:
    template = f"{{{{ v | tojson({options}) }}}} {{{{ v }}}} {{{{ v | string ~ [v, (v,)] }}}}"
    [expected], _ = chat_template_utils.render_jinja_template([[]], chat_template=template, v=value)
    assert render(template, {"v": value}, "T") == expected
