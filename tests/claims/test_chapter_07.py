"""Errata of quantization (E07.x) that are bits per weight and bytes per step; chapter 07 shows the errors it makes."""

import numpy as np
import pytest
import torch

from reference_impl.theory import kv_cache, latency, quantization
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


def test_e07_06_static_scales_need_calibration_in_either_format() -> None:
    """Claim: FP8 is preferred to INT8 because it needs no calibration.

    With a scale of each row at hand neither needs any, and FP8 is the better one where tails are heavy. With a scale
    from other data both cut off what lies beyond it.
    """
    rng = np.random.default_rng(0)
    seen = rng.standard_normal((16, 512))
    served = seen * np.exp(1.2 * rng.standard_normal(seen.shape))
    dynamic, static = {}, {}
    for name in ("int8", "e4m3"):
        values = quantization.FORMATS[name].values
        scale = np.abs(seen).max() / values[-1]
        static[name] = quantization.relative_error(served, quantization.nearest(served / scale, values) * scale)
        dynamic[name] = quantization.relative_error(served, quantization.rounded(served, name, 512))
    assert dynamic["e4m3"] < dynamic["int8"] < 0.05
    assert min(static.values()) > 0.5
    error = {name: quantization.relative_error(seen, quantization.rounded(seen, name, 512)) for name in dynamic}
    assert error["int8"] < error["e4m3"] / 3  # without the tails


def test_e07_07_a_scale_for_the_largest_clips_nothing_and_takes_the_others_digits() -> None:
    """Claim: naive quantization clips the outliers.

    The outlier is stored exactly, and four fifths of the others become 0. A clipped scale keeps the others and loses
    the outlier, with a larger squared error in all. A group confines the harm.
    """
    x = np.random.default_rng(0).standard_normal(4096)
    x[7] = 20.0
    whole, clipped, groups = (
        quantization.rounded(x, "int4", **how) for how in ({}, {"clip": 0.15}, {"group_size": 32})
    )
    assert whole[7] == x[7]
    assert np.mean(whole == 0) > 0.8
    assert np.mean(clipped == 0) < 0.3
    assert clipped[7] == pytest.approx(3.0)
    one_lost = 100.0  # an outlier far enough out, of which the clipped scale keeps the twentieth part or so
    x[7] = one_lost
    errors = [np.square(quantization.rounded(x, "int4", clip=clip) - x).sum() for clip in (1.0, 0.05)]
    assert errors[0] < errors[1]
    assert np.mean(groups == 0) < 0.2


def test_e07_09_two_encodings_of_e4m3_read_the_same_byte_differently() -> None:
    """Claim: FP8 is native on H100, MI300X and Blackwell alike. CDNA 3 has FNUZ: half of OCP's values, up to 240."""
    assert [quantization.FORMATS[name].reach for name in ("e4m3", "e5m2", "e4m3fnuz")] == [448, 57_344, 240]
    codes = torch.arange(1, 127, dtype=torch.uint8)
    ocp, fnuz = (codes.view(kind).double() for kind in (torch.float8_e4m3fn, torch.float8_e4m3fnuz))
    assert torch.equal(ocp, 2 * fnuz)


def test_e07_10_three_values_are_1_58_bits_and_five_of_them_fit_a_byte() -> None:
    """Claim: ternary weights have 2 bits."""
    assert np.log2(3) == pytest.approx(1.585, abs=5e-4)
    assert 3**5 <= 2**8 < 3**6


@pytest.mark.parametrize("size", [32, 64, 256, 4096])
def test_e07_12_other_values_than_nf4s_have_a_smaller_error_at_every_block_size(size: int) -> None:
    """Claim: NF4 is optimal for normal weights. Lloyd's values, from other samples, have less; INT4's steps more."""
    blocks = np.random.default_rng(3).standard_normal((2, 2**16)).reshape(2, -1, size)
    train, test = blocks / np.abs(blocks).max(-1, keepdims=True)
    best = quantization.lloyd_max(train, 16)
    errors = [
        quantization.relative_error(test, quantization.nearest(test, values))
        for values in (best, quantization.nf4_values(), quantization.FORMATS["int4"].values / 7)
    ]
    assert errors[0] < 0.97 * errors[1]
    assert errors[1] < errors[2]
