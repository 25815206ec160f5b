"""The text of a conversation in a model's chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from reference_impl.features.chat.messages import MessageError, as_messages, plain
from reference_impl.features.chat.templates import ChatTemplates

_OWN = ("messages", "tools", "add_generation_prompt", "raise_exception", "strftime_now")
_CONTINUED = "CONTINUE_FINAL_MESSAGE_TAG "  # behind the text that is to be continued, while the template is rendered


def shown_tools(tools: Sequence[Any] | None, choice: Any) -> Sequence[Any] | None:
    """The tools that the model is shown. MessageError for a choice that would have to be forced on it."""
    if choice not in (None, "auto", "none"):
        raise MessageError("tool_choice", f"expected 'auto' or 'none', got {choice!r}: no other is implemented")
    return None if choice == "none" else tools


def conversation_text(
    templates: ChatTemplates, messages: Sequence[Any], tools: Sequence[Any] | None, add_generation_prompt: bool,
    continue_final_message: bool, chat_template: str | None, chat_template_kwargs: Mapping[str, Any] | None,
) -> str:  # fmt: skip
    """See `ChatEncoder.chat_text`."""
    template, where = templates.choose(chat_template, tools is not None)
    given = as_messages(messages, templates.renderer.reads_parts(template, where))
    variables = {
        "documents": None, **templates.special_tokens, **_further(chat_template_kwargs), "messages": given,
        "tools": None if tools is None else _as_tools(tools), "add_generation_prompt": add_generation_prompt,
    }  # fmt: skip
    render = templates.renderer.render
    if not continue_final_message:
        return render(template, variables, where)
    if add_generation_prompt:
        raise ValueError("continue_final_message continues an answer, add_generation_prompt begins one: choose")
    if "content" not in template:  # `transformers` asks for it, too
        raise ValueError(f"{where}: continue_final_message: the template does not read content")
    continued = _mark(given)
    return _cut(render(template, variables, where), continued, where)


def _further(given: Mapping[str, Any] | None) -> dict[str, Any]:
    found: dict[str, Any] = plain(given or {}, "chat_template_kwargs")
    for name in found:
        if name in _OWN:
            raise MessageError(f"chat_template_kwargs.{name}", "is given by the engine: choose it by its own argument")
    return found


def _as_tools(tools: Sequence[Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = plain(tools, "tools")
    for number, tool in enumerate(found):
        function = tool.get("function", tool) if isinstance(tool, dict) else None  # templates know both forms
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            expected = 'expected {"type": "function", "function": {"name", "description", "parameters"}}'
            raise MessageError(f"tools.{number}", f"{expected}, got {json.dumps(tool)[:100]}")
    return found


def _mark(messages: list[dict[str, Any]]) -> str:
    """Marks the end of the last message's text, and returns the text. MessageError if it has none."""
    last = messages[-1]
    content = last.get("content")
    if isinstance(content, str):
        last["content"] = content + _CONTINUED
        return content
    for part in reversed(content or []):
        text: str = part["text"]
        part["text"] = text + _CONTINUED
        return text
    raise MessageError(f"messages.{len(messages) - 1}.content", "continue_final_message: there is no text to continue")


def _cut(text: str, continued: str, where: str) -> str:
    """The rendered text up to the mark, behind which the template closes the message. It may have trimmed the text, and
    with it the mark's own space. ValueError if it does not write the last message as it is."""
    mark = _CONTINUED.strip()
    if continued.strip() not in text or mark not in text:
        raise ValueError(f"{where}: continue_final_message: the template does not write the last message as it is")
    end = text.rindex(mark)
    return text[:end] if text[end:].startswith(_CONTINUED) else text[:end].rstrip()
