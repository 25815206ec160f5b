"""Numbers of chapters 03 to 10 that the calculators can already reproduce, one test per row of the list."""

import numpy as np
import pytest

from reference_impl.theory import attention_traffic, kv_cache, latency, roofline
from reference_impl.theory.hardware import device
from reference_impl.theory.model_shapes import model
from reference_impl.theory.units import KiB

H100, L70, L8 = device("H100"), model("llama-3-70b"), model("llama-3-8b")


def test_n19_decode_prefill_and_mixed_step_of_a_70b_on_eight_h100() -> None:
    """At half the peak, 70.0e9 parameters, matrices only; then with attention, and with the published shape."""
    tokens = np.array([64, 8192, 8192 + 64])
    seconds = latency.step_bound(latency.linear_flops(70e9, tokens) / 8, 140e9 / 8, H100, mfu=0.5)
    assert seconds * 1e3 == pytest.approx([5.2, 290, 292], abs=0.5)
    with_attention = latency.linear_flops(70e9, 8192) + latency.attention_flops(latency.causal_pairs(8192), 80, 64, 128)
    assert latency.step_bound(with_attention / 8, 140e9 / 8, H100, mfu=0.5) * 1e3 == pytest.approx(312, abs=0.5)
    assert latency.prefill_flops(L70, 8192) / (8 * 0.5 * H100.peak()) * 1e3 == pytest.approx(310, abs=0.5)
    assert round(latency.flat_prefill_tokens(H100, mfu=0.5)) == 148


def test_n21_bytes_of_a_16_token_block() -> None:
    block = kv_cache.cache_bytes(L70, 16)
    assert block == 5_242_880
    assert block / 80 == 64 * KiB


def test_n22_mean_waste_in_the_last_block() -> None:
    share = kv_cache.tail_waste_share(np.array([50, 200, 500, 2000]), 16) * 100
    assert share == pytest.approx([13.0, 3.6, 1.5, 0.4], abs=0.05)


def test_n24_score_traffic_of_one_unfused_8k_pass() -> None:
    """Scores and probabilities, each written and read in 2 bytes, over all heads and layers."""
    one_head = 2 * attention_traffic.score_values(8192)
    terabytes = [one_head * shape.num_heads * shape.layers / 1e12 for shape in (L70, L8)]
    assert terabytes == pytest.approx([2.75, 0.55], abs=0.005)


def test_n25_intensity_of_unfused_fused_and_decode_attention() -> None:
    """64 leaves out Q, K, V and O; with them 63 at 8192 tokens. No causal mask: it halves the fused value."""
    n, d = 8192, 128
    flops = attention_traffic.prompt_attention_flops(n, d)
    assert flops / (2 * attention_traffic.score_values(n)) == 64
    assert flops / (2 * attention_traffic.unfused_values(n, d)) == pytest.approx(63, abs=0.05)
    assert flops / (2 * attention_traffic.fused_floor_values(n, d)) == 4096
    assert [roofline.decode_attention_intensity(shape) for shape in (L70, L8)] == [8, 4]


def test_n27_bits_of_nvfp4_and_of_grouped_int4() -> None:
    bits = [kv_cache.bits_per_weight(4, 16, scale_bits=8), kv_cache.bits_per_weight(4, 128)]
    assert bits == [4.5, 4.125]
    assert [16 / b for b in bits] == pytest.approx([3.56, 3.88], abs=0.005)


def test_n35_work_of_four_contiguous_causal_shards() -> None:
    n = 2**20
    pairs = [latency.causal_pairs(n // 4, i * n // 4) for i in range(4)]
    assert [p / sum(pairs) for p in pairs] == pytest.approx([1 / 16, 3 / 16, 5 / 16, 7 / 16], abs=1e-5)
    assert sum(pairs) == latency.causal_pairs(n)
    assert max(pairs) / (sum(pairs) / 4) == pytest.approx(1.75, abs=1e-5)
