"""Errata of prefix caching (E06.1 to E06.6, and E04.2 as far as it is about prefixes): counted on the engine's parts.

Every test states the claim in its docstring. Those that need a model are in test_ch06_engine.py.
"""

import random
from collections import OrderedDict
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from reference_impl import SamplingParams
from reference_impl.core.block_pool import BlockPool
from reference_impl.core.kv_manager import KVManager
from reference_impl.features.prefix.hash_index import HashIndex
from reference_impl.features.prefix.radix_index import RadixIndex
from reference_impl.interfaces import Request
from reference_impl.theory import prefix_cache

BLOCK = 4
tokens = st.lists(st.integers(0, 2), max_size=30)  # few values, so that prefixes meet


def full(text: list[int], size: int = BLOCK) -> list[int]:
    return text[: len(text) // size * size]


def served(index: HashIndex | RadixIndex, num_blocks: int, prompts: list[list[int]], size: int = BLOCK) -> list[int]:
    """Tokens found by each prompt, served one after the other through the engine's manager, without a model."""
    kv = KVManager(BlockPool(num_blocks), size, index=index)
    found = []
    for prompt in prompts:
        request = Request("r", list(prompt), len(prompt), SamplingParams(), seed=0, arrival=0.0)
        assert kv.admit(request, len(prompt), len(prompt))
        found.append(request.num_cached_tokens)
        request.num_computed_tokens = len(prompt)
        kv.free(request)
    return found


@given(tokens, tokens, tokens)
def test_e06_01_equal_tokens_behind_different_prefixes_are_different_entries(one, other, same) -> None:
    """A block is found behind its own prefix only, whatever its own tokens are. Nothing was computed to look it up."""
    one, other, same = full([*one, 0, 0, 0]), full([*other, 0, 0, 0]), full([*same, 1, 1, 1, 1])
    for make in (HashIndex, RadixIndex):
        index = make(BLOCK)
        index.insert(one + same, b"", range(len(one + same) // BLOCK))
        match = index.match(other + same, b"")
        equal = next((i for i, (a, b) in enumerate(zip(other + same, one + same, strict=False)) if a != b), None)
        expected = min(len(other + same), len(one + same)) if equal is None else equal
        assert match == list(range(expected // BLOCK))


@given(st.lists(tokens.filter(len), min_size=1, max_size=8), tokens.filter(len))
def test_e06_03_block_and_token_granularity_differ_by_less_than_a_block_on_the_same_trace(before, prompt) -> None:
    """A table of blocks finds whole blocks, a tree cut at tokens finds tokens; both leave the last token to compute."""
    by_block = served(HashIndex(BLOCK), 500, [*before, prompt])[-1]
    by_token = served(RadixIndex(1), 500, [*before, prompt], size=1)[-1]
    shared = max(next((i for i, (a, b) in enumerate(zip(p, prompt, strict=False)) if a != b), min(len(p), len(prompt)))
                 for p in before)  # fmt: skip
    assert by_token == prefix_cache.cached_tokens(shared, len(prompt), 1) <= len(prompt) - 1
    assert by_block == prefix_cache.cached_tokens(shared, len(prompt), BLOCK)
    assert 0 <= by_token - by_block < BLOCK


def test_e06_04_a_fixed_system_prompt_is_found_under_conditions_only() -> None:
    """Found by the second request; missed on a new replica, after eviction, and behind a changed first token."""
    system = list(range(100, 164))
    ask = [[*system, 1, i] for i in range(12)]
    assert served(HashIndex(16), 50, ask, 16) == [0] + [64] * 11
    replicas = [served(HashIndex(16), 50, ask[r::4], 16) for r in range(4)]  # round robin
    assert [found.count(0) for found in replicas] == [1] * 4
    others = [[1000 * i + j for j in range(80)] for i in range(1, 4)]
    assert served(HashIndex(16), 50, [ask[0], *others, ask[1]], 16)[-1] == 64
    assert served(HashIndex(16), 12, [ask[0], *others, ask[1]], 16)[-1] == 0, "evicted in between"
    assert served(HashIndex(16), 50, [[second, *p] for second, p in enumerate(ask)], 16) == [0] * 12


def test_e06_04_turns_of_a_chat_can_hit_more_than_a_fixed_system_prompt() -> None:
    """Each turn repeats the whole history: 90 % of 2,640 prompt tokens in the chapter's chat, cut at every token."""
    assert prefix_cache.conversation_tokens(100, 20, 40, 8) == 2640
    assert prefix_cache.conversation_floor(100, 20, 40, 8) == 267
    chat = 1 - 267 / 2640
    single_turns = 7 * 100 / (8 * 120)  # the same system prompt and messages, each asked by itself
    assert round(chat, 2) == 0.90
    assert chat > single_turns


def test_e06_04_round_robin_pays_one_miss_per_replica_and_the_longest_match_alone_piles_up() -> None:
    """16 chats of 4 turns over R replicas: what a router does decides the hit ratio, and who has to work."""
    found, busiest = {}, {}
    for replicas in (1, 4):
        for how in ("round robin", "session", "match"):
            fleet: list[list[list[int]]] = [[] for _ in range(replicas)]
            indexes = [RadixIndex(16) for _ in range(replicas)]
            hits = prompted = 0
            for i in range(64):
                turn, chat = divmod(i, 16)
                prompt = [*range(160), *(1000 + 100 * chat + t for t in range(40 * (turn + 1)))]
                match = [index.match_length(prompt, b"") for index in indexes]
                nearest = max(range(replicas), key=match.__getitem__)
                chosen = {"round robin": (i + turn) % replicas, "session": chat % replicas, "match": nearest}[how]
                hits += len(indexes[chosen].match(prompt[: len(prompt) - 1], b"")) * 16
                whole = len(prompt) // 16
                known = indexes[chosen].match(prompt, b"")
                fresh = range(1000 * i, 1000 * i + whole - len(known))
                indexes[chosen].insert(prompt[: whole * 16], b"", [*known, *fresh])
                fleet[chosen].append(prompt)
                prompted += len(prompt)
            found[how, replicas] = hits / prompted
            busiest[how, replicas] = max(map(len, fleet)) / 64
    assert found["round robin", 1] == found["session", 1] == found["match", 1]
    assert found["round robin", 4] < found["session", 4] <= found["match", 4]
    assert busiest["session", 4] == busiest["round robin", 4] == 1 / 4
    assert busiest["match", 4] == 1


def reachable(index: HashIndex | RadixIndex, prompts: list[list[int]]) -> set[int]:
    """Blocks that can be found by walking from the start of some prompt."""
    return {block for prompt in prompts for block in index.match(full(prompt), b"")}


@settings(deadline=None)
@given(st.lists(tokens, min_size=1, max_size=10), st.integers(1, 20), st.booleans())
def test_e06_05_no_cached_block_is_left_behind_an_evicted_one(prompts, num_blocks, radix) -> None:
    """Leaf first: after any eviction every cached block can still be found from the start of its prompt."""
    index = RadixIndex(BLOCK) if radix else HashIndex(BLOCK)
    next_block = 0
    for prompt in map(full, prompts):
        known = index.match(prompt, b"")
        fresh = len(prompt) // BLOCK - len(known)
        index.insert(prompt, b"", [*known, *range(next_block, next_block + fresh)])
        next_block += fresh
    index.evict(num_blocks, lambda block: True)
    assert len(index) == max(0, next_block - num_blocks)
    assert len(reachable(index, prompts)) == len(index)


@given(st.lists(st.integers(0, 9), min_size=8, max_size=30))
def test_e06_05_plain_lru_per_block_strands_what_leaf_first_keeps(path: list[int]) -> None:
    """Stamped one by one along the path, the front of a path is its oldest block: the wrong one to give up."""
    path = full(path)
    prefixes = OrderedDict((tuple(path[:end]), None) for end in range(BLOCK, len(path) + 1, BLOCK))
    prefixes.popitem(last=False)  # the least recently stamped
    assert len(prefixes) >= 1
    assert not any(prefix[:BLOCK] in prefixes for prefix in prefixes), "all that is left is stranded"
    for index in (HashIndex(BLOCK), RadixIndex(BLOCK)):
        index.insert(path, b"", range(len(path) // BLOCK))
        assert index.evict(1, lambda block: True) == [len(path) // BLOCK - 1], "the end of the path"
        assert len(index.match(path, b"")) == len(index)


def test_e06_05_using_a_leaf_refreshes_its_ancestors_and_held_blocks_stay() -> None:
    """The shared root is as recent as its most recent leaf; what a request holds is not evicted, however old."""
    root, a, b, other = [0] * BLOCK, [1] * BLOCK, [2] * BLOCK, [3] * BLOCK
    for index in (HashIndex(BLOCK), RadixIndex(BLOCK)):
        index.insert(root + a, b"", [0, 1])
        index.insert(root + b, b"", [0, 2])
        index.insert(other, b"", [3])
        index.match(root + a, b"")
        assert index.evict(2, lambda block: True) == [2, 3], (
            "leaf b, then the other text; the root was used with leaf a"
        )
        assert index.evict(2, lambda block: block != 1) == [], "a is held, and the root is no leaf"
        assert index.match(root + a, b"") == [0, 1]


names = st.none() | st.text(max_size=4)


@given(names, names, names, names)
def test_e06_06_adapter_and_salt_are_part_of_the_key(adapter, salt, other_adapter, other_salt) -> None:
    """Blocks are shared only if adapter and salt are equal; an absent one is not an empty one."""
    kv = KVManager(BlockPool(9), BLOCK, index=HashIndex(BLOCK))
    found = []
    for who in ((adapter, salt), (other_adapter, other_salt)):
        request = Request("r", [7] * 9, 9, SamplingParams(), seed=0, arrival=0.0, adapter=who[0], cache_salt=who[1])
        assert kv.admit(request, 9, 9)
        found.append(request.num_cached_tokens)
        request.num_computed_tokens = 9
        kv.free(request)
    assert found == [0, 8 if (adapter, salt) == (other_adapter, other_salt) else 0]


def test_many_requests_over_one_prefix_hold_it_once_with_a_reference_each() -> None:
    """50 requests over 2,000 common tokens: 125 blocks for them together instead of 6,250, each with 51 references."""
    kv = KVManager(BlockPool(400), 16, index=HashIndex(16))
    requests = []
    for i in range(50):
        request = Request(f"r{i}", [*range(2000), 5000 + i], 2001, SamplingParams(), seed=0, arrival=0.0)
        assert kv.admit(request, 2001, 2001)
        request.num_computed_tokens = 2001
        kv.commit(request)
        requests.append(request)
    assert (
        len({block for r in requests for block in r.block_table[:125]})
        == 125
        == prefix_cache.cached_tokens(2000, 2001) // 16
    )
    assert {kv.pool.ref_count(block) for block in requests[0].block_table[:125]} == {51}
    assert len({r.block_table[125] for r in requests}) == 50
    for request in requests:
        kv.free(request)
    assert kv.num_available == 400
    assert kv.pool.num_free == 400 - 125, "the prefix stays, in nobody's use"


def test_a_dearer_write_is_paid_back_by_the_first_read_or_the_second() -> None:
    """At 1.25 for a write and 0.1 for a read, 0.28 reads; at 2 for an hour, 1.11 reads."""
    assert round(prefix_cache.reads_to_break_even(1.25, 0.1), 2) == 0.28
    assert round(prefix_cache.reads_to_break_even(2.0, 0.1), 2) == 1.11
    for write, reads in ((1.25, 1), (2.0, 2)):
        bills = [prefix_cache.input_price(0, 1, n, write, 0.1) - (1 + n) for n in range(reads + 1)]
        assert bills[-1] < 0 < bills[-2]
        assert all(a > b for a, b in pairwise(bills))


class FourBits(HashIndex):
    """A chain whose digests have 16 values, so that two prefixes are soon taken for one."""

    def digests(self, tokens, key):
        return (bytes([digest[0] & 15]) for digest in super().digests(tokens, key))


def test_a_chain_of_short_digests_gives_a_prompt_the_blocks_of_another_and_a_tree_does_not() -> None:
    """A chain compares digests and no tokens: with few bits another prompt finds what is not its own. A tree compares
    tokens, whatever their hashes."""
    known = [1, 2, 3, 4]
    others = [[5, 6, 7, last] for last in range(200)]
    for index, wrong in ((FourBits(BLOCK), True), (HashIndex(BLOCK), False), (RadixIndex(BLOCK), False)):
        index.insert(known, b"", [0])
        assert index.match(known, b"") == [0]
        assert any(index.match(other, b"") for other in others) == wrong


def test_a_hash_of_64_bits_suffices_against_chance_and_not_against_search() -> None:
    assert prefix_cache.wrong_hits(65_536, 1, 16) == 1
    held, lookups = 28_017, 10_000 * 365 * 86_400
    assert prefix_cache.wrong_hits(lookups, held, 64) < 1e-3
    assert prefix_cache.wrong_hits(lookups, held, 128) < 1e-20
    assert 4 < prefix_cache.items_for_even_odds(64) / 1e9 < 6  # seconds at a billion per second
    assert prefix_cache.items_for_even_odds(128) / 1e9 > 1e10


def test_a_collision_at_the_birthday_bound_is_as_likely_as_not() -> None:
    """Counted: digests of 12 bits, as many as the bound says, 400 times."""
    n = round(prefix_cache.items_for_even_odds(12))
    rng = random.Random(6)
    repeats = sum(len({rng.randrange(2**12) for _ in range(n)}) < n for _ in range(400))
    assert n == 75
    assert 160 <= repeats <= 240
