"""Turns a request with a conversation into what the chat encoder takes."""

from __future__ import annotations

from typing import Any

from reference_impl.features.chat.conversation import shown_tools
from reference_impl.features.chat.messages import plain, texts
from reference_impl.features.chat.tool_calls import PARSERS
from reference_impl.serving.protocol import ChatRequest, TokenizeRequest
from reference_impl.serving.refusals import Refused, check_characters


def chat_arguments(body: ChatRequest | TokenizeRequest) -> dict[str, Any]:
    """The arguments of `ChatEncoder.chat_prompt`. Raises MessageError, or Refused for half characters."""
    given: dict[str, Any] = {
        "messages": [message.plain() for message in body.messages or ()],
        "tools": shown_tools(body.tools or None, body.tool_choice),
        "chat_template_kwargs": body.chat_template_kwargs,
    }
    for field, value in given.items():
        for place, text in texts(plain(value, field), field):
            check_characters(text, place)
    return {
        **given, "add_generation_prompt": body.add_generation_prompt,
        "continue_final_message": body.continue_final_message,
    }  # fmt: skip


def parser_for(body: ChatRequest, parser: str | None) -> str | None:
    """The parser of tool calls for an answer; None where no tools are shown. Refused where there is no parser for
    them."""
    if not shown_tools(body.tools or None, body.tool_choice):
        return None
    if parser is None:
        known = " or ".join(PARSERS)
        message = f"tools: this server was started without --tool-call-parser {known}, so it finds no calls in answers"
        raise Refused(400, message, param="tools")
    return parser
