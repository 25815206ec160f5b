"""Prompts and conversations in the forms that vLLM knows: texts, token ids, dicts; one or several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypedDict, cast

from reference_impl.core.llm import as_list
from reference_impl.core.prompts import Prompt


class TokensPrompt(TypedDict):
    """vLLM's: token ids, maybe with the text they were made of."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]


class TextPrompt(TypedDict):
    """vLLM's: a text."""

    prompt: str


AnyPrompt = Prompt | TokensPrompt | TextPrompt
Conversation = Sequence[Any]  # of messages, see `ChatEncoder.chat_text`


def listed(prompts: AnyPrompt | Sequence[AnyPrompt]) -> list[AnyPrompt]:
    """One prompt or several, as a list."""
    one = isinstance(prompts, Mapping)
    return [cast(AnyPrompt, prompts)] if one else [*as_list(cast("Prompt | Sequence[Prompt]", prompts))]


def plain(prompt: AnyPrompt) -> Prompt:
    """Of vLLM's dicts the token ids, or else the text."""
    if not isinstance(prompt, Mapping):
        return prompt
    given: Mapping[str, Any] = prompt
    if others := sorted(given.keys() - {"prompt", "prompt_token_ids"}):
        raise ValueError(f"a prompt has {', '.join(map(repr, others))}: expected 'prompt' or 'prompt_token_ids' alone")
    if given.get("prompt_token_ids") is not None:
        return cast(Prompt, given["prompt_token_ids"])
    if not isinstance(given.get("prompt"), str):
        raise ValueError(f"a prompt: expected a text under 'prompt' or ids under 'prompt_token_ids', got {prompt!r}")
    return cast(str, given["prompt"])


def conversations(messages: Conversation | Sequence[Conversation]) -> Sequence[Conversation]:
    """One or several, as a list."""
    several = isinstance(messages, list | tuple) and messages and all(isinstance(one, list | tuple) for one in messages)
    return messages if several else [messages]
