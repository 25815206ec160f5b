"""The worked problems of the chapters: every number of their folded answers, on the one deployment they share."""

from dataclasses import replace

import numpy as np
import pytest

from reference_impl.theory import collectives, kv_cache, latency, roofline
from reference_impl.theory.deployment import WORKED
from reference_impl.theory.units import GB, TB

# What the problems state, and what several of their answers use. The first test holds it against the deployment.
BILLIONS, MATRICES, OF_LAYERS = 70.55, 69.50, 68.45  # all, those of a pass, those of the layers
READ_GB, HEAD_GB, TOKEN_BYTES, REQUEST_GB, ROOM_GB = 139.0, 2.1, 327_680, 2.684, 288
TERABYTES, TERAFLOPS = (
    (3.35, 13.4),
    (989, 3956, 1978),
)  # a second: one GPU, four, four at half of the peak

LAYERS, HEADS, KV_HEADS, HEAD_DIM = 80, 64, 8, 128

SHAPE, GPU = WORKED.shape, WORKED.device
HEAD = SHAPE.vocab_size * SHAPE.hidden_size  # weights of the output matrix
BANDWIDTH, PEAK = 4 * GPU.bandwidth, 4 * GPU.peak()
REQUEST = kv_cache.cache_bytes(SHAPE, 8192)


def test_the_deployment_is_the_one_that_the_problems_describe() -> None:
    assert (SHAPE.layers, SHAPE.num_heads, SHAPE.num_kv_heads, SHAPE.head_dim) == (LAYERS, HEADS, KV_HEADS, HEAD_DIM)
    billions = [SHAPE.num_params, SHAPE.linear_params, SHAPE.linear_params - HEAD]
    assert np.array(billions) / 1e9 == pytest.approx([BILLIONS, MATRICES, OF_LAYERS], abs=0.005)
    assert GPU.capacity / GB == 80
    assert (GPU.bandwidth / TB, BANDWIDTH / TB) == pytest.approx(TERABYTES)
    assert np.array([GPU.peak(), PEAK, PEAK / 2]) / 1e12 == pytest.approx(TERAFLOPS, rel=5e-4)
    assert (WORKED.num_devices, WORKED.mfu, WORKED.mbu, WORKED.kv_bytes, WORKED.weight_bits) == (4, 1, 1, 2, 16)
    assert WORKED.bytes_per_token == TOKEN_BYTES
    assert (WORKED.read / GB, 2 * HEAD / GB) == pytest.approx((READ_GB, HEAD_GB), abs=0.05)
    assert pytest.approx(REQUEST_GB, abs=5e-4) == REQUEST / GB
    assert ROOM_GB == 0.9 * 4 * 80


def test_worked_1_what_fits_beside_a_70b_on_four_h100() -> None:
    assert WORKED.weights / GB == pytest.approx(141.1, abs=0.05)
    left = 0.9 * 4 * GPU.capacity - WORKED.weights
    assert left / GB == pytest.approx(146.9, abs=0.05)
    assert pytest.approx(2.684, abs=5e-4) == REQUEST / GB
    assert left // REQUEST == 54
    assert WORKED.cache_tokens() == 448_280
    assert replace(WORKED, kv_bytes=1).cache_tokens() // 8192 == 109
    assert left // (8 * REQUEST) == 6  # counted with the 64 query heads
    assert 0.9 * 4 * GPU.capacity // REQUEST == 107  # without the weights


def test_worked_2_a_step_of_32_requests_is_bound_by_bandwidth() -> None:
    assert SHAPE.linear_params / 1e9 == pytest.approx(69.50, abs=0.005)
    assert pytest.approx(85.9, abs=0.05) == 32 * REQUEST / GB
    moved = WORKED.read + 32 * REQUEST
    assert moved / GB == pytest.approx(224.9, abs=0.05)
    assert moved / BANDWIDTH * 1e3 == pytest.approx(16.8, abs=0.05)
    matrices = latency.linear_flops(SHAPE.linear_params, 1)
    attention = latency.attention_flops(8192, LAYERS, HEADS, HEAD_DIM)
    assert (matrices / 1e9, attention / 1e9) == pytest.approx((139.0, 21.5), abs=0.05)
    flops = 32 * (matrices + attention)
    assert flops / 1e12 == pytest.approx(5.14, abs=0.005)
    assert flops / PEAK * 1e3 == pytest.approx(1.3, abs=0.05)
    step = roofline.place(SHAPE, GPU, 32, 8191)
    assert (step.flops, step.num_bytes) == (flops, moved)
    assert step.utilization * 100 == pytest.approx(7.7, abs=0.05)
    assert step.intensity == pytest.approx(22.8, abs=0.1)
    assert WORKED.read / moved * 100 == pytest.approx(62, abs=0.5)


def test_worked_3_a_prompt_beside_32_streams() -> None:
    half = replace(WORKED, mfu=0.5, alpha=0.0)
    caches = 32 * kv_cache.cache_bytes(SHAPE, 2048)
    assert caches / GB == pytest.approx(21.5, abs=0.05)
    assert (WORKED.read + caches) / GB == pytest.approx(160.5, abs=0.05)
    alone = (WORKED.read + caches) / BANDWIDTH
    assert alone * 1e3 == pytest.approx(12.0, abs=0.05)
    decodes = 32 * latency.decode_flops(SHAPE, 2048)
    assert (decodes / 1e12, decodes / PEAK * 2e3) == pytest.approx((4.6, 2.3), abs=0.05)
    head = latency.linear_flops(HEAD, 1)  # as many operations as bytes
    assert head / GB == pytest.approx(2.1, abs=0.05)
    assert (SHAPE.linear_params - HEAD) / 1e9 == pytest.approx(68.45, abs=0.005)
    prompt = latency.engine_pass_flops(SHAPE, 4096)
    assert latency.linear_flops(SHAPE.linear_params - HEAD, 4096) / 1e12 == pytest.approx(560.8, abs=0.06)
    assert latency.attention_flops(4096 * 4097 / 2, LAYERS, HEADS, HEAD_DIM) / 1e12 == pytest.approx(22.0, abs=0.05)
    assert (prompt + decodes) / 1e12 == pytest.approx(587, abs=0.5)
    together, first = (prompt + decodes) / (PEAK / 2), prompt / (PEAK / 2)
    assert together * 1e3 == pytest.approx(297, abs=0.5)
    moved = WORKED.read + caches + kv_cache.cache_bytes(SHAPE, 4096)
    assert moved / GB == pytest.approx(162, abs=0.5)
    assert moved / BANDWIDTH < together
    assert together / alone == pytest.approx(25, abs=0.5)
    assert (first + alone) * 1e3 == pytest.approx(306, abs=0.5)
    assert first + alone > together
    # And the deployment's own step, which has no formula of this file, but pays for the messages' bytes.
    steps = half.step_seconds(np.array([4096] + [1] * 32), np.array([0] + [2047] * 32))
    assert steps - half.communication_seconds(4096 + 32) == pytest.approx(together)


def test_worked_4_from_the_floor_of_a_stream_to_its_rate() -> None:
    assert collectives.all_reduces_per_token(SHAPE.layers) == 160
    sums = 160 * 10e-6
    assert sums * 1e3 == pytest.approx(1.6)
    floor = (WORKED.read + REQUEST) / BANDWIDTH
    assert (REQUEST / GB, (WORKED.read + REQUEST) / GB) == pytest.approx((2.7, 141.7), abs=0.05)
    assert (floor * 1e3, 1 / floor) == pytest.approx((10.6, 95), rel=0.005)
    assert ((floor + sums) * 1e3, 1 / (floor + sums)) == pytest.approx((12.2, 82), rel=0.005)
    real = floor / 0.8 + sums
    assert (floor / 0.8 * 1e3, real * 1e3, 1 / real) == pytest.approx((13.2, 14.8, 67), rel=0.01)
    four_bit = kv_cache.read_bytes(SHAPE, kv_cache.bits_per_weight(4, 128), embedding_bits=16)
    sizes = np.array([four_bit - 2 * HEAD, four_bit, four_bit + REQUEST]) / GB
    assert sizes == pytest.approx([35.3, 37.4, 40.1], abs=0.05)
    assert (four_bit + REQUEST) / BANDWIDTH / 0.8 * 1e3 == pytest.approx(3.7, abs=0.05)
    quick = (four_bit + REQUEST) / BANDWIDTH / 0.8 + sums
    assert (quick * 1e3, 1 / quick, real / quick) == pytest.approx((5.3, 187, 2.8), rel=0.01)
    assert (32 * REQUEST / GB, (WORKED.read + 32 * REQUEST) / GB) == pytest.approx((85.9, 224.9), abs=0.05)
    crowd = (WORKED.read + 32 * REQUEST) / BANDWIDTH / 0.8
    assert (crowd * 1e3, (crowd + sums) * 1e3) == pytest.approx((21.0, 22.6), abs=0.05)
    assert (1 / (crowd + sums), 32 / (crowd + sums)) == pytest.approx((44, 1417), rel=0.007)
    assert (32 * real / (crowd + sums), (crowd + sums) / real) == pytest.approx((21, 1.5), rel=0.02)


def test_worked_5_a_load_of_chats_and_its_objectives() -> None:
    matrices = latency.linear_flops(SHAPE.linear_params - HEAD, 2000)
    attention = latency.attention_flops(2000 * 2001 / 2, LAYERS, HEADS, HEAD_DIM)
    assert (matrices / 1e12, attention / 1e12) == pytest.approx((273.8, 5.2), abs=0.05)
    prefill = latency.engine_pass_flops(SHAPE, 2000) / (PEAK / 2)
    assert latency.engine_pass_flops(SHAPE, 2000) / 1e12 == pytest.approx(279, abs=0.5)
    assert prefill * 1e3 == pytest.approx(141, abs=0.5)
    assert 1000 - prefill * 1e3 == pytest.approx(859, abs=0.5)
    assert tuple(1e3 * x for x in (1.0, 0.025)) == (1000, 25)  # the objectives, ms
    caches = 32 * kv_cache.cache_bytes(SHAPE, 2100)
    assert (caches / GB, (WORKED.read + caches) / GB) == pytest.approx((22.0, 161.0), abs=0.05)
    tpot = (WORKED.read + caches) / BANDWIDTH / 0.8 + 2e-3
    assert (tpot * 1e3 - 2, tpot * 1e3) == pytest.approx((15.0, 17.0), abs=0.05)
    assert (prefill, tpot) == pytest.approx((0.141, 0.017), abs=5e-4)
    assert prefill * 1e3 > 140
    assert latency.request_seconds(0, prefill, tpot, 200) == pytest.approx(3.5, abs=0.05)
    decode = 199 * tpot / 32
    assert (decode * 1e3, (prefill + decode) * 1e3) == pytest.approx((106, 247), abs=0.5)
    rate = 1 / (prefill + decode)
    assert rate == pytest.approx(4, abs=0.1)
    assert prefill > decode
    # Of each second the prefills of others take rate * prefill; the rest of it makes tokens.
    assert tpot / (1 - rate * prefill) * 1e3 == pytest.approx(40, abs=0.5)
    assert WORKED.communication_seconds(32) * 1e3 == pytest.approx(2, abs=0.25)
