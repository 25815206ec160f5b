"""The worked problems of chapters 02 and 03: every number of their folded answers, on the deployment all chapters share.

Llama-3-70B in 16 bit on four H100 with tensor parallelism, 90 % of the memory usable. Counted from the shape and the
data sheet, so that the answers do not depend on what a cost model adds.
"""

import math

import pytest

from reference_impl.theory import kv_cache, latency
from reference_impl.theory.hardware import device
from reference_impl.theory.model_shapes import model
from reference_impl.theory.units import GB

SHAPE, H100 = model("llama-3-70b"), device("H100")
USABLE = 0.9 * 320  # GB, of 4 x 80
EACH = float(kv_cache.bytes_per_token(SHAPE))
WEIGHTS = float(kv_cache.weight_bytes(SHAPE)) / GB
READ = 2 * SHAPE.linear_params / GB  # all weights but the table of input embeddings
BANDWIDTH, PEAK = 4 * H100.bandwidth, 4 * H100.peak()


def test_the_deployment_is_the_one_that_the_problems_describe() -> None:
    assert (SHAPE.layers, SHAPE.num_kv_heads, SHAPE.head_dim, H100.capacity / GB) == (80, 8, 128, 80)
    assert SHAPE.num_params / 1e9 == pytest.approx(70.55, abs=0.005)
    assert EACH == 2 * 80 * 8 * 128 * 2 == 327_680
    assert (WEIGHTS, READ) == pytest.approx((141.1, 139.0), abs=0.05)
    assert int(kv_cache.tokens_that_fit(4 * H100.capacity, WEIGHTS * GB, EACH)) == 448_280


def test_worked_02b_one_long_request_costs_as_much_as_many_short_ones() -> None:
    """70.55 billion parameters in 16 bit; 0.9 of 320 GB; 8 KV heads of 128."""
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
    assert 100 * 3597 / 5596 == pytest.approx(64, abs=0.5)
    assert (3597 * EACH / GB, 80 * 3597 * EACH / GB) == pytest.approx((1.18, 94.3), abs=0.05)
    blocks = math.ceil((prompt + mean / 2) / 16)
    assert (prompt + mean // 2, blocks, 16 * blocks, pool // (16 * blocks)) == (1750, 110, 1760, 254)
    assert 254 / 80 == pytest.approx(3.2, abs=0.05)
    assert (15 * EACH / 1e6, 254 * 15 * EACH / GB) == pytest.approx((4.9, 1.2), abs=0.05)
    assert 254 * written / 1e3 == pytest.approx(508, abs=0.5)
    assert 100 * (254 * written / pool - 1) == pytest.approx(13, abs=0.5)
    assert pool // written == 224
