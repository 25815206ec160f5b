"""Prompts for an absent model: tokens that are equal exactly where the pages of two requests are.

`workloads.tokens_of` does this for a real vocabulary. Here a token may be any integer, so that a page is one number
repeated, which costs a hundredth. A prefix cache finds the same blocks with either.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, repeat
from typing import Any

from reference_impl.features.prefix.hash_index import HashIndex
from reference_impl.simulation.executor import WORD
from reference_impl.simulation.workloads.request import PAGE_TOKENS, WorkloadRequest

VOCAB_SIZE = 1 << 62  # fits the signed 64 bits of a hashed token
_PAGE = 1 << 61  # pages above, tails between it and 16, what every request writes below


class Prompts:
    """Makes prompts for one engine. The tokens after the last full page are unique."""

    def __init__(self) -> None:
        self._num_tails = 16

    def tokens(self, request: WorkloadRequest) -> list[int]:
        """The prompt of a request. Raises ValueError if its pages are not those of a prompt of that length."""
        rest = request.num_prompt_tokens - PAGE_TOKENS * len(request.pages)
        if not 0 <= rest < PAGE_TOKENS:
            raise ValueError(
                f"request {request.id!r}: {request.num_prompt_tokens} prompt tokens are "
                f"{request.num_prompt_tokens // PAGE_TOKENS} full pages of {PAGE_TOKENS}, got {len(request.pages)}"
            )
        self._num_tails += 1
        pages = chain.from_iterable(repeat(page % _PAGE + _PAGE, PAGE_TOKENS) for page in request.pages)
        return [*pages, *repeat(self._num_tails, rest)]


class PromptIndex(HashIndex):
    """The engine's prefix cache with names in place of digests: these tokens need not be hashed.

    A page identifies everything before it, a tail belongs to one request, and after either every request writes WORD.
    So the last token other than WORD, and where the block ends, identify the contents of the block and of those before.
    """

    def digests(self, tokens: Sequence[int], key: bytes) -> Iterator[Any]:
        size, last, answer = self.block_size, -1, False
        for end in range(size, len(tokens) + 1, size):
            if tokens[end - 1] != WORD:
                last = tokens[end - 1]
            elif not answer:  # the block in which the answer begins
                answer = True
                last = next((t for t in reversed(tokens[end - size : end]) if t != WORD), last)
            yield last << 32 | end  # a pair in one integer: a cache of 8,000 blocks is 0.5 MB smaller
