"""What the event loop's process has of a model: its tokenizer and its chat template."""

from __future__ import annotations

from pathlib import Path

from reference_impl.llm import LLM, _read_chat_template, _read_tokenizer


class FolderPrompts(LLM):
    """`encode` and `chat_prompt` of an LLM that has no engine."""

    def __init__(self, folder: Path):
        self.tokenizer = _read_tokenizer(folder)
        self.chat_template, self._special_tokens = _read_chat_template(folder)
