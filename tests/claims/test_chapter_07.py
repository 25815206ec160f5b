"""Errata of quantization (E07.x) that are bits per weight and bytes per step; chapter 07 shows the errors it makes."""

import numpy as np
import pytest

from reference_impl.theory import kv_cache, latency
from reference_impl.theory.hardware import device
from reference_impl.theory.model_shapes import from_config, model
from reference_impl.theory.units import GB, GiB

H100, L70, L8 = device("H100"), model("llama-3-70b"), model("llama-3-8b")
QWEN3_4B = from_config({
    "model_type": "qwen3", "num_hidden_layers": 36, "hidden_size": 2560, "num_attention_heads": 32, "head_dim": 128,
    "num_key_value_heads": 8, "intermediate_size": 9728, "vocab_size": 151936, "tie_word_embeddings": True,
})  # fmt: skip


def test_e07_01_four_bit_weights_with_scales_read_3_88_times_fewer_bytes_and_less_in_practice() -> None:
    """Claim: INT4 quarters the time of decode. One fp16 scale for 128 weights makes 4.125 bits: 3.88 times.

    With a zero point 3.85. An output projection left in 16 bits and the cache take more of it, and in a large enough
    batch the operations, which stay in bf16, take the rest.
    """
    bits = kv_cache.bits_per_weight(4, 128)
    assert bits == 4.125
    assert 16 / bits == pytest.approx(3.88, abs=0.005)
    assert 16 / kv_cache.bits_per_weight(4, 128, zero_point_bits=4) == pytest.approx(3.85, abs=0.005)

    def speed_up(context: int, batch: int) -> float:
        quantized = kv_cache.read_bytes(L8, bits, embedding_bits=16)
        after = latency.decode_seconds(L8, context, H100, batch, weights=quantized)
        return float(latency.decode_seconds(L8, context, H100, batch) / after)

    gains = [speed_up(2048, batch) for batch in (1, 4, 16, 64)]
    assert gains[0] == pytest.approx(3.1, abs=0.05)
    assert sorted(gains, reverse=True) == gains
    assert gains[-1] < 1.6
    assert speed_up(1, 512) == 1.0  # compute-bound already
    assert L8.embedding_params / L8.num_params == pytest.approx(0.13, abs=0.005)


def test_e07_02_nvfp4_has_4_5_bits_for_weights_and_for_the_cache() -> None:
    """Claim: 3.5 times smaller weights in one table, a cache of one quarter in another.

    An 8-bit scale for 16 values makes 4.5 bits, 0.281 of sixteen, in both.
    """
    bits = kv_cache.bits_per_weight(4, 16, scale_bits=8)
    assert bits == 4.5
    assert 16 / bits == pytest.approx(3.56, abs=0.005)
    assert kv_cache.weight_bytes(L70, bits) / kv_cache.weight_bytes(L70) == pytest.approx(0.281, abs=5e-4)
    assert kv_cache.bytes_per_token(L70, bits / 8) / kv_cache.bytes_per_token(L70) == pytest.approx(0.281, abs=5e-4)


def test_e07_08_half_the_cache_bytes_double_the_tokens_and_hardly_the_speed_of_short_contexts() -> None:
    """Claim: an 8-bit cache doubles the number of users at once. It doubles the tokens that fit.

    Published for Qwen3-4B on an L4: 11.47 GiB hold 83,488 and then 166,992 tokens. One stream gains 2 % at 2048 tokens
    and 23 % at 32,768 by the bytes it reads (measured there: 1 and 21).
    """
    per_token = kv_cache.bytes_per_token(QWEN3_4B)
    assert per_token == 147_456
    fitting = [kv_cache.tokens_that_fit(11.47 * GiB, 0, each, 1.0) for each in (per_token, per_token // 2)]
    assert fitting == pytest.approx([83_488, 166_992], rel=1e-3)
    context = np.array([2048, 32_768])
    before, after = (latency.decode_seconds(QWEN3_4B, context, device("L4"), bytes_per_value=b) for b in (2, 1))
    assert (before / after - 1) * 100 == pytest.approx([1.8, 23], abs=0.2)
    assert kv_cache.weight_bytes(QWEN3_4B) / GB == pytest.approx(8.04, abs=0.01)
    # Where users wait for a step and not for room, the count of tokens decides nothing: the step is the same.
    short = [latency.decode_seconds(L8, 64, H100, batch=256, bytes_per_value=b) for b in (2, 1)]
    assert short[0] / short[1] < 1.08
