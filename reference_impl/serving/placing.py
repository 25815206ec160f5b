"""Where a prompt is cheapest, as far as a router can tell from what it has sent: an engine need not compute again the
pages that it has had, and one that has little to do answers sooner.

It is a guess: an engine evicts pages without saying so. What is wrong costs a hit or a place in a queue, and no text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

from reference_impl.interfaces.pages import PAGE_TOKENS
from reference_impl.serving.fleet import pages_of

MOST_PAGES = 1 << 18  # that are remembered of an engine: 4 million tokens
REQUEST_TOKENS = 64  # a request that an engine has weighs as much as so many tokens that it must compute


def full_pages(tokens: Sequence[int], options: Mapping[str, Any]) -> tuple[int, ...]:
    """What stands for each full page of a text and all before it. options: the request's, which may have a salt."""
    return pages_of(tokens, str(options.get("cache_salt") or ""), PAGE_TOKENS)


class Placement:
    """What each engine has had."""

    def __init__(self) -> None:
        self._had: dict[int, dict[int, None]] = {}  # pages, the oldest first

    def note(self, engine: int, pages: Sequence[int]) -> None:
        had = self._had.setdefault(engine, {})
        for page in pages:
            had.pop(page, None)
            had[page] = None
        for page in [*islice(had, max(0, len(had) - MOST_PAGES))]:
            del had[page]

    def forget(self, engine: int) -> None:
        self._had.pop(engine, None)

    def num_new(self, engine: int, pages: Sequence[int]) -> int:
        """How many of a prompt's pages the engine has not had. One that it has not had ends the prefix."""
        had = self._had.get(engine, {})
        return len(pages) - next((at for at, page in enumerate(pages) if page not in had), len(pages))

    def cheapest(self, engines: Sequence[int], pages: Sequence[int], num_requests: Callable[[int], int]) -> int:
        """The engine with the least to compute for these pages and the requests that it has; the first of equals."""
        return min(
            engines,
            key=lambda engine: PAGE_TOKENS * self.num_new(engine, pages) + REQUEST_TOKENS * num_requests(engine),
        )
