"""A tokenizer that fails with one token, as one of `tokenizers` may."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer


class Picky:
    error: type[BaseException] = Exception  # tokenizers raises nothing narrower

    def __init__(self, tokenizer: Tokenizer, bad: int):
        self._tokenizer, self._bad = tokenizer, bad

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        if self._bad in ids:
            raise self.error("no such token")
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)
