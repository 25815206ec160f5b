"""A suffix automaton of a text drafts what follows it: the longest end of the text that occurred before is found in
constant time per token, whatever its length, and the drafts are what followed it then (Hu et al. 2024, "SAM Decoding").

Where `NgramProposer` looks for patterns of fixed lengths, this finds the longest one, and drafts as many tokens as it
is long. A second automaton may hold other requests' outputs: agents ask similar things and get similar answers.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from reference_impl.features.speculative.ngram import copied
from reference_impl.interfaces import Request

SEPARATOR = -1  # between two texts: no token, so no match goes across


class SuffixAutomaton:
    """The smallest automaton that accepts every substring of a text (Blumer et al. 1985), extended token by token.

    A state stands for all substrings that end at the same places. length: that of its longest; link: the state of the
    longest of its suffixes that also ends elsewhere; end: the position behind its first occurrence.
    """

    def __init__(self) -> None:
        self.text = array("q")
        self.next: list[dict[int, int]] = [{}]
        self.link, self.length, self.end = [-1], [0], [0]
        self._whole = 0  # the state of the whole text

    def append(self, token: int) -> None:
        """Adds a token to the text, in amortised constant time."""
        self.text.append(token)
        state, at = self._new(self.length[self._whole] + 1, 0, {}, len(self.text)), self._whole
        while at >= 0 and token not in self.next[at]:
            self.next[at][token] = state
            at = self.link[at]
        if at >= 0:
            self.link[state] = self._split(at, token)
        self._whole = state

    def _new(self, length: int, link: int, following: dict[int, int], end: int) -> int:
        self.next.append(following)
        self.link.append(link)
        self.length.append(length)
        self.end.append(end)
        return len(self.next) - 1

    def _split(self, at: int, token: int) -> int:
        """The state that `at` reaches with the token, with no substrings that are longer than those of `at` and it."""
        old = self.next[at][token]
        if self.length[old] == self.length[at] + 1:
            return old
        copy = self._new(self.length[at] + 1, self.link[old], dict(self.next[old]), self.end[old])
        self.link[old] = copy
        while at >= 0 and self.next[at].get(token) == old:
            self.next[at][token] = copy
            at = self.link[at]
        return copy

    def follow(self, state: int, matched: int, token: int) -> tuple[int, int]:
        """Goes one token further: takes the state of the longest end of some text that occurs here, and its length, and
        returns both for the text with this token more."""
        while state and token not in self.next[state]:
            state = self.link[state]
            matched = self.length[state]
        if token in self.next[state]:
            return self.next[state][token], matched + 1
        return 0, 0


class _Reader:
    """Follows a text through an automaton."""

    def __init__(self, automaton: SuffixAutomaton):
        self.automaton, self.state, self.matched = automaton, 0, 0

    def read(self, token: int) -> None:
        # Its state may have been split since: the shorter part is then the one with the right length.
        while self.state and self.automaton.length[self.automaton.link[self.state]] >= self.matched:
            self.state = self.automaton.link[self.state]
        self.state, self.matched = self.automaton.follow(self.state, self.matched, token)

    def propose(self, k: int) -> list[int]:
        text = self.automaton.text
        found = copied(text, self.automaton.end[self.state], k) if self.automaton.end[self.state] < len(text) else []
        return found[: found.index(SEPARATOR)] if SEPARATOR in found else found


class _Known:
    """What is kept of a request: the automaton of its text, and where its text is in both automata."""

    def __init__(self, shared: SuffixAutomaton):
        self.own, self.num_read = SuffixAutomaton(), 0
        self.readers = [_Reader(self.own), _Reader(shared)]

    def read(self, tokens: Sequence[int]) -> None:
        for token in tokens[self.num_read :]:
            for reader in self.readers:
                reader.read(token)
            self.own.append(token)  # behind: what ends here has not occurred before
        self.num_read = len(tokens)


class SuffixProposer:
    """A `HostProposer` by the longest match.

    shortest: no drafts from a match that is shorter. max_shared: how many tokens of finished requests' outputs are
    kept, 0 for none; when there are more, all are dropped. With some, drafts may hold what another request has written;
    that changes no text or distribution, but someone who measures time may learn of it.
    """

    def __init__(self, shortest: int = 2, max_shared: int = 0):
        if shortest < 1 or max_shared < 0:
            raise ValueError(
                f"SuffixProposer: expected shortest >= 1 and max_shared >= 0, got {shortest} and {max_shared}"
            )
        self.shortest, self.max_shared = shortest, max_shared
        self._shared = SuffixAutomaton()
        self._known: dict[str, _Known] = {}

    def propose(self, request: Request, k: int) -> Sequence[int]:
        """Drafts of at most k tokens, and no more than the match is long."""
        known = self._known.get(request.id)
        if known is None or known.num_read > len(request.tokens):
            known = self._known[request.id] = _Known(self._shared)
        known.read(request.tokens)
        for reader in sorted(known.readers, key=lambda reader: -reader.matched):  # of equally long ones its own text
            if reader.matched >= self.shortest and (found := reader.propose(min(k, reader.matched))):
                return found
        return ()

    def finished(self, request: Request) -> None:
        self._known.pop(request.id, None)
        output = request.tokens[request.num_prompt_tokens :]
        if not 0 < len(output) <= self.max_shared:
            return
        if len(self._shared.text) + len(output) >= self.max_shared:
            self._shared = SuffixAutomaton()
        for token in [*output, SEPARATOR]:
            self._shared.append(token)
