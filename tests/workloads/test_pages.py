"""Page hashes: equal exactly as far as two prompts agree. Tokens: equal exactly as far as the pages are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference_impl.simulation.workloads import PAGE_TOKENS, WorkloadRequest, tokens_of
from reference_impl.simulation.workloads.pages import MASK, mix, mix_array, pages_of

# Few keys and lengths around the page, so that prompts often agree for a while; adjacent equal keys are one text.
segments = st.lists(st.tuples(st.integers(1, 3), st.sampled_from([0, 1, 63, 64, 65, 128, 200])), max_size=5)


def text(parts: list[tuple[int, int]]) -> list[tuple[object, ...]]:
    """The prompt spelled out: a token is the segments before it, its key, and its place. An oracle without hashes."""
    found: list[tuple[object, ...]] = []
    before: tuple[tuple[int, int], ...] = ()
    for key, num in parts:
        if num:
            found += [(before, key, i) for i in range(num)]
            before = (*before, (key, num))
    return found


def agree(a: list, b: list) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@settings(max_examples=200, deadline=None)
@given(segments, segments)
def test_pages_are_equal_exactly_as_far_as_the_texts_are(one: list, two: list) -> None:
    a, b = pages_of(one), pages_of(two)
    assert len(a) == len(text(one)) // PAGE_TOKENS
    assert agree(list(a), list(b)) == min(agree(text(one), text(two)) // PAGE_TOKENS, len(a), len(b))


def test_a_page_that_follows_other_text_has_another_hash() -> None:
    same_document = (7, 640)
    a, b = pages_of([(1, 64), same_document]), pages_of([(2, 64), same_document])
    assert not set(a) & set(b)


def test_longer_prompt_of_the_same_texts_begins_with_the_same_pages() -> None:
    short, long = pages_of([(1, 100), (2, 300)]), pages_of([(1, 100), (2, 1000)])
    assert long[: len(short)] == short
    assert len(set(long)) == len(long) == 17


def test_both_mixers_are_splitmix64() -> None:
    # First three outputs of splitmix64 with state 0 (the state grows by GOLDEN, the output is the finalizer of it).
    known = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    states = [(k * 0x9E3779B97F4A7C15) & MASK for k in (1, 2, 3)]
    assert [mix(s) for s in states] == known
    assert mix_array(np.array(states, dtype=np.uint64)).tolist() == known


def request(pages: tuple[int, ...], tail: int = 0, id: str = "a") -> WorkloadRequest:
    return WorkloadRequest(id, 0.0, len(pages) * PAGE_TOKENS + tail, 1, pages)


@settings(max_examples=100, deadline=None)
@given(segments, segments, st.sampled_from([2, 50, 4096, 128_000]))
def test_tokens_agree_exactly_as_far_as_the_pages(one: list, two: list, span: int) -> None:
    a, b = request(pages_of(one), 5, "a"), request(pages_of(two), 60, "b")
    left, right = tokens_of(a, span + 3), tokens_of(b, span + 3)
    pages = agree(list(a.pages), list(b.pages))
    assert left[: pages * PAGE_TOKENS] == right[: pages * PAGE_TOKENS]
    for k in range(pages + 1, min(len(a.pages), len(b.pages)) + 1):
        assert left[: k * PAGE_TOKENS] != right[: k * PAGE_TOKENS]
    assert len(left) == a.num_prompt_tokens
    assert all(3 <= t < span + 3 for t in left + right)


def test_tokens_are_the_same_on_every_machine() -> None:
    a = request((1, 2**64 - 1), 3, "chat-0-1.1")
    ids = tokens_of(a, 4096)
    assert (ids[:4], ids[64:68], ids[128:]) == GOLDEN_TOKENS
    assert tokens_of(replace(a, arrival=5.0, num_output_tokens=9), 4096) == ids


def test_tokens_use_the_whole_range_evenly() -> None:
    ids = tokens_of(request(tuple(range(1, 501))), 13, low=3)
    counts = np.bincount(ids, minlength=13)
    assert (counts[:3] == 0).all()
    # 32,000 tokens over 10 ids: 3,200 each, standard deviation 54.
    assert (abs(counts[3:] - 3200) < 5 * 54).all()


def test_tails_are_a_requests_own() -> None:
    a, b = request((5,), 40, "a"), request((5,), 40, "b")
    assert tokens_of(a, 4096)[:64] == tokens_of(b, 4096)[:64]
    assert tokens_of(a, 4096)[64:] != tokens_of(b, 4096)[64:]


@pytest.mark.parametrize(("vocab_size", "low"), [(4, 3), (3, 3), (0, 0), (10, -1), (2**33, 0)])
def test_a_vocabulary_that_cannot_tell_pages_apart_is_refused(vocab_size: int, low: int) -> None:
    with pytest.raises(ValueError, match="expected"):
        tokens_of(request((1,)), vocab_size, low)


def test_pages_that_do_not_fit_the_prompt_are_refused() -> None:
    with pytest.raises(ValueError, match=r"request 'a': 128 prompt tokens are 2 full pages of 64, got 1 pages"):
        tokens_of(WorkloadRequest("a", 0.0, 128, 1, (1,)), 4096)


GOLDEN_TOKENS = ([2321, 3055, 3977, 1821], [3661, 3738, 901, 1747], [3344, 1526, 117])
