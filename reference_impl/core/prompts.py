"""From user input to token ids: a text, or a conversation in the model's chat template. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

Prompt = str | Sequence[int]


class PromptEncoder:
    """The tokenizer and the chat template of a model's folder, as far as it has them. None: a model without one."""

    def __init__(self, folder: Path | None):
        self._where = "a shape with dummy weights" if folder is None else "this model folder"
        self.tokenizer = None if folder is None else _read_tokenizer(folder)
        self.chat_template, self._special_tokens = (None, {}) if folder is None else _read_chat_template(folder)

    def encode(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            return list(prompt)
        if self.tokenizer is None:
            raise ValueError(f"{self._where} has no tokenizer.json: pass token ids instead of text")
        return self._tokens(prompt)

    def _tokens(self, text: str, **options: Any) -> list[int]:
        assert self.tokenizer is not None
        # `encode` holds the GIL, seconds for a long text, and with it all other threads.
        return list(self.tokenizer.encode_batch_fast([text], **options)[0].ids)

    def chat_prompt(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Token ids of a conversation [{"role": ..., "content": ...}], ready for the assistant's answer."""
        if self.chat_template is None or self.tokenizer is None:
            raise ValueError(f"{self._where} has no chat template: use generate() with a plain prompt")
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
        return self._tokens(text, add_special_tokens=False)


def _read_tokenizer(folder: Path) -> Tokenizer | None:
    file = folder / "tokenizer.json"
    return Tokenizer.from_file(str(file)) if file.is_file() else None


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
