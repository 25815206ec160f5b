"""The worked problems of chapters 02 and 03: every number of their folded answers, on the deployment they share.

`theory.deployment.WORKED`: Llama-3-70B in 16 bit on four H100 with tensor parallelism, 90 % of the memory usable. Half
of the peak and 80 % of the bandwidth where a problem says so.
"""

import math

import pytest

from reference_impl.theory import kv_cache, latency
from reference_impl.theory.deployment import WORKED
from reference_impl.theory.units import GB

SHAPE, H100 = WORKED.shape, WORKED.device
USABLE = 0.9 * 320  # GB, of 4 x 80
EACH, WEIGHTS, READ = WORKED.bytes_per_token, WORKED.weights / GB, WORKED.read / GB
BANDWIDTH, PEAK = 0.8 * 4 * H100.bandwidth, 0.5 * 4 * H100.peak()
IN_LAYERS = SHAPE.linear_params - SHAPE.vocab_size * SHAPE.hidden_size


def test_the_deployment_is_the_one_that_the_problems_describe() -> None:
    assert (SHAPE.layers, SHAPE.num_kv_heads, SHAPE.head_dim, H100.capacity / GB) == (80, 8, 128, 80)
    assert SHAPE.num_params / 1e9 == pytest.approx(70.55, abs=0.005)
    assert EACH == 2 * 80 * 8 * 128 * 2 == 327_680
    assert pytest.approx((141.1, 139.0), abs=0.05) == (WEIGHTS, READ)
    assert WORKED.cache_tokens() == 448_280
    assert pytest.approx((10.72, 1979), abs=0.5) == (BANDWIDTH / 1e12, PEAK / 1e12)
    assert pytest.approx(68.45, abs=0.005) == IN_LAYERS / 1e9


def test_worked_02b_one_long_request_costs_as_much_as_many_short_ones() -> None:
    """70.55 billion parameters in 16 bit; 0.9 of 320 GB; 8 KV heads of 128."""
    assert pytest.approx((141.1, 327_680), abs=0.05) == (WEIGHTS, EACH)
    room = USABLE - WEIGHTS
    chat, long = (n * EACH / GB for n in (4096, 131_072))
    assert (room, chat, 60 * chat, long) == pytest.approx((146.9, 1.34, 80.5, 42.9), abs=0.05)
    assert long / chat == 32
    needed = 60 * chat + long
    assert (needed, room - needed, long - (room - needed)) == pytest.approx((123.5, 23.4, 19.5), abs=0.05)
    assert math.ceil((long - (room - needed)) / chat) == 15
    both = 60 * chat + 2 * long
    four_bit = float(kv_cache.weight_bytes(SHAPE, kv_cache.bits_per_weight(4, 128), 16)) / GB
    assert (both, both / 2, four_bit, USABLE - four_bit) == pytest.approx((166.4, 83.2, 39.5, 248.5), abs=0.05)
    by_cache, by_weights = room - both / 2, USABLE - four_bit - both
    assert (by_cache, by_weights) == pytest.approx((63.7, 82.1), abs=0.05)
    assert (by_cache * GB / (EACH / 2) / 1e3, by_weights * GB / EACH / 1e3) == pytest.approx((389, 250), abs=0.5)
    held = {tp: EACH / SHAPE.num_kv_heads * max(1, SHAPE.num_kv_heads // tp) for tp in (4, 8, 16)}
    assert held == {4: 81_920, 8: 40_960, 16: 40_960}
    assert 16 * held[16] == 2 * EACH


def test_worked_02c_a_reservation_for_the_longest_case_costs_most_of_the_seats() -> None:
    """Of 327,680 bytes each, 448,280 tokens at 90 % of four times 80 GB; blocks of 16."""
    prompt, mean, cap, pool = 1500, 500, 4096, 448_280
    assert (prompt + cap, pool // (prompt + cap)) == (5596, 80)
    written = prompt + mean - 1
    assert (written, prompt + cap - written) == (1999, 3597)
    assert pytest.approx(64, abs=0.5) == 100 * 3597 / 5596
    assert pytest.approx((1.18, 94.3), abs=0.05) == (3597 * EACH / GB, 80 * 3597 * EACH / GB)
    blocks = math.ceil((prompt + mean / 2) / 16)
    assert (prompt + mean // 2, blocks, 16 * blocks, pool // (16 * blocks)) == (1750, 110, 1760, 254)
    assert pytest.approx(3.2, abs=0.05) == 254 / 80
    assert pytest.approx((4.9, 1.2), abs=0.05) == (15 * EACH / 1e6, 254 * 15 * EACH / GB)
    assert 254 * written / 1e3 == pytest.approx(508, abs=0.5)
    assert 100 * (254 * written / pool - 1) == pytest.approx(13, abs=0.5)
    assert pool // written == 224


def step_seconds(chunk: int, past: int, decodes: int = 32) -> float:
    """A step bound by arithmetic: 2 FLOP per weight of the layers and token, and the chunk's own attention."""
    attention = latency.attention_flops(latency.causal_pairs(chunk, past), 80, 64, 128)
    return float(2 * IN_LAYERS * (chunk + decodes) + attention) / PEAK


def test_worked_03a_a_long_prompt_beside_32_streams_and_the_chunk_that_keeps_50_ms() -> None:
    """68.45 billion weights in the layers, 4·64·128·80 FLOP per pair; 139.0 GB read at 80 % of 13.4 TB/s; 50 %."""
    assert pytest.approx((10.72, 1979), abs=0.5) == (BANDWIDTH / 1e12, PEAK / 1e12)
    caches = 32 * 4096 * EACH / GB
    assert (caches, READ + caches) == pytest.approx((42.9, 182.0), abs=0.05)
    decode = (READ + caches) * GB / BANDWIDTH
    assert (decode * 1e3, 2 * IN_LAYERS * 32 / PEAK * 1e3) == pytest.approx((17.0, 2.2), abs=0.05)
    prompt = 20_000
    matrices = 2 * IN_LAYERS * prompt / 1e15
    attention = latency.attention_flops(latency.causal_pairs(prompt), 80, 64, 128) / 1e15
    assert (matrices, attention, matrices + attention) == pytest.approx((2.74, 0.52, 3.26), abs=0.005)
    alone, mixed = step_seconds(prompt, 0, 0), step_seconds(prompt, 0)
    assert (alone * 1e3, mixed * 1e3, (alone + decode) * 1e3) == pytest.approx((1649, 1651, 1666), abs=0.5)
    assert pytest.approx((98.9, 723), abs=0.5) == (0.05 * PEAK / 1e12, 0.05 * PEAK / (2 * IN_LAYERS))
    assert 723 - 32 == 691
    assert step_seconds(691, prompt - 691) * 1e3 == pytest.approx(68, abs=0.5)
    largest = max(c for c in range(1, 691) if step_seconds(c, prompt - c) <= 0.05)
    assert largest == 501
    assert 512 - 32 == 480 < largest
    starts = range(0, prompt, 480)
    whole = sum(step_seconds(min(480, prompt - start), start) for start in starts)
    assert len(starts) == 42
    assert step_seconds(480, prompt - 480) * 1e3 == pytest.approx(48, abs=0.5)
    assert (whole, 100 * (whole / mixed - 1)) == pytest.approx((1.74, 5.5), abs=0.05)
    assert all(step_seconds(min(480, prompt - start), start) > decode for start in starts[:-1])


def test_worked_03b_beyond_the_balance_of_bytes_and_arithmetic_seats_only_lengthen_tpot() -> None:
    """1,500 tokens in, 500 out: 499 decode steps; 68.45 billion weights; 448,280 tokens of cache; 1,979 TFLOP/s."""
    assert pytest.approx((10.72, 139.0, 327_680), abs=0.05) == (BANDWIDTH / 1e12, READ, EACH)
    attention = latency.attention_flops(latency.cached_attention_pairs(1500, 500), 80, 64, 128)
    work = 2 * IN_LAYERS * 1999 + float(attention)
    assert (2 * IN_LAYERS * 1999 / 1e12, attention / 1e12, work / 1e12) == pytest.approx((273.7, 5.2, 278.9), abs=0.05)
    most = PEAK / work
    assert most == pytest.approx(7.1, abs=0.05)

    def of_bytes(seats: int) -> float:
        return (READ * GB + seats * 1750 * EACH) / BANDWIDTH

    def of_arithmetic(seats: int) -> float:
        return seats / 499 * work / PEAK

    assert (1750 * EACH / GB, of_bytes(0) * 1e3) == pytest.approx((0.57, 13.0), abs=0.05)
    assert of_bytes(57) < of_arithmetic(57) < 1.01 * of_bytes(57)
    assert of_bytes(56) > of_arithmetic(56)
    assert (of_bytes(32) * 1e3, 32 / 499 / of_bytes(32)) == pytest.approx((14.7, 4.4), abs=0.05)
    assert of_arithmetic(57) * 1e3 == pytest.approx(16.1, abs=0.05)
    assert of_arithmetic(106) * 1e3 < 30 < of_arithmetic(107) * 1e3
    assert (448_280 // 2000, of_arithmetic(224) * 1e3) == pytest.approx((224, 63), abs=0.5)
    for seats in (57, 106, 224):  # bound by arithmetic, so the rate is the same
        assert seats / 499 / of_arithmetic(seats) == pytest.approx(most)
    # Little's law at 6 a second: seats = rate * 499 * step, and the step is bound by bytes.
    needed = 6 * 499 * READ * GB / BANDWIDTH / (1 - 6 * 499 * 1750 * EACH / BANDWIDTH)
    assert (needed, of_bytes(round(needed)) * 1e3) == pytest.approx((46, 15.4), abs=0.5)
    assert 100 * 6 / most == pytest.approx(85, abs=0.5)
