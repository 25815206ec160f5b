"""Words that an answer may not have, as vLLM's `bad_words`: the token that would complete one is ruled out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tokenizers import Tokenizer


class BadWords:
    """A `Grammar`. Each word is kept out as the tokens that it is at a text's start, and behind a space where these are
    as many; spelt with other tokens it can be written, as in vLLM. Words in the prompt do not count."""

    def __init__(self, words: Sequence[str], tokenizer: Tokenizer, vocab_size: int):
        found = []
        for word in words:
            bare, behind_space = (
                tokenizer.encode(space + word.lstrip(), add_special_tokens=False).ids for space in ("", " ")
            )
            found.append(bare)
            if len(behind_space) == len(bare) and behind_space[:1] != bare[:1]:
                found.append(behind_space)
        self.spelt = [tuple(tokens) for tokens in found if tokens]
        self.vocab_size = vocab_size

    def allowed(self, output: Sequence[int]) -> bytes:
        may = np.ones(self.vocab_size, np.uint8)
        for *before, last in self.spelt:
            if not before or list(output[-len(before) :]) == before:
                may[last] = 0
        return np.packbits(may, bitorder="little").tobytes()
