"""Errata of multimodal inference (E17.x) that tokens decide."""

import numpy as np
import pytest

from reference_impl.theory import kv_cache, latency
from reference_impl.theory.hardware import device
from reference_impl.theory.model_shapes import model
from reference_impl.theory.units import GB

H100, L70 = device("H100"), model("llama-3-70b")


def test_e17_01_an_image_costs_12_times_the_operations_and_2_to_4_times_the_time() -> None:
    """Claim: 576 image tokens beside 50 of text make prefill more than ten times as expensive.

    Operations, yes: 626 / 50. But 50 tokens already take the 4.2 ms in which a 7B's weights are read; 626 take 8.9 ms
    at the peak and 17.7 at half of it. In a batch with others the ratio tends to that of the operations.
    """
    patches = (336 // 14) ** 2
    assert patches == 576
    tokens = np.array([50, 50 + patches])
    flops = latency.linear_flops(7e9, tokens)
    assert flops[1] / flops[0] == pytest.approx(12.5, abs=0.05)
    at_peak, at_half = (latency.step_bound(flops, 14e9, H100, mfu=mfu) * 1e3 for mfu in (1.0, 0.5))
    assert at_peak == pytest.approx([4.2, 8.9], abs=0.05)
    assert at_half == pytest.approx([4.2, 17.7], abs=0.05)
    assert [t[1] / t[0] for t in (at_peak, at_half)] == pytest.approx([2.1, 4.2], abs=0.05)
    together = latency.step_bound(32 * flops, 14e9, H100)
    assert together[1] / together[0] == pytest.approx(12.5, abs=0.05)


def test_e17_03_video_tokens_take_the_bytes_of_text_tokens() -> None:
    """Claim: a video of 7680 tokens puts a pressure on the cache that text avoids.

    30 frames of 256 tokens are 2.52 GB on a 70B, as 7680 tokens of text are. What differs is how they arrive, the
    encoder, and the cache keys.
    """
    tokens = 30 * 256
    assert tokens == 7680
    assert kv_cache.cache_bytes(L70, tokens) / GB == pytest.approx(2.52, abs=0.005)
    assert kv_cache.cache_bytes(L70, tokens) == tokens * kv_cache.bytes_per_token(L70)
