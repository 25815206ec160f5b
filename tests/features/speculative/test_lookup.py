"""Drafts from the text itself, against definitions that search all of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference_impl.features.speculative.ngram import NgramProposer, copied
from reference_impl.features.speculative.suffix import SEPARATOR, SuffixAutomaton, SuffixProposer

TEXTS = st.lists(st.integers(0, 2), max_size=40)


def request(tokens: list[int], name: str = "q", num_prompt_tokens: int = 0) -> Any:
    return SimpleNamespace(id=name, tokens=tokens, num_prompt_tokens=num_prompt_tokens)


def last_occurrence(text: list[int], n: int) -> int | None:
    """Behind the last place before the end where the last n tokens occur."""
    for end in range(len(text) - 1, n - 1, -1):
        if text[end - n : end] == text[len(text) - n :]:
            return end
    return None


def in_one_go(tokens: list[int], at: int, k: int) -> list[int]:
    grown = [*tokens]
    for i in range(k):
        grown.append(grown[at + i])
    return grown[len(tokens) :]


@given(text=TEXTS, cuts=st.lists(st.integers(1, 5), max_size=8), k=st.integers(1, 6), shortest=st.integers(1, 3),
       more=st.integers(0, 3))  # fmt: skip
def test_an_ngram_is_drafted_to_go_on_as_it_did_last(text, cuts, k, shortest, more) -> None:
    """However the text has grown between the questions."""
    proposer, asked = NgramProposer(shortest + more, shortest), request([])
    for size in [*cuts, len(text)]:
        asked.tokens = text[: len(asked.tokens) + size]
        expected: list[int] = []
        for n in range(shortest + more, shortest - 1, -1):
            if n < len(asked.tokens) and (at := last_occurrence(asked.tokens, n)) is not None:
                expected = in_one_go(asked.tokens, at, k)
                break
        assert list(proposer.propose(asked, k)) == expected


def longest_repeated_end(text: list[int], other: list[int] | None = None) -> int:
    """Length of the longest end of a text that occurs in `other`, or before its own end."""
    for n in range(len(text), 0, -1):
        pattern, where = text[len(text) - n :], text[:-1] if other is None else other
        if any(where[at : at + n] == pattern for at in range(len(where) - n + 1)):
            return n
    return 0


@given(text=TEXTS, cuts=st.lists(st.integers(1, 5), max_size=8), k=st.integers(1, 6), shortest=st.integers(1, 3))
def test_the_longest_end_that_occurred_before_is_found_and_trusted_by_its_length(text, cuts, k, shortest) -> None:
    proposer, asked = SuffixProposer(shortest), request([])
    for size in [*cuts, len(text)]:
        asked.tokens = text[: len(asked.tokens) + size]
        n, draft = longest_repeated_end(asked.tokens), list(proposer.propose(asked, k))
        assert len(draft) == (min(k, n) if n >= shortest else 0)
        if draft:  # it is what followed at some earlier place
            ends = range(n, len(asked.tokens))
            pattern = asked.tokens[len(asked.tokens) - n :]
            places = [end for end in ends if asked.tokens[end - n : end] == pattern]
            assert draft in [in_one_go(asked.tokens, at, len(draft)) for at in places]


@given(text=TEXTS)
def test_an_automaton_accepts_the_substrings_of_its_text_and_nothing_else(text: list[int]) -> None:
    automaton = SuffixAutomaton()
    for token in text:
        automaton.append(token)
    substrings = {tuple(text[i:j]) for i in range(len(text) + 1) for j in range(i, len(text) + 1)}
    accepted, waiting = set(), [((), 0)]
    while waiting:
        string, state = waiting.pop()
        accepted.add(string)
        assert len(string) <= automaton.length[state]
        end = automaton.end[state]
        assert tuple(text[end - len(string) : end]) == string
        waiting += [((*string, token), following) for token, following in automaton.next[state].items()]
    assert accepted == substrings
    assert len(automaton.next) <= max(1, 2 * len(text))


@given(finished=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), max_size=4), text=TEXTS,
       k=st.integers(1, 6))  # fmt: skip
def test_what_other_requests_wrote_is_found_too_and_no_match_crosses_two_of_them(finished, text, k) -> None:
    proposer = SuffixProposer(shortest=1, max_shared=10**6)
    for i, output in enumerate(finished):
        proposer.finished(request([9, 9, *output], f"f{i}", num_prompt_tokens=2))  # of a prompt nothing is kept
    own = longest_repeated_end(text)
    other = max([0, *(longest_repeated_end(text, output) for output in finished)])
    draft = list(proposer.propose(request(text), k))
    assert SEPARATOR not in draft
    assert 9 not in draft
    if own >= other:
        assert len(draft) == min(k, own)
    else:
        assert len(draft) <= min(k, other)
        pattern = text[len(text) - other :]
        places = [(o, e) for o in finished for e in range(other, len(o) + 1) if o[e - other : e] == pattern]
        alone = list(SuffixProposer(shortest=1).propose(request(text), k))  # where the other one ends with the match
        assert draft == alone or draft in [o[e : e + len(draft)] for o, e in places]


def test_memory_of_other_requests_is_bounded_and_of_ended_ones_nothing_is_left() -> None:
    proposer, ngram = SuffixProposer(max_shared=50), NgramProposer()
    for i in range(40):
        asked = request([i, 1, 2, 3, 4, 1, 2], f"q{i}", num_prompt_tokens=1)
        for one in (proposer, ngram):
            assert list(one.propose(asked, 2)) == [3, 4]
            one.finished(asked)
            one.finished(request([1], "never asked about"))
    assert len(proposer._shared.text) <= 50
    assert [proposer._known, ngram._indexes] == [{}, {}]
    proposer.finished(request([0] * 200, "longer than all that is kept"))
    assert len(proposer._shared.text) <= 50


def test_a_copy_goes_on_with_itself() -> None:
    assert copied([5, 6, 7], 1, 7) == [6, 7, 6, 7, 6, 7, 6]
    assert copied([5, 6, 7], 0, 2) == [5, 6]


@pytest.mark.parametrize(("kind", "options"), [
    (NgramProposer, {"longest": 2, "shortest": 3}), (NgramProposer, {"shortest": 0}),
    (SuffixProposer, {"shortest": 0}), (SuffixProposer, {"max_shared": -1}),
])  # fmt: skip
def test_lengths_that_cannot_be_are_refused(kind: Any, options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="expected"):
        kind(**options)
