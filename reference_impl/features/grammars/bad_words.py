"""Words that an answer may not have, as vLLM's `bad_words`: the token that would complete one is ruled out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tokenizers import Tokenizer

from reference_impl.interfaces import SamplingParams


class BadWords:
    """A `Grammar` that keeps words out. Each is kept out as its tokens at a text's start, and as those behind a space
    if they are as many; spelt with other tokens it can still be written, as in vLLM. Words in the prompt do not count.

    end_tokens: the model's. ValueError if the words could leave none of the tokens that the request may draw.
    """

    def __init__(self, sampling: SamplingParams, tokenizer: Tokenizer, vocab_size: int, end_tokens: Sequence[int]):
        found = []
        for word in sampling.bad_words:
            bare, behind_space = (
                tokenizer.encode(space + word.lstrip(), add_special_tokens=False).ids for space in ("", " ")
            )
            found.append(bare)
            if len(behind_space) == len(bare) and behind_space[:1] != bare[:1]:
                found.append(behind_space)
        self.spelt = [tuple(tokens) for tokens in found if tokens and max(tokens) < vocab_size]
        self.vocab_size = vocab_size
        may = set(range(vocab_size) if sampling.allowed_token_ids is None else sampling.allowed_token_ids)
        if sampling.min_tokens:
            may -= {*sampling.stop_token_ids, *end_tokens}
        if may <= {last for *_, last in self.spelt}:
            raise ValueError("bad_words: together they could rule out every token that may be drawn; leave some out")

    def allowed(self, output: Sequence[int]) -> bytes:
        may = np.ones(self.vocab_size, np.uint8)
        for *before, last in self.spelt:
            if not before or list(output[-len(before) :]) == before:
                may[last] = 0
        return np.packbits(may, bitorder="little").tobytes()
