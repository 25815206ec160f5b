"""The worked problems of chapters 04 and 06: Llama-3-70B in BF16 on four H100, tensor parallel."""

import random
from collections import OrderedDict

import pytest

from reference_impl.theory import kv_cache, prefix_cache
from reference_impl.theory.deployment import WORKED as NODE
from reference_impl.theory.deployment import Deployment


def speed(batch: int) -> float:
    """Tokens per second of steps that only decode, with 1,000 tokens in the cache of each request."""
    return batch / NODE.tpot(1000, batch)


def test_worked_04_memory_into_batch() -> None:
    reserved, paged = NODE.cache_tokens() // 8192, int(NODE.cache_tokens() / 1007.5)
    assert (NODE.cache_tokens(), reserved, paged) == (448_280, 54, 444)
    assert paged / reserved == pytest.approx(8.2, abs=0.05)
    assert NODE.tpot(1000, reserved) == pytest.approx(14.1e-3, abs=0.05e-3)
    assert NODE.tpot(1000, paged) == pytest.approx(27.0e-3, abs=0.05e-3)
    assert round(speed(reserved)) == 3_834
    assert round(speed(paged)) == 16_426
    assert speed(paged) / speed(reserved) == pytest.approx(4.3, abs=0.05)
    assert 1000 * NODE.bytes_per_token == pytest.approx(328e6, abs=0.5e6)
    assert NODE.tpot(1000, 111) <= 16e-3 < NODE.tpot(1000, 112)
    assert round(speed(111)) == 6_947
    assert speed(111) / speed(reserved) == pytest.approx(1.8, abs=0.05)


def test_worked_04_a_block_size() -> None:
    heads_each = NODE.shape.num_kv_heads // 4
    assert heads_each == 2
    assert kv_cache.attention_bytes_per_token(1, heads_each, NODE.shape.head_dim) == 1024
    for size, share, slots, found in ((16, 2.4, 304, 192), (128, 17.5, 384, 128), (256, 29.8, 512, 0)):
        assert 100 * kv_cache.tail_waste_share(300, size) == pytest.approx(share, abs=0.05)
        assert kv_cache.blocks_for(300, size) * size == slots
        assert prefix_cache.cached_tokens(200, 300, size) == found


def test_worked_06_a_long_system_prompt() -> None:
    half = Deployment(NODE.shape, NODE.device, num_devices=4, mfu=0.5)
    miss, hit = half.prefill_seconds(4200), half.prefill_seconds(4200, 4000)
    assert miss == pytest.approx(341e-3, abs=0.5e-3)
    assert hit == pytest.approx(18.6e-3, abs=0.05e-3)
    assert miss / hit == pytest.approx(18.3, abs=0.05)
    assert 4200 / 200 == 21
    assert 1 / miss == pytest.approx(2.9, abs=0.05)
    assert 1 / hit == pytest.approx(53.8, abs=0.5)
    assert NODE.read / 4 / NODE.device.bandwidth == pytest.approx(10.4e-3, abs=0.05e-3)
    assert prefix_cache.cached_tokens(4000, 4200) == 4000
    assert (80 * 4200, 4000 + 80 * 200) == (336_000, 20_000)
    assert 336_000 / NODE.cache_tokens() == pytest.approx(0.75, abs=0.005)
    assert 20_000 / NODE.cache_tokens() == pytest.approx(0.04, abs=0.005)


def found_by_lru(rate: float, pause: float, room: int, session: int, turns: int = 40_000) -> float:
    """Share of turns whose session is still cached; sessions are kept whole, the least recently used goes first."""
    rng = random.Random(6)
    cache: OrderedDict[int, None] = OrderedDict()
    users, hits = round(rate * pause), 0
    for _ in range(turns):
        user = rng.randrange(users)  # pauses are exponential: whoever is next is drawn from all
        hits += user in cache
        cache[user] = None
        cache.move_to_end(user)
        if len(cache) > room // session:
            cache.popitem(last=False)
    return hits / turns


def test_worked_06_sessions_between_two_turns() -> None:
    room = NODE.cache_tokens() - 30 * 6000
    assert (NODE.cache_tokens(), room) == (448_280, 268_280)
    assert (4 * 60, 4 * 60 * 6000) == (240, 1_440_000)
    assert room // 6000 == 44
    assert room / (240 * 6000) == pytest.approx(0.19, abs=0.005)
    assert found_by_lru(4, 60, room, 6000) == pytest.approx(0.19, abs=0.02)
    assert room / 6000 / 60 == pytest.approx(0.75, abs=0.005)
    assert found_by_lru(0.7, 60, room, 6000) > 0.99
    eight_bits = int(2 * NODE.cache_tokens()) - 30 * 6000
    assert eight_bits == 716_560
    assert eight_bits / 1_440_000 == pytest.approx(0.5, abs=0.005)
