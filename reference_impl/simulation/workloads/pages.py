"""Page hashes of a prompt, and prompt tokens that repeat exactly where the hashes do.

A prompt is a list of segments (key, num_tokens): system prompt, documents, the session's own text. A key stands for a
text without end, of which the segment is the beginning. So two prompts agree up to a token iff the segments before it
are equal and the segment around it has the same key.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from reference_impl.simulation.workloads.request import PAGE_TOKENS, WorkloadRequest

GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: the step of splitmix64
MASK = (1 << 64) - 1
Array = npt.NDArray[np.uint64]


def mix(x: int) -> int:
    """Finalizer of splitmix64 (Steele, Lea, Flood 2014): a bijection of 64-bit integers that looks random."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def mix_array(x: Array) -> Array:
    """`mix` for uint64 arrays; products wrap around."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def key_of(*parts: object) -> int:
    """64 bits for a name such as ("chat", "session", 0, 17), the same on every machine."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def pages_of(segments: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """A hash for each full page of the prompt that these segments (key, num_tokens) make.

    hash of page i = mix(chain + (i + 1) * GOLDEN), where chain = mix over the keys and lengths of the segments up to
    the one that holds the page's last token, and that segment's key. A segment of no tokens changes nothing.
    """
    chain, end = 0, 0  # of the segments so far; tokens so far
    chains: list[int] = []
    counts: list[int] = []
    for key, num_tokens in segments:
        if num_tokens == 0:
            continue
        inside = mix(chain ^ key)
        full = end // PAGE_TOKENS
        end += num_tokens
        if end // PAGE_TOKENS > full:
            chains.append(inside)
            counts.append(end // PAGE_TOKENS - full)
        chain = mix((inside + num_tokens * GOLDEN) & MASK)
    if not chains:
        return ()
    # uint64 and its wrap-around: the multiplication by GOLDEN is meant modulo 2^64.
    steps = np.arange(1, sum(counts) + 1, dtype=np.uint64) * np.uint64(GOLDEN)
    return tuple(mix_array(np.repeat(np.array(chains, dtype=np.uint64), counts) + steps).tolist())


def tokens_of(request: WorkloadRequest, vocab_size: int, low: int = 3) -> list[int]:
    """Prompt tokens in [low, vocab_size), num_prompt_tokens of them, the same on every machine and in every process.

    Two requests share the first k * PAGE_TOKENS tokens iff their first k pages are equal (two pages that differ would
    agree by accident with probability (vocab_size - low)^-64). The tail after the last full page is the request's own:
    a cache with blocks smaller than a page finds no more than the pages say.
    low: the first id that is not special; 3 is the course tokenizer's. Where special tokens stand at the end of the
    vocabulary, give the id of the first of them as vocab_size.
    """
    if vocab_size - low < 2 or low < 0:
        raise ValueError(f"expected 0 <= low <= vocab_size - 2, got low {low}, vocab_size {vocab_size}")
    if vocab_size - low > 1 << 32:
        raise ValueError(f"expected at most 2^32 tokens, got {vocab_size - low}")
    if len(request.pages) != request.num_prompt_tokens // PAGE_TOKENS:
        raise ValueError(
            f"request {request.id!r}: {request.num_prompt_tokens} prompt tokens are "
            f"{request.num_prompt_tokens // PAGE_TOKENS} full pages of {PAGE_TOKENS}, got {len(request.pages)} pages"
        )
    tail = key_of("tail", request.id, request.pages[-1:])
    texts = np.array([*request.pages, tail], dtype=np.uint64)
    steps = np.arange(1, PAGE_TOKENS + 1, dtype=np.uint64) * np.uint64(GOLDEN)
    bits = mix_array(texts[:, None] + steps) >> np.uint64(32)  # [num_pages + 1, PAGE_TOKENS], below 2^32
    # 32 random bits times the span, without the upper half: even to one part in 2^32 / span.
    ids = (bits * np.uint64(vocab_size - low) >> np.uint64(32)) + np.uint64(low)
    found: list[int] = ids.ravel()[: request.num_prompt_tokens].tolist()
    return found
