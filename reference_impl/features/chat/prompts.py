"""Conversations: messages in a model's chat template become token ids, as `transformers` renders them. And what callers
of vLLM write: prompts as texts, token ids or dicts, conversations, one or several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict, cast

from reference_impl.core.llm import as_list
from reference_impl.core.prompts import Prompt, PromptEncoder
from reference_impl.features.chat.templates import ChatTemplates
from reference_impl.models.tokenizer_files import complete

ToolChoice = Literal["auto", "none"]


class ChatEncoder(PromptEncoder):
    """A `PromptEncoder` with the chat templates of the folder, if it has some.

    vocab_size: the model's; None: the tokenizer's tokens are not compared with it.
    """

    vocab_size: int | None = None

    def __init__(self, folder: Path | None):
        super().__init__(folder)
        self.templates = ChatTemplates(folder)
        if folder is not None and self.tokenizer is not None:
            self.tokenizer, special = complete(self.tokenizer, folder)
            self.templates.special_tokens = {name: token.content for name, token in special.named.items()}

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
        from reference_impl.features.chat.conversation import conversation_text

        return conversation_text(
            self.templates, messages, tools, add_generation_prompt, continue_final_message, chat_template,
            chat_template_kwargs,
        )  # fmt: skip


class TokensPrompt(TypedDict):
    """vLLM's prompt of token ids, maybe with the text that they were made from."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]


class TextPrompt(TypedDict):
    """vLLM's prompt of a text."""

    prompt: str


AnyPrompt = Prompt | TokensPrompt | TextPrompt
Conversation = Sequence[Any]  # of messages, see `ChatEncoder.chat_text`


def listed(prompts: AnyPrompt | Sequence[AnyPrompt]) -> list[AnyPrompt]:
    """One prompt or several, as a list."""
    one = isinstance(prompts, Mapping)
    return [cast(AnyPrompt, prompts)] if one else [*as_list(cast("Prompt | Sequence[Prompt]", prompts))]


def plain(prompt: AnyPrompt) -> Prompt:
    """The prompt in our form: for one of vLLM's dicts its token ids, or else its text. ValueError for another dict."""
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
    """One conversation or several, as a list."""
    several = isinstance(messages, list | tuple) and messages and all(isinstance(one, list | tuple) for one in messages)
    return messages if several else [messages]
