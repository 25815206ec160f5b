"""Errata of quantization (E07.x) that are bits per weight and bytes per step; chapter 07 shows the errors it makes."""

import numpy as np
import pytest
import torch

from reference_impl import LLM, course_model
from reference_impl.assembly.model import load_model
from reference_impl.bench.quality import logprobs
from reference_impl.core.linear import UnquantizedLinear
from reference_impl.core.prompts import PromptEncoder
from reference_impl.models.quantization.awq import rounded, search_scales
from reference_impl.models.quantization.by_layer import linears_of
from reference_impl.models.quantization.folding import matrix
from reference_impl.models.quantization.gptq import gptq
from reference_impl.models.quantization.scheme import Scheme, decode
from reference_impl.models.quantization.smoothquant import smoothing, weight_reach
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
    the outlier, with a larger squared error in all, unless the others are more than its square. A group confines the
    harm.
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
    among_more = np.random.default_rng(0).standard_normal(16_384)  # more than 100^2
    among_more[7] = one_lost
    errors = [np.square(quantization.rounded(among_more, "int4", clip=clip) - among_more).sum() for clip in (1.0, 0.05)]
    assert errors[0] > errors[1]
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
    """Claim: NF4 is optimal for normal weights. Lloyd's values, from other samples, have less; steps from -7 to 7 more.

    Steps that use all 16 codes, the group's largest on -8 (llama.cpp's Q4_0), have less than NF4 in small blocks.
    """
    blocks = np.random.default_rng(3).standard_normal((2, 2**16)).reshape(2, -1, size)
    train, test = blocks / np.abs(blocks).max(-1, keepdims=True)
    best = quantization.lloyd_max(train, 16)
    errors = [
        quantization.relative_error(test, quantization.nearest(test, values))
        for values in (best, quantization.nf4_values(), quantization.FORMATS["int4"].values / 7)
    ]
    assert errors[0] < 0.97 * errors[1]
    assert errors[1] < errors[2]
    step = -np.take_along_axis(test, np.abs(test).argmax(1)[:, None], 1) / 8
    all_codes = quantization.relative_error(test, np.clip(np.round(test / step), -8, 7) * step)
    assert errors[0] < all_codes < errors[2]
    assert (all_codes < errors[1]) == (size < 64)


def off(y: torch.Tensor, exact: torch.Tensor) -> float:
    return float((y - exact).norm() / exact.norm())


def test_e07_03_smoothing_makes_activations_easier_and_weights_harder_to_round() -> None:
    """Claim: dividing activations by s and multiplying weights by s makes both easier to quantize.

    The product is the same. With alpha = 0.5 rounding the activations costs less than without smoothing, and rounding
    the weights more.
    """
    random = torch.Generator().manual_seed(0)
    x, w = (torch.randn(n, 256, generator=random, dtype=torch.float64) for n in (128, 192))
    x[:, [5, 77]] *= 40.0
    s = {alpha: smoothing(x.abs().amax(0), weight_reach(w), alpha) for alpha in (0.25, 0.5, 0.75)}
    for each in s.values():
        assert torch.allclose((x / each) @ (w * each).T, x @ w.T, rtol=1e-12, atol=1e-9)

    def rounded8(values: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(quantization.rounded(values.numpy(), "int8", 256))

    plain = [off(rounded8(x) @ w.T, x @ w.T), off(rounded8(w), w)]
    activations = [off(rounded8(x / each) @ (w * each).T, x @ w.T) for each in s.values()]
    weights = [off(rounded8(w * each), w * each) for each in s.values()]
    assert activations[1] < 0.4 * plain[0]
    assert weights[1] > 1.2 * plain[1]  # harder than they were
    assert weights == sorted(weights)


def test_e07_05_gptq_goes_by_columns_in_one_order_and_beats_awq_only_where_it_saw_enough() -> None:
    """Claim: GPTQ works row by row, and is slightly better than AWQ.

    A row has the same codes alone and among all, from one factor. With many calibration tokens GPTQ has the smaller
    error on other data, with few of them AWQ has.
    """
    random = torch.Generator().manual_seed(1)
    mixing = torch.randn(128, 128, generator=random) * torch.logspace(0, -0.7, 128)[:, None]
    scheme, w = Scheme("int4", "group", 64), torch.randn(96, 128, generator=random)
    served, many = (torch.randn(2048, 128, generator=random) @ mixing for _ in range(2))
    errors = {}
    for tokens in (24, 2048):
        x = many[:tokens]
        gram = x.T @ x
        found = gptq(w, gram, scheme)
        assert torch.equal(gptq(w[:7], gram, scheme).codes, found.codes[:7])
        s = search_scales([w], gram, x.abs().mean(0), scheme)
        stored = decode(found.codes, scheme, found.fitted), rounded(w * s, scheme) / s
        errors[tokens] = [off(served @ one.T, served @ w.T) for one in stored]
        assert off(stored[0], w) > off(rounded(w, scheme), w)  # the weights themselves are further off
    assert errors[2048][0] < 0.8 * errors[2048][1]
    assert errors[24][0] > errors[24][1]


def test_e07_10_the_error_on_other_text_falls_with_the_tokens_of_calibration_and_that_on_these_rises() -> None:
    """Claim: PTQ needs about 512 samples. The number belongs to a recipe; GPTQ's error on other data keeps falling."""
    random = torch.Generator().manual_seed(2)
    mixing = torch.randn(128, 128, generator=random) * torch.logspace(0, -1, 128)[:, None]
    scheme, w = Scheme("int4", "group", 64), torch.randn(64, 128, generator=random)
    served, many = (torch.randn(2048, 128, generator=random) @ mixing for _ in range(2))
    seen, other = [], []
    for tokens in (32, 128, 512, 2048):
        x = many[:tokens]
        found = gptq(w, x.T @ x, scheme)
        stored = decode(found.codes, scheme, found.fitted)
        seen.append(off(x @ stored.T, x @ w.T))
        other.append(off(served @ stored.T, served @ w.T))
    assert seen == sorted(seen)
    assert other == sorted(other, reverse=True)


def test_e07_04_a_cache_of_8_bits_is_safe_and_one_of_4_depends_on_what_shares_a_scale() -> None:
    """Claims: 4-bit caches are risky since scales cannot be calibrated; 4-bit caches cost next to nothing.

    Scales can be computed as tokens come. Keys with outlier channels: in 4 bits with one scale for the tensor the
    logits are lost, with one for each channel (KIVI) they are off by a tenth; in 8 bits that is so with any of these.
    """
    rng = np.random.default_rng(4)
    keys = rng.standard_normal((512, 64)) * np.where(np.arange(64) % 16 == 3, 12.0, 1.0)
    query = rng.standard_normal((32, 64)) / np.where(np.arange(64) % 16 == 3, 12.0, 1.0)
    exact = query @ keys.T

    def error(name: str, per: str) -> float:
        if per == "channel":
            stored = quantization.rounded(np.ascontiguousarray(keys.T), name, 64).T  # 64 tokens of a channel
        else:
            stored = quantization.rounded(keys, name, 64 if per == "token" else None)
        return quantization.relative_error(exact, query @ stored.T)

    assert max(error("int8", per) for per in ("tensor", "token", "channel")) < 0.13
    assert error("int8", "channel") < 0.01
    four = [error("int4", per) for per in ("tensor", "token", "channel")]
    assert four[0] > 0.9
    assert four[1] > 0.5
    assert four[2] < 0.15


@torch.inference_mode()
def test_e07_11_the_last_layers_are_not_the_most_sensitive_ones_of_every_model() -> None:
    """Claims: keep the last one or two layers in high precision; keep the LM head and the embedding.

    In the course model, with one layer at a time in INT4, others are worse than the last two, several times apart.
    """
    plain = UnquantizedLinear(torch.float32, torch.device("cpu"))  # matrices that can be written to: no CPU packs them
    model = load_model(course_model("target"), torch.float32, linear_method=plain)
    tokens = PromptEncoder(course_model("target")).tokens_of("def read(path):\n    with open(path) as file:\n" * 3)[:48]
    exact, harm = logprobs(model, tokens), []
    for layer in model.layers:
        before = [(matrix(linear), matrix(linear).clone()) for linear in linears_of(layer)]
        for weight, original in before:
            weight.copy_(rounded(original, Scheme("int4", "group", 128)))
        changed = logprobs(model, tokens)
        harm.append(float((exact.exp() * (exact - changed)).sum(-1).mean()))
        for weight, original in before:
            weight.copy_(original)
    assert torch.equal(logprobs(model, tokens), exact)
    assert max(harm[:-2]) > max(harm[-2:])
    assert max(harm) > 2 * min(harm)


def test_with_8_bit_weights_and_cache_the_engine_reads_fewer_bytes_for_a_token() -> None:
    """E05.14, the other half: bits lower what decode reads. Counted by the engine, against the bits of a value."""
    read, held = {}, {}
    for kind, kv_dtype in (("none", "auto"), ("int8", "int8")):
        llm = LLM(course_model("draft"), dtype="bfloat16", device="cpu", quantization=kind, kv_dtype=kv_dtype,
                  kv_cache_bytes=2**20)  # fmt: skip
        model, engine = llm.engine.model, llm.engine
        read[kind] = sum(linear.weight_bytes() for linear in model.linears())
        held[kind] = engine.num_blocks * engine.block_size  # tokens in as much memory
        shape = model.config
    outputs = sum(linear.out_features for linear in model.linears())
    weights = sum(linear.out_features * linear.in_features for linear in model.linears())
    assert read["none"] == 2 * weights
    assert weights < read["int8"] <= weights + 4 * outputs  # a scale for each output
    bits = 8 * shape.head_dim + 32  # and one for each head of a token
    assert abs(held["int8"] / held["none"] - 16 * shape.head_dim / bits) < 0.05
