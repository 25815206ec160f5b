"""Whose prefixes meet, what a match is cut to, what is evicted; the same for both indexes."""

from __future__ import annotations

import hashlib
import itertools
import random
import struct

import pytest

from reference_impl.features.prefix.hash_index import HashIndex
from reference_impl.features.prefix.radix_index import RadixIndex
from reference_impl.interfaces import PrefixIndex


@pytest.fixture(params=[HashIndex, RadixIndex])
def make(request):
    return request.param


def full_index(make, *requests, block_size=2):
    """An index of these (tokens, key); blocks are numbered as they come."""
    index, numbers = make(block_size), itertools.count()
    for tokens, key in requests:
        known = index.match(tokens, key)
        new = list(itertools.islice(numbers, len(tokens) // block_size - len(known)))
        index.insert(tokens, key, known + new)
    return index


def anything(block: int) -> bool:
    return True


def test_both_serve_the_protocol():
    indexes: list[PrefixIndex] = [HashIndex(16), RadixIndex(16)]
    for index in indexes:
        for name in ("match", "insert", "evict", "__len__"):
            assert callable(getattr(index, name))


# --- prefix keys: defects that real engines shipped ---------------------------------------------------------------


def test_one_tenant_never_reads_the_cache_of_another(make):
    """Adapter or salt missing from the key: vllm#30931, #44701, #44250, sglang#24638."""
    index = full_index(make, ([1, 2, 3, 4], b"adapter"))
    for key in (b"", b"adapter2", b"adapte", b"Adapter", b"\0adapter", b"adapter\0"):
        assert index.match([1, 2, 3, 4], key) == []
    assert index.insert([1, 2, 3, 4], b"", [7, 8]) == [7, 8]
    assert index.match([1, 2, 3, 4], b"adapter") == [0, 1]
    assert index.match([1, 2, 3, 4], b"") == [7, 8]


def test_an_empty_key_is_a_key_like_any_other(make):
    """hash(None) was the same in every process, and the start of every prefix: vllm#12621."""
    index = full_index(make, ([1, 2], b""))
    for key in (hashlib.sha256().digest(), b"None", b"\0" * 32, b"\0"):
        assert index.match([1, 2], key) == []


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (([1, 23], b""), ([12, 3], b"")),
        (([1, 23], b""), ([123, 0], b"")),
        (([1, 256], b""), ([1, 1], b"")),
        (([1, 2**16], b""), ([1, 0], b"")),
        (([2**16 + 5, 0], b""), ([5, 1], b"")),
        (([1, 2**32], b""), ([1, 0], b"")),
        (([2**32 + 5, 0], b""), ([5, 1], b"")),
        (([2**31, 0], b""), ([-(2**31), 0], b"")),
        (([0, 0], b""), ([0, 0], b"\0")),
        (([2**61 - 1, 0], b""), ([0, 0], b"")),  # the same hash() in CPython, which takes integers modulo 2**61 - 1
        (([-1, 0], b""), ([-2, 0], b"")),  # the same hash() too
        (([1, 2], b"abc"), ([1, 2], b"ab")),
        (([99, 1], b"ab"), ([1, 99], b"abc")),  # "ab" + "c..." and "abc" + "...": 99 is "c"
    ],
)
def test_different_tokens_or_keys_never_meet(make, one, other):
    """A hash that is not cryptographic can be made to collide: vllm#54727."""
    index = full_index(make, one)
    assert index.match(*other) == []
    index.insert(*other, [5])
    assert (index.match(*one), index.match(*other)) == ([0], [5])


@pytest.mark.parametrize("tag", [b"", b"\0", b"\1"])
@pytest.mark.parametrize("first_byte", range(2))
def test_a_key_made_of_a_digest_and_tokens_does_not_lead_into_the_chain(make, tag, first_byte):
    """If keys and blocks could be hashed alike, whoever chooses a salt could name the inside of another's chain."""
    victims = (b"%d" % i for i in itertools.count())
    victim = next(key for key in victims if hashlib.sha256(tag + key).digest()[0] == first_byte)
    index = full_index(make, ([1, 2, 3, 4], victim))
    link = hashlib.sha256(tag + victim).digest() + struct.pack("<2q", 1, 2)
    for key in (link, link[1:], b"\0" + link, b"\1" + link):
        assert index.match([3, 4], key) == []


def test_a_block_is_found_behind_its_own_prefix_only(make):
    index = full_index(make, ([1, 2, 3, 4], b""), ([5, 6], b""))
    assert index.match([3, 4], b"") == []
    assert index.match([5, 6, 3, 4], b"") == [2]
    assert index.match([2, 1, 3, 4], b"") == []


# --- matching and inserting ---------------------------------------------------------------------------------------


def test_a_match_is_cut_to_whole_blocks(make):
    index = full_index(make, ([1, 2, 3, 4, 5, 6], b""), block_size=3)
    assert index.match([1, 2, 3, 4, 5, 9], b"") == [0]
    assert index.match([1, 2, 3, 4, 5], b"") == [0]
    assert index.match([1, 2], b"") == []
    assert index.match([], b"") == []


def test_match_length_counts_the_tokens_inside_the_block_that_differs():
    index = full_index(RadixIndex, ([1, 2, 3, 4, 5, 6], b""), ([1, 2, 3, 7, 7, 7], b""), block_size=3)
    lengths = {(1, 2, 3, 4, 5, 9): 5, (1, 2, 3, 7, 7): 5, (1, 2, 3, 8): 3, (1, 2): 2, (2,): 0, (): 0}
    assert {tokens: index.match_length(tokens, b"") for tokens in lengths} == lengths
    assert index.match_length([1, 2, 3], b"other") == 0


def test_match_length_is_not_a_use():
    index = full_index(RadixIndex, ([1, 2], b""), ([3, 4], b""))
    index.match_length([1, 2], b"")
    assert index.evict(1, anything) == [0]


def test_who_computed_what_is_indexed_gets_the_block_that_was_there_first(make):
    index = full_index(make, ([1, 2, 3, 4], b""))
    assert index.insert([1, 2, 3, 4, 5, 6], b"", [10, 11, 12]) == [0, 1, 12]
    assert len(index) == 3
    assert index.insert([8, 9], b"", [10]) == [10], "the block that was not taken is free for another prefix"


def test_inserting_twice_is_a_use_and_indexes_nothing_anew(make):
    index = full_index(make, ([1, 2, 3, 4], b""), ([5, 6], b""))
    for blocks in ([0, 1], [8, 9], [0, 9]):
        assert index.insert([1, 2, 3, 4], b"", blocks) == [0, 1]
        assert len(index) == 3
    assert index.evict(9, anything) == [2, 1, 0]


def test_inserting_nothing_changes_nothing(make):
    index = make(4)
    assert (index.insert([], b"", []), len(index)) == ([], 0)


def test_tokens_may_come_as_any_sequence(make):
    index = full_index(make, ((1, 2, 3, 4), b""))
    assert index.match(range(1, 5), b"") == [0, 1]


@pytest.mark.parametrize(
    ("tokens", "blocks", "message"),
    [
        ([1, 2, 3], [5], "expected 1 blocks x 2 = 2 tokens, got 3 tokens"),
        ([1, 2], [5, 6], "expected 2 blocks x 2 = 4 tokens, got 2 tokens"),
        ([], [5], "expected 1 blocks x 2 = 2 tokens, got 0 tokens"),
        ([1, 2, 3, 4], [0, 0], "of its own at position 1, got 0, which is indexed under another prefix"),
        ([1, 2, 3, 9], [1, 5], "of its own at position 0, got 1, which is indexed under another prefix"),
        ([9, 9], [1], "of its own at position 0, got 1, which is indexed under another prefix"),
        ([9, 9, 9, 9], [5, 5], "of its own at position 1, got 5, which is given twice"),
        ([1, 2, 9, 9], [5, 5], "of its own at position 1, got 5, which is given twice"),
    ],
)
def test_wrong_input_is_refused_and_changes_nothing(make, tokens, blocks, message):
    index = full_index(make, ([1, 2, 3, 4], b""), ([7, 7], b""))
    with pytest.raises(ValueError, match=message):
        index.insert(tokens, b"", blocks)
    assert len(index) == 3
    assert index.evict(9, anything) == [1, 0, 2], "a refused insert does not count as a use either"


def test_a_block_size_below_one_is_refused(make):
    with pytest.raises(ValueError, match="block_size: expected at least 1, got 0"):
        make(0)


# --- eviction -----------------------------------------------------------------------------------------------------


def test_the_least_recently_used_leaf_goes_first_and_the_deeper_block_of_one_path(make):
    index = full_index(make, ([1, 2, 3, 4], b""), ([1, 2, 5, 6], b""), ([7, 8], b"x"))
    index.match([1, 2, 3, 4], b"")  # 0, 1 are younger than 3, and 3 is younger than 2
    assert index.evict(9, anything) == [2, 3, 1, 0]
    assert len(index) == 0


def test_what_lies_behind_a_match_is_not_used_by_it(make):
    index = full_index(make, ([1, 2, 3, 4, 5, 6], b""), ([7, 8], b""))
    assert index.match([1, 2], b"") == [0]
    assert index.evict(9, anything) == [2, 1, 3, 0]


def test_an_inner_block_is_never_evicted_however_old(make):
    """The long prefix is matched up to its first block only, so that its end is older than its beginning."""
    index = full_index(make, ([1, 2, 3, 4, 5, 6], b""))
    for _ in range(3):
        assert index.match([1, 2], b"") == [0]
    assert [index.evict(1, anything) for _ in range(4)] == [[2], [1], [0], []]


def test_a_block_in_use_keeps_its_path_and_nothing_else(make):
    index = full_index(make, ([1, 2, 3, 4, 5, 6], b""), ([1, 2, 7, 8], b""), ([9, 9], b""))
    assert index.evict(9, lambda block: block != 1) == [2, 3, 4]
    assert index.match([1, 2, 3, 4, 5, 6], b"") == [0, 1]
    assert index.evict(9, anything) == [1, 0], "what was in use can go once it is not"


def test_an_inner_block_in_use_does_not_protect_what_continues_it(make):
    index = full_index(make, ([1, 2, 3, 4, 5, 6], b""))
    assert index.evict(9, lambda block: block != 0) == [2, 1]


def test_a_block_can_be_indexed_anew_after_it_was_evicted(make):
    index = full_index(make, ([1, 2, 3, 4], b""))
    assert index.evict(1, anything) == [1]
    assert index.insert([1, 2, 8, 8], b"", [0, 1]) == [0, 1]
    assert index.match([1, 2, 3, 4], b"") == [0]
    assert index.match([1, 2, 8, 8], b"") == [0, 1]


@pytest.mark.parametrize("n", [0, -1])
def test_evicting_no_blocks_evicts_none(make, n):
    index = full_index(make, ([1, 2], b""))
    assert index.evict(n, anything) == []
    assert len(index) == 1


def test_evicting_one_by_one_is_evicting_at_once(make):
    def filled():
        generator = random.Random(5)
        requests = [([generator.randrange(2) for _ in range(12)], generator.choice([b"", b"a"])) for _ in range(60)]
        return full_index(make, *requests)

    one, other = filled(), filled()
    total = len(one)
    assert [block for _ in range(total) for block in one.evict(1, anything)] == other.evict(total, anything)


def test_asking_whether_a_block_is_in_use_costs_one_question_for_each_request(make):
    """Not for each block that the running requests hold: eviction would be quadratic in what runs."""
    num_requests, num_blocks = 50, 40
    requests = [([1, 1] + [i] * (2 * num_blocks - 2), b"") for i in range(2, num_requests + 2)]
    index = full_index(make, *requests, ([0, 0], b""))
    idle = index.match([0, 0], b"")
    asked = []
    assert index.evict(1, lambda block: asked.append(block) or block in idle) == idle
    assert len(asked) == num_requests + 1
