"""Messages as OpenAI's clients and Python callers give them, as chat templates take them.

[{"role": "user", "content": "text"}]; content may be None, or parts [{"type": "text", "text": ...}]; an assistant's
message may have tool_calls, a message of the role "tool" answers one. What comes out is made of JSON's types only.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

_REASONING = ("reasoning_content", "thinking", "reasoning")  # names of one thing, the first is the usual one
_DEEPEST = 64  # lists and objects in each other
_MEDIA = ("image", "image_url", "input_image", "audio", "input_audio", "video", "video_url", "file")


class Arguments(dict[str, Any]):
    """A call's arguments that came as a text with a JSON object: a dict whose str() is the text that was sent. A
    template that fails with it gets the text itself (`tried`)."""

    def __init__(self, value: dict[str, Any], text: str):
        super().__init__(value)
        self._text = text

    def __str__(self) -> str:
        return self._text


class MessageError(ValueError):
    """An error in messages or tools. place: where it is, such as "messages.0.content.1"."""

    def __init__(self, place: str, why: str):
        super().__init__(f"{place}: {why}")
        self.place = place


def as_messages(messages: Sequence[Any], parts_are_read: bool = True) -> list[dict[str, Any]]:
    """Copies of the messages in the form that templates take: without fields that are None, and with a call's arguments
    as an object where their text is one. Other texts of arguments stay texts.

    parts_are_read: whether the template can read a list of parts; if not, it gets them joined to one text. Raises
    MessageError.
    """
    if isinstance(messages, (str, bytes, Mapping)):
        raise MessageError("messages", f"expected a list of messages, got {type(messages).__name__}")
    found = [_as_message(message, f"messages.{number}", parts_are_read) for number, message in enumerate(messages)]
    if not found:
        raise MessageError("messages", "expected at least one")
    return found


def plain(value: Any, place: str, depth: int = 0) -> Any:
    """A copy made of JSON's types; a pydantic object becomes a dict. Raises MessageError for anything else."""
    if hasattr(value, "model_dump"):
        value = value.model_dump()
    if value is None or type(value) in (str, bool, int, float):
        return value
    if depth > _DEEPEST:
        raise MessageError(place[:100], f"lists and objects are more than {_DEEPEST} deep")
    if isinstance(value, Mapping):
        return {str(name): plain(item, f"{place}.{name}", depth + 1) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, f"{place}.{number}", depth + 1) for number, item in enumerate(value)]
    raise MessageError(place, f"expected what JSON can hold, got {type(value).__name__}")


def texts(value: Any, place: str) -> Iterator[tuple[str, str]]:
    """Yields (place, text) for each text in value, also for names of fields."""
    if isinstance(value, str):
        yield place, value
    elif isinstance(value, dict):
        for name, item in value.items():
            yield place, name
            yield from texts(item, f"{place}.{name}")
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from texts(item, f"{place}.{number}")


def _as_message(message: Any, place: str, parts_are_read: bool) -> dict[str, Any]:
    found = plain(message, place)
    if not isinstance(found, dict):
        raise MessageError(place, f"expected an object with role and content, got {type(message).__name__}")
    found = {name: value for name, value in found.items() if value is not None}
    if not isinstance(found.get("role"), str):
        raise MessageError(f"{place}.role", "expected a text, as 'user'")
    content = found.get("content")
    if isinstance(content, list):
        parts = [_text_of(part, f"{place}.content.{number}") for number, part in enumerate(content)]
        if not parts_are_read:
            found["content"] = "".join(parts)
    elif content is not None and not isinstance(content, str):
        raise MessageError(f"{place}.content", f"expected a text, parts or null, got {type(content).__name__}")
    if "tool_calls" in found:
        found["tool_calls"] = _as_calls(found["tool_calls"], f"{place}.tool_calls")
    reasoning = next((found[name] for name in _REASONING if name in found), None)
    if reasoning is not None:
        found = {"thinking": reasoning, **found, "reasoning_content": reasoning}
    return found


def _text_of(part: Any, place: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in _MEDIA:
        raise MessageError(place, f"a part of type {kind!r} is not implemented: this engine reads text only")
    if kind != "text" or not isinstance(part.get("text"), str):
        raise MessageError(place, f'expected {{"type": "text", "text": a text}}, got {json.dumps(part)[:100]}')
    text: str = part["text"]
    return text


def _as_calls(calls: Any, place: str) -> list[dict[str, Any]]:
    """The calls of a message, with arguments as objects. OpenAI's clients send them as texts, which most templates,
    writing them by tojson, would quote."""
    if not isinstance(calls, list):
        raise MessageError(place, f"expected a list, got {type(calls).__name__}")
    for number, call in enumerate(calls):
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise MessageError(f"{place}.{number}", 'expected {"function": {"name": a text, "arguments": ...}}')
        if call.get("type") not in (None, "function"):
            raise MessageError(f"{place}.{number}.type", f"expected 'function', got {json.dumps(call['type'])[:100]}")
        if not isinstance(call.get("id"), str | None):
            raise MessageError(f"{place}.{number}.id", f"expected a text, got {json.dumps(call['id'])[:100]}")
        arguments = function.get("arguments")
        if arguments in (None, ""):
            arguments = "{}"  # as in vLLM: some clients write a call without arguments so
        if not isinstance(arguments, str | dict):
            expected = "expected a text, or a JSON object"
            raise MessageError(f"{place}.{number}.function.arguments", f"{expected}, got {json.dumps(arguments)[:100]}")
        function["arguments"] = _arguments(arguments) if isinstance(arguments, str) else arguments
    return calls


def _arguments(text: str) -> Arguments | str:
    """The arguments as an object; the text itself where it is not a JSON object that a prompt can show: a model wrote
    it, and one that was cut off stays in the history of its conversation."""
    try:
        found = plain(json.loads(text), "")
        json.dumps(found, ensure_ascii=False).encode()
    except (ValueError, RecursionError):  # no JSON, numbers of thousands of digits, too deep, half a character
        return text
    return Arguments(found, text) if isinstance(found, dict) else text


def tried(messages: Sequence[dict[str, Any]], template: str) -> Iterator[Sequence[dict[str, Any]]]:
    """Yields the messages in one form after another, for a template that failed with the form before: with calls'
    arguments as they are; all as texts, like OpenAI's clients send them (DeepSeek's templates add them to others); all
    as objects, where a text that is no JSON object becomes an empty one, written as its text. Then again with null as
    the content of calls that have none, for a template that knows calls: DeepSeek's ask whether it is none."""
    yield from _with_arguments_in_each_form(messages)
    whole = [{"content": None, **message} if "tool_calls" in message else message for message in messages]
    if whole != messages and "tool_calls" in template:
        yield from _with_arguments_in_each_form(whole)


def _with_arguments_in_each_form(messages: Sequence[dict[str, Any]]) -> Iterator[Sequence[dict[str, Any]]]:
    yield messages
    for form in (_text, _object):
        changed = [_with_arguments(message, form) for message in messages]
        if changed != messages:
            yield changed


def _text(arguments: Any) -> Any:
    if isinstance(arguments, dict) and not isinstance(arguments, Arguments):  # came as an object
        return json.dumps(arguments, ensure_ascii=False)
    return str(arguments)


def _object(arguments: Any) -> Any:
    return Arguments({}, arguments) if isinstance(arguments, str) else arguments


def _with_arguments(message: dict[str, Any], form: Callable[[Any], Any]) -> dict[str, Any]:
    calls = []
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        changed = {**function, "arguments": form(function["arguments"])}
        calls.append({**call, "function": changed} if "function" in call else changed)
    return {**message, "tool_calls": calls} if calls else message
