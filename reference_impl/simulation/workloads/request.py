"""One request of a workload: how long it is, whose text it shares, and when it comes. No text and no tokens."""

from __future__ import annotations

from dataclasses import dataclass

# Tokens of a page. Our choice: the block sizes of engines (1, 2, 4, ..., 64) divide it, so a cache with any of them
# finds what two requests share, and a prompt of 100,000 tokens is 1,562 numbers.
PAGE_TOKENS = 64


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """A request. arrival: seconds from the start of the stream; 0.0 where a closed loop decides (see `after`).

    pages: a 64-bit hash for each full page of PAGE_TOKENS prompt tokens, chained: equal hash at the same place means
    equal text from the start up to the end of that page. Unique text gets unique hashes.
    session: a conversation or an agent's run; "" where the workload has none. tenant: whose system prompt comes first.
    after: in a closed loop, the request that must finish first; then this one is sent after `think` seconds.
    images: how many; their tokens are part of num_prompt_tokens.
    """

    id: str
    arrival: float
    num_prompt_tokens: int
    num_output_tokens: int
    pages: tuple[int, ...]
    session: str = ""
    tenant: str = ""
    after: str | None = None
    think: float = 0.0
    images: int = 0
