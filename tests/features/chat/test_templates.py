"""Where a folder's chat templates are, which is taken, and what is said of files that are wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from reference_impl import course_model
from reference_impl.features.chat.messages import MessageError
from reference_impl.features.chat.prompts import ChatEncoder

MESSAGES = [{"role": "user", "content": "x"}]
NAMED = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}, {"name": "rag", "template": "R"}]


def write(folder: Path, config: Any = None, **files: str) -> Path:
    (folder / "tokenizer.json").write_bytes((course_model("target") / "tokenizer.json").read_bytes())
    if config is not None:
        text = (
            config if isinstance(config, str) else json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **config})
        )
        (folder / "tokenizer_config.json").write_text(text)
    for name, template in files.items():
        file = folder / (f"{name}.jinja" if name == "chat_template" else f"additional_chat_templates/{name}.jinja")
        file.parent.mkdir(exist_ok=True)
        file.write_text(template)
    return folder


@pytest.mark.parametrize("tools", [None, [], [{"type": "function", "function": {"name": "f"}}]])
@pytest.mark.parametrize("asked", [None, "rag", "tool_use", "{{ 5 }}"])
@pytest.mark.parametrize(
    ("config", "files"),
    [
        ({"chat_template": "one"}, {}),
        ({"chat_template": NAMED}, {}),
        ({"chat_template": NAMED[1:]}, {}),
        ({"chat_template": NAMED}, {"chat_template": "file"}),
        ({}, {"chat_template": "file", "rag": "R of a file"}),
        ({"chat_template": NAMED}, {"rag": "R of a file"}),
        ({}, {}),
    ],
)
def test_the_template_is_the_one_that_transformers_takes(
    tmp_path: Path, config: Any, files: dict[str, str], asked: str | None, tools: Any
) -> None:
    folder = write(tmp_path, config, **files)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    try:
        expected = theirs.apply_chat_template(MESSAGES, tools, chat_template=asked, tokenize=False)
    except ValueError:
        expected = None
    if (
        expected == asked and asked != "{{ 5 }}"
    ):  # a name that there is not: no template, though `transformers` writes it
        expected = None
    try:
        found = ChatEncoder(folder).chat_text(MESSAGES, tools, chat_template=asked)
    except ValueError:
        found = None
    assert found == expected


def test_special_tokens_are_those_that_transformers_names(tmp_path: Path) -> None:
    config = {"bos_token": "<s>", "eos_token": {"__type": "AddedToken", "content": "</s>"}, "my_token": "<my>",
              "extra_special_tokens": {"image_token": "<image>"}, "pad_token": None, "add_bos_token": True}  # fmt: skip
    folder = write(tmp_path, config)
    template = "{{ bos_token }}{{ eos_token }}{{ my_token }}{{ image_token }}{{ pad_token }}{{ add_bos_token }}"
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    expected = theirs.apply_chat_template(MESSAGES, chat_template=template, tokenize=False)
    assert ChatEncoder(folder).chat_text(MESSAGES, chat_template=template) == expected == "<s></s><my><image>"


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ('{"a": 1,\n"b" 2}', r"tokenizer_config\.json, line 2: expected JSON"),
        ("[1]", r"tokenizer_config\.json: expected a JSON object, got list"),
        ('{"chat_template": 5}', r"tokenizer_config\.json: chat_template: expected a text or a list, got int"),
        ('{"chat_template": [{"template": "x"}]}', r"tokenizer_config\.json: chat_template\[0\]: expected {\"name\""),
        ('{"chat_template": [{"name": "x"}, 5]}', r"chat_template\[0\]: expected .* got {\"name\": \"x\"}"),
    ],
)
def test_a_config_that_is_wrong_is_named(tmp_path: Path, config: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ChatEncoder(write(tmp_path, config))


def test_files_that_are_no_utf_8_are_named(tmp_path: Path) -> None:
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        folder = write(tmp_path)
        (folder / name).write_bytes(b"{{ 'h\xe9' }}")
        with pytest.raises(ValueError, match=f"{name}: expected UTF-8, found other bytes at position 5: save it as"):
            ChatEncoder(folder)
        (folder / name).unlink()


def test_an_error_names_the_file_that_the_template_is_in(tmp_path: Path) -> None:
    broken = "\n{{ 1 / 0 }}"
    several = [{"name": "default", "template": broken}, NAMED[2]]
    for template, place in (
        (broken, r"^tokenizer_config\.json, line 2"),
        (several, r"chat template 'default', line 2"),
    ):
        with pytest.raises(ValueError, match=place):
            ChatEncoder(write(tmp_path, {"chat_template": template})).chat_text(MESSAGES)
    with pytest.raises(ValueError, match=r"^chat_template\.jinja, line 2"):
        ChatEncoder(write(tmp_path, {}, chat_template=broken)).chat_text(MESSAGES)


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], "messages: expected at least one"),
        ("hi", "messages: expected a list of messages, got str"),
        ([5], "messages.0: expected an object"),
        ([{"content": "x"}], "messages.0.role: expected a text"),
        ([{"role": "user", "content": 5}], "messages.0.content: expected a text, parts or null, got int"),
        ([{"role": "user", "content": b"x"}], "messages.0.content: expected what JSON can hold, got bytes"),
        ([{"role": "user", "content": ["x"]}], "messages.0.content.0: expected {\"type\": \"text\""),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
         "messages.0.content.0: a part of type 'image_url' is not implemented: this engine reads text only"),
        ([{"role": "assistant", "tool_calls": {}}], "messages.0.tool_calls: expected a list"),
        ([{"role": "assistant", "tool_calls": [{"function": {}}]}], "messages.0.tool_calls.0: expected"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": [1]}}]}],
         "messages.0.tool_calls.0.function.arguments: expected a text, or a JSON object, got \\[1\\]"),
    ],
)  # fmt: skip
def test_a_message_that_is_wrong_is_named(messages: Any, said: str) -> None:
    with pytest.raises(MessageError, match=said):
        ChatEncoder(course_model("target")).chat_text(messages)


def test_other_arguments_that_are_wrong_are_named() -> None:
    encoder = ChatEncoder(course_model("target"))
    cases: list[tuple[dict[str, Any], str]] = [
        ({"tools": [5]}, "tools.0: expected .*got 5"),
        ({"tools": [{"type": "function"}]}, "tools.0: expected .*got {"),
        ({"tools": [{"type": "function", "function": {"name": 3}}]}, "tools.0: expected .*got {"),
        ({"tools": [encoder]}, "tools.0: expected what JSON can hold, got ChatEncoder"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages: is given by the engine"),
        ({"chat_template": "rag"}, "chat_template: expected a Jinja template, or the name of one of this model's: "),
        ({"continue_final_message": True}, "continue_final_message continues an answer"),
    ]
    for options, said in cases:
        with pytest.raises(ValueError, match=said):
            encoder.chat_text(MESSAGES, **options)


def test_a_file_may_stand_for_the_folders_templates(tmp_path: Path) -> None:
    encoder = ChatEncoder(course_model("target"))
    assert encoder.templates.broken() == []
    (tmp_path / "mine.jinja").write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    encoder.templates.take(tmp_path / "mine.jinja")
    assert encoder.chat_text(MESSAGES[:1]) == f"[{MESSAGES[0]['content']}]"
    assert encoder.templates.broken() == []
    (tmp_path / "broken.jinja").write_text("a\n{% for m in messages %}")
    encoder.templates.take(tmp_path / "broken.jinja")
    [said] = encoder.templates.broken()
    assert said.startswith(f"{tmp_path / 'broken.jinja'}, line 2: no Jinja template: ")
    with pytest.raises(ValueError, match="line 2: no Jinja template"):
        encoder.chat_text(MESSAGES)


@pytest.mark.parametrize("text", ["\ud83d", "ab\udc00c"])
def test_half_a_surrogate_pair_is_refused_with_its_place(text: str) -> None:
    encoder = ChatEncoder(course_model("target"))
    place = text.index(next(c for c in text if "\ud800" <= c <= "\udfff"))
    with pytest.raises(ValueError, match=f"half a surrogate pair at character {place}, which is no character"):
        encoder.encode(text)
    with pytest.raises(ValueError, match="half a surrogate pair at character"):
        encoder.chat_prompt([{"role": "user", "content": text}])


def test_a_message_may_be_an_answer_of_openai_s_client() -> None:
    from openai.types.chat import ChatCompletionMessage

    answer = ChatCompletionMessage(role="assistant", content="hi")
    encoder, template = ChatEncoder(course_model("target")), "{% for m in messages %}{{ m }}{% endfor %}"
    plain = [{"role": "user", "content": "x"}, {"content": "hi", "role": "assistant"}]
    messages = [{"role": "user", "content": "x"}, answer]
    assert encoder.chat_text(messages, chat_template=template) == encoder.chat_text(plain, chat_template=template)
