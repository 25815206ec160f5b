"""Conversations: messages in a model's chat template become token ids, as `transformers` renders them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reference_impl.core.prompts import PromptEncoder


class ChatEncoder(PromptEncoder):
    """With the chat template of the folder, if it has one."""

    def __init__(self, folder: Path | None):
        super().__init__(folder)
        self.chat_template, self._special_tokens = (None, {}) if folder is None else _read_chat_template(folder)

    def chat_prompt(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Token ids of a conversation [{"role": ..., "content": ...}], ready for the assistant's answer."""
        if self.chat_template is None or self.tokenizer is None:
            raise ValueError(f"{self.where} has no chat template: use generate() with a plain prompt")
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def refuse(message: str) -> None:
            raise ValueError(f"the chat template refuses these messages: {message}")

        # What `transformers` gives a template: the same white space rules, {% break %}, and these names.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        text = environment.from_string(self.chat_template).render(
            messages=list(messages), add_generation_prompt=True, raise_exception=refuse, **self._special_tokens
        )
        return self.tokens_of(text, add_special_tokens=False)


def _read_chat_template(folder: Path) -> tuple[str | None, dict[str, str]]:
    """The template of chat_template.jinja or tokenizer_config.json, and the special tokens that it may name."""
    file, template = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    config: dict[str, Any] = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    special = {}
    for name, token in config.items():
        token = token.get("content") if isinstance(token, dict) else token
        if name.endswith("_token") and isinstance(token, str):
            special[name] = token
    if template.is_file():
        return template.read_text("utf-8"), special
    found = config.get("chat_template")
    if isinstance(found, list):  # several, with names
        found = {entry["name"]: entry["template"] for entry in found}.get("default")
    return found, special
