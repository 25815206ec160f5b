"""Prompt lookup: the draft tokens are what followed the text's last tokens when they occurred before (Saxena 2023,
"Prompt Lookup Decoding"; vLLM's method "ngram"). It costs no model, and pays where text repeats: edits of code, answers
that quote their prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

from reference_impl.interfaces import Request


class NgramProposer:
    """A `HostProposer` by prompt lookup. longest, shortest: how many of the last tokens are looked for, the longest
    first.

    A short pattern is found more often and is right more rarely. Memory: an entry per token and length, until the
    request ends.
    """

    def __init__(self, longest: int = 4, shortest: int = 2):
        if not 1 <= shortest <= longest:
            raise ValueError(f"NgramProposer: expected 1 <= shortest <= longest, got {shortest} and {longest}")
        self.lengths = tuple(range(longest, shortest - 1, -1))
        self._indexes: dict[str, _Index] = {}

    def propose(self, request: Request, k: int) -> Sequence[int]:
        """Drafts of at most k tokens; none if the last `shortest` tokens have not occurred before."""
        tokens, index = request.tokens, self._indexes.get(request.id)
        if index is None:
            index = self._indexes[request.id] = _Index(self.lengths)
        index.read(tokens)
        at = index.behind_last(tokens)
        return () if at is None else copied(tokens, at, k)

    def finished(self, request: Request) -> None:
        self._indexes.pop(request.id, None)


class _Index:
    """Where each n-gram of a growing text ended last."""

    def __init__(self, lengths: Sequence[int]):
        self.ends: dict[int, dict[tuple[int, ...], int]] = {n: {} for n in lengths}
        self.num_read = 0

    def read(self, tokens: Sequence[int]) -> None:
        """Reads new tokens up to the last but one, so that the text's own end is not found."""
        for n, ends in self.ends.items():
            for end in range(max(n, self.num_read), len(tokens)):
                ends[tuple(tokens[end - n : end])] = end
        self.num_read = len(tokens)

    def behind_last(self, tokens: Sequence[int]) -> int | None:
        """The position behind the last earlier occurrence of the text's end, for the longest end that has one; None if
        none has. An occurrence may overlap the end."""
        for n, ends in self.ends.items():
            if (end := ends.get(tuple(tokens[-n:]))) is not None:
                return end
        return None


def copied(tokens: Sequence[int], at: int, k: int) -> list[int]:
    """The k tokens from `at` on. Behind the last token it goes on with what it has copied: drafts of a text that
    repeats with a period shorter than k repeat, too."""
    found: list[int] = []
    for i in range(at, at + k):
        found.append(tokens[i] if i < len(tokens) else found[i - len(tokens)])
    return found
