"""From text to token ids. It does not import torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

Prompt = str | Sequence[int]


class PromptEncoder:
    """Turns prompts into token ids by the tokenizer of a model's folder, if it has one. folder None: a model without
    one. ValueError for a tokenizer.json that cannot be read."""

    def __init__(self, folder: Path | None):
        self.where = "a shape with dummy weights" if folder is None else "this model folder"
        self.tokenizer = None if folder is None else _read_tokenizer(folder)

    def encode(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt. TypeError for what is neither a text nor a sequence."""
        if isinstance(prompt, str):
            return self.tokens_of(prompt)
        if isinstance(prompt, bytes | bytearray) or not isinstance(prompt, Iterable):
            raise TypeError(f"a prompt: expected a text or a sequence of token ids, got {prompt!r}")
        return list(prompt)

    def tokens_of(self, text: str, **options: Any) -> list[int]:
        if self.tokenizer is None:
            raise ValueError(f"{self.where} has no tokenizer.json: pass token ids instead of text")
        # `encode` holds the GIL, seconds for a long text, and with it all other threads.
        return list(self.tokenizer.encode_batch_fast([text], **options)[0].ids)


def _read_tokenizer(folder: Path) -> Tokenizer | None:
    file = folder / "tokenizer.json"
    try:
        return Tokenizer.from_file(str(file)) if file.is_file() else None
    except Exception as error:  # tokenizers raises nothing narrower
        raise ValueError(f"{file}: not a tokenizer of Hugging Face's tokenizers ({error}): download it again") from None
