"""Conversations: messages in a model's chat template become token ids, as `transformers` renders them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from reference_impl.core.prompts import PromptEncoder
from reference_impl.features.chat.messages import MessageError, as_messages, plain
from reference_impl.features.chat.templates import ChatTemplates
from reference_impl.models.tokenizer_files import complete

_OWN = ("messages", "tools", "add_generation_prompt", "raise_exception", "strftime_now")
_CONTINUED = "CONTINUE_FINAL_MESSAGE_TAG "  # behind the text that is to be continued, while the template is rendered

ToolChoice = Literal["auto", "none"]


def shown_tools(tools: Sequence[Any] | None, choice: Any) -> Sequence[Any] | None:
    """The tools that the model is shown. MessageError for a choice that would have to be forced on it."""
    if choice not in (None, "auto", "none"):
        raise MessageError("tool_choice", f"expected 'auto' or 'none', got {choice!r}: no other is implemented")
    return None if choice == "none" else tools


class ChatEncoder(PromptEncoder):
    """A `PromptEncoder` with the chat templates of the folder, if it has some.

    vocab_size: the model's; None: the tokenizer's tokens are not compared with it.
    """

    vocab_size: int | None = None

    def __init__(self, folder: Path | None):
        super().__init__(folder)
        if folder is not None and self.tokenizer is not None:
            complete(self.tokenizer, folder)
        self.templates = ChatTemplates(folder)

    def tokens_of(self, text: str, **options: Any) -> list[int]:
        """The token ids of a text. ValueError also for half a surrogate pair, which no tokenizer can encode, and for a
        special token that the model does not have: the tokenizer's files may name more than it was trained with."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            message = f"the text has half a surrogate pair at character {error.start}, which is no character"
            raise ValueError(message) from None
        tokens = super().tokens_of(text, **options)
        if self.vocab_size is not None and self.tokenizer is not None and max(tokens, default=0) >= self.vocab_size:
            token = max(tokens)
            raise ValueError(
                f"the text has {self.tokenizer.id_to_token(token)!r}, which the tokenizer's files name a token, and "
                f"whose id, {token}, is outside the vocabulary [0, {self.vocab_size}): the model has no such token; "
                "leave it out of the text"
            )
        return tokens

    def chat_prompt(self, messages: Sequence[Any], tools: Sequence[Any] | None = None, **options: Any) -> list[int]:
        """The token ids of a conversation, ready for the assistant's answer. Arguments and errors: see `chat_text`;
        ValueError without a tokenizer."""
        text = self.chat_text(messages, tools, **options)
        if self.tokenizer is None:
            raise ValueError(f"{self.where} has no tokenizer.json: chat_text() gives the text")
        return self.tokens_of(text, add_special_tokens=False)

    def chat_text(
        self,
        messages: Sequence[Any],
        tools: Sequence[Any] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation in the model's chat template.

        messages: [{"role": ..., "content": ...}], see messages.py. tools: JSON schemas of functions, which the template
        shows to the model. add_generation_prompt: add the beginning of an answer. continue_final_message: end where
        the last message's text ends, without what would close it. chat_template: a template, or the name of one of the
        model's. chat_template_kwargs: further variables of the template, such as enable_thinking or documents.
        Raises ValueError: MessageError for a message, ChatTemplateError for a template.
        """
        if chat_template is None and not self.templates.named:
            raise ValueError(f"{self.where} has no chat template: use generate() with a plain prompt")
        template, where = self.templates.choose(chat_template, tools is not None)
        given = as_messages(messages, self.templates.renderer.reads_parts(template, where))
        variables = {
            "documents": None, **self.templates.special_tokens, **_further(chat_template_kwargs), "messages": given,
            "tools": None if tools is None else _as_tools(tools), "add_generation_prompt": add_generation_prompt,
        }  # fmt: skip
        render = self.templates.renderer.render
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
