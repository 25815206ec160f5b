"""What study materials say about the KV cache, and what comes out when it is computed (errata E02.x, E09.x, E00.9).

Every test states the claim in its docstring and recomputes the right value. Memory is decimal unless a name says GiB.
"""

import dataclasses
import math

import pytest

from reference_impl.theory import cost, kv_cache, latency, roofline
from reference_impl.theory.hardware import device
from reference_impl.theory.model_shapes import MODELS, from_config, model
from reference_impl.theory.units import GB, GiB, MiB, format_bytes

L70, L8 = model("llama-3-70b"), model("llama-3-8b")
PER_TOKEN_70B = kv_cache.bytes_per_token(L70)


# ---------------------------------------------------------------- what is saved


def test_e02_01_without_a_cache_attention_costs_t_times_s_plus_t_squared() -> None:
    """Claim: generating T tokens after a prompt of S without a cache costs about S times T attention operations.

    S * T is nearer to the cost with a cache. Without one, each pass pays for all pairs again: order T (S + T)^2.
    """
    prompt, new = 200, 500
    assert latency.cached_attention_pairs(prompt, new) == 244_650
    assert latency.uncached_attention_pairs(prompt, new) == 55_833_250
    assert prompt * new == 100_000  # the claimed count: below even the cached one
    assert latency.uncached_linear_tokens(prompt, new) == 224_750
    assert latency.cached_linear_tokens(prompt, new) == 699
    assert round(55_833_250 / 244_650) == 228
    assert round(224_750 / 699) == 322


def _growth(count: object, size: int) -> float:
    """Exponent n of a count that grows like length^n, from doubling the length."""
    assert callable(count)
    return math.log2(count(2 * size) / count(size))


def test_e02_02_a_cache_lowers_each_power_by_one_per_step_and_in_total() -> None:
    """Claim: a cache turns O(n^2) into O(n), said of one step and of a whole generation alike.

    Per step attention goes from n^2 to n and the matrices from n to 1; over a generation n^3 to n^2 and n^2 to n.
    The number of forward passes stays the same.
    """
    size = 100_000
    step = {
        "attention, uncached": lambda n: latency.causal_pairs(n),
        "attention, cached": lambda n: latency.causal_pairs(1, n - 1),
    }
    assert _growth(step["attention, uncached"], size) == pytest.approx(2, abs=1e-3)
    assert _growth(step["attention, cached"], size) == pytest.approx(1, abs=1e-3)
    total = {
        "attention, uncached": lambda n: latency.uncached_attention_pairs(1, n),
        "attention, cached": lambda n: latency.cached_attention_pairs(1, n),
        "matrices, uncached": lambda n: latency.uncached_linear_tokens(1, n),
        "matrices, cached": lambda n: latency.cached_linear_tokens(1, n),
    }
    exponents = {name: round(_growth(count, size), 2) for name, count in total.items()}
    assert exponents == {
        "attention, uncached": 3.0, "attention, cached": 2.0, "matrices, uncached": 2.0, "matrices, cached": 1.0,
    }  # fmt: skip
    for cached in (True, False):
        assert latency.generation_cost(L8, 10, 100, device("H100"), cached).forward_passes == 100


def test_e02_13_a_cache_saves_projections_and_old_queries_not_the_attention_over_the_past() -> None:
    """Claim: the cache avoids recomputing attention for earlier tokens.

    What is kept are keys and values. The new query still meets every one of them: its pairs equal the context.
    """
    for context in (10, 1000, 100_000):
        assert latency.causal_pairs(1, context - 1) == context
        assert latency.causal_pairs(context) == context * (context + 1) // 2
    # Of one step of a 1000-token context, the cache saves 999 of 1000 projections and 499,500 of 500,500 pairs.
    assert latency.causal_pairs(1000) - latency.causal_pairs(1, 999) == 499_500


def test_e02_10_the_small_model_of_the_lab_is_bound_by_launches_not_by_operations() -> None:
    """Claim: a cache makes a 6-layer, 384-wide model 40 or 50 times faster at 256 tokens: 3000 ms against 80 ms.

    3000 / 80 is 37.5. The operation ratio of the matrices is 136, but even the uncached run needs about 2 TFLOP, some
    25 ms of an RTX 4090: the 3000 ms are 11.7 ms of overhead per step, which a cached run pays as well.
    """
    prompt, new = 16, 256
    ratio = latency.uncached_linear_tokens(prompt, new) / latency.cached_linear_tokens(prompt, new)
    assert ratio == pytest.approx(135.6, abs=0.05)
    assert 3000 / 80 == 37.5
    params = latency.gpt_layer_params(6, 384)
    assert params / 1e6 == pytest.approx(10.6, abs=0.05)
    pairs = latency.uncached_attention_pairs(prompt, new)
    tokens = latency.uncached_linear_tokens(prompt, new)
    attention = latency.attention_flops(pairs, 6, 6, 64)
    layers_only = latency.linear_flops(params, tokens) + attention
    with_large_vocabulary = latency.linear_flops(params + 384 * 50_257, tokens) + attention  # logits at all positions
    assert layers_only / 1e12 == pytest.approx(0.81, abs=0.01)
    assert with_large_vocabulary / 1e12 == pytest.approx(2.23, abs=0.01)
    assert with_large_vocabulary / device("RTX4090").peak("fp32") == pytest.approx(27e-3, abs=1e-3)
    assert 3000 / new == pytest.approx(11.7, abs=0.05)
    assert 80 / new == pytest.approx(0.31, abs=0.005)


# ---------------------------------------------------------------- bytes per token


def test_e02_03_the_formula_takes_kv_heads_and_the_head_dim_of_the_config() -> None:
    """Claim: bytes per token = layers * 2 * heads * head dim * precision, with 'heads' left open.

    With query heads a Llama-3-70B comes out eight times too large. head_dim is read, not derived from the hidden size,
    and latent attention needs a formula of its own.
    """
    assert PER_TOKEN_70B == 327_680
    with_query_heads = kv_cache.attention_bytes_per_token(80, 64, 128)
    assert with_query_heads == 2_621_440 == 8 * PER_TOKEN_70B
    qwen, gemma = model("qwen3-0.6b"), model("gemma-7b")
    assert kv_cache.bytes_per_token(qwen) == 2 * 28 * 8 * 128 * 2 == 114_688
    assert qwen.hidden_size // qwen.num_heads == 64  # deriving it would halve the answer
    assert kv_cache.bytes_per_token(gemma) == 2 * 28 * 16 * 256 * 2 == 458_752
    assert gemma.hidden_size // gemma.num_heads == 192
    assert kv_cache.bytes_per_token(model("deepseek-v3")) == 61 * (512 + 64) * 2 == 70_272


def test_e02_04_a_13b_caches_more_per_token_than_a_70b() -> None:
    """Claim: Llama-2-70B has the larger cache per token, about in proportion to its parameters.

    The 13B is MHA with 40 KV heads, the 70B GQA with 8: the 13B needs 2.5 times as much per token.
    """
    small, large = model("llama-2-13b"), model("llama-2-70b")
    assert kv_cache.bytes_per_token(small) == 819_200
    assert kv_cache.bytes_per_token(large) == 327_680
    assert kv_cache.bytes_per_token(small) / kv_cache.bytes_per_token(large) == 2.5
    assert small.head_dim == large.head_dim == 128
    as_mha = dataclasses.replace(large, num_kv_heads=large.num_heads)
    assert kv_cache.bytes_per_token(as_mha) / kv_cache.bytes_per_token(small) == 3.2
    assert large.num_params / small.num_params == pytest.approx(5.3, abs=0.01)
    assert kv_cache.cache_bytes(small, 2048, 128) / GB == pytest.approx(214.7, abs=0.1)
    assert kv_cache.cache_bytes(large, 2048, 128) / GB == pytest.approx(85.9, abs=0.1)


def test_e02_06_a_reservation_of_8192_tokens_is_2_68_gb_not_8192_times_that() -> None:
    """Claim: each request reserves 8192 tokens times 2.68 GB. 2.68 GB is already the size of 8192 tokens."""
    assert kv_cache.cache_bytes(L70, 8192) / GB == pytest.approx(2.68, abs=0.005)
    wasted = [kv_cache.stranded_bytes(8192, used, PER_TOKEN_70B) / GB for used in (500, 2000)]
    assert wasted == pytest.approx([2.52, 2.03], abs=0.005)
    empty_share = 1 - 500 / 8192
    assert empty_share == pytest.approx(0.94, abs=0.005)


def test_e02_08_the_72b_of_the_exercise_is_qwen2_5_and_hybrids_need_another_count() -> None:
    """Claim: a 'Qwen3.5 72B' has 80 layers, 64 query heads, 8 KV heads and 140 GB.

    Those are the sizes of Qwen2.5-72B, which weighs 145.4 GB. Hybrids such as Qwen3-Next keep keys and values in one
    layer of four, and add a state that does not grow: counting all layers would give four times the truth.
    """
    qwen = model("qwen2.5-72b")
    assert (qwen.layers, qwen.num_heads, qwen.num_kv_heads) == (80, 64, 8)
    assert kv_cache.weight_bytes(qwen) / GB == pytest.approx(145.4, abs=0.05)
    hybrid = model("qwen3-next-80b-a3b")
    assert hybrid.layers == 4 * hybrid.kv_layers == 48
    assert kv_cache.bytes_per_token(hybrid) == 24_576
    all_layers = dataclasses.replace(hybrid, attention_layers=48, fixed_state_bytes=0)
    assert kv_cache.bytes_per_token(all_layers) == 4 * kv_cache.bytes_per_token(hybrid)
    # The fixed state is worth 3144 tokens of growing cache: the saving starts beyond short prompts.
    assert hybrid.fixed_state_bytes / kv_cache.bytes_per_token(hybrid) == pytest.approx(3144, abs=1)


# ---------------------------------------------------------------- budgets


def test_e02_05_a_70b_in_int8_takes_70_gb_and_leaves_almost_nothing_on_80() -> None:
    """Claim: a 70B model in INT8 takes 35 GB of an 80 GB GPU and leaves 45 GB.

    One byte per weight is 70.6 GB. 35 GB would be 4 bits without scales; with them, and with embedding and output
    projection left in 16 bits, 36.4 to 39.5 GB.
    """
    memory, context_128k = 80 * GB, kv_cache.cache_bytes(L70, 131_072)
    int8 = kv_cache.weight_bytes(L70, 8)
    assert int8 / GB == pytest.approx(70.6, abs=0.05)
    assert kv_cache.tokens_that_fit(memory, int8, PER_TOKEN_70B) == 4413
    # The register's 4,272 follows from rounding the parameters to 70.6 billion before subtracting.
    assert kv_cache.tokens_that_fit(memory, 70.6e9, PER_TOKEN_70B) == 4272
    bits = kv_cache.bits_per_weight(4, 128)
    assert bits == 4.125
    smallest, usual = kv_cache.weight_bytes(L70, bits), kv_cache.weight_bytes(L70, bits, embedding_bits=16)
    assert smallest / GB == pytest.approx(36.4, abs=0.05)
    assert usual / GB == pytest.approx(39.5, abs=0.05)
    tokens = [kv_cache.tokens_that_fit(memory, weights, PER_TOKEN_70B) for weights in (usual, smallest)]
    assert [round(count, -3) for count in tokens] == [99_000, 109_000]
    assert kv_cache.kv_budget(memory, smallest) < context_128k  # not one request of 131,072 tokens
    assert context_128k / GB == pytest.approx(43, abs=0.1)


def test_e02_07_180_gb_give_50_users_eleven_thousand_tokens_each() -> None:
    """Claim: (320 - 140) GB over 50 users at 327,680 bytes per token is about 110,000 tokens each. It is a tenth."""
    fifty = kv_cache.max_context_for_budget(320 * GB, 140 * GB, 50, PER_TOKEN_70B, utilization=1.0)
    assert fifty == 10_986
    assert kv_cache.max_context_for_budget(320 * GB, 140 * GB, 100, PER_TOKEN_70B, utilization=1.0) == 5493
    assert kv_cache.max_context_for_budget(320 * GB, 140 * GB, 5, PER_TOKEN_70B, utilization=1.0) == 109_863
    careful = kv_cache.max_context_for_budget(320 * GB, kv_cache.weight_bytes(L70), 50, PER_TOKEN_70B)
    assert careful == pytest.approx(9000, rel=0.01)


def test_e02_09_a_hundred_users_of_4096_tokens_fit_four_h100_only_at_the_edge() -> None:
    """Claim: 140 GB of weights and 134 GB of cache fit the 320 GB of four GPUs, so 100 users can be served.

    An engine may use about 0.9 of the memory. 14 GB over four GPUs remain for everything else, 8 GB with the weights
    a Qwen2.5-72B really has.
    """
    qwen = model("qwen2.5-72b")
    cache, memory = kv_cache.cache_bytes(qwen, 4096, 100), 4 * device("H100").capacity
    assert cache / GB == pytest.approx(134.2, abs=0.05)
    assert (140 * GB + cache) / GB == pytest.approx(274, abs=0.5)
    left = kv_cache.kv_budget(memory, 140 * GB, 0.9, reserve=cache)
    assert left / GB == pytest.approx(14, abs=0.5)
    left = kv_cache.kv_budget(memory, kv_cache.weight_bytes(qwen), 0.9, reserve=cache)
    assert left / GB == pytest.approx(8, abs=0.5)
    # 4096 tokens are prompt and output together; 256 tokens more for everybody and it no longer fits.
    tokens = kv_cache.max_context_for_budget(memory, kv_cache.weight_bytes(qwen), 100, kv_cache.bytes_per_token(qwen))
    assert 4096 <= tokens < 4096 + 256 + 1
    with_fp8_cache = kv_cache.max_context_for_budget(
        memory, kv_cache.weight_bytes(qwen), 100, kv_cache.bytes_per_token(qwen, 1)
    )
    assert with_fp8_cache == pytest.approx(2 * tokens, abs=1)


def test_e02_14_a_context_budget_contains_the_prompt() -> None:
    """Claim: the function that divides memory by bytes per token says how much each user can generate.

    It says how much context each user has. A prompt as long as the budget leaves nothing to generate.
    """
    args = (320 * GB, 140 * GB, 50, PER_TOKEN_70B)
    context = kv_cache.max_context_for_budget(*args, utilization=1.0)
    for prompt, expected in ((0, context), (4000, context - 4000), (context, 0), (context + 1000, 0)):
        assert kv_cache.max_new_tokens_for_budget(*args, prompt_tokens=prompt, utilization=1.0) == expected
    shared = kv_cache.max_new_tokens_for_budget(*args, prompt_tokens=4000, shared_prefix_tokens=4000, utilization=1.0)
    assert shared == context - 4000 // 50  # a prefix all share counts once, not fifty times


# ---------------------------------------------------------------- kinds of attention


def test_e09_01_one_kv_head_shrinks_the_cache_by_the_number_of_query_heads() -> None:
    """Claim: MQA saves a factor of 8 to 16. The factor is the number of query heads."""
    factors = {}
    for name in ("llama-3-70b", "palm-540b", "falcon-7b"):
        mqa = dataclasses.replace(model(name), num_kv_heads=1)
        mha = dataclasses.replace(mqa, num_kv_heads=mqa.num_heads)
        factors[name] = kv_cache.bytes_per_token(mha) / kv_cache.bytes_per_token(mqa)
    assert factors == {"llama-3-70b": 64, "palm-540b": 48, "falcon-7b": 71}
    at_8k = [kv_cache.cache_bytes(dataclasses.replace(L70, num_kv_heads=n), 8192) / GB for n in (64, 8, 1)]
    assert at_8k == pytest.approx([21.5, 2.68, 0.34], abs=0.03)


def test_e09_02_which_model_shares_its_kv_heads_is_read_from_its_config() -> None:
    """Claim: PaLM and Falcon are MQA; Llama 2 and 3, Mistral and Gemma are GQA.

    Llama-2 7B and 13B and Gemma 7B are MHA, Gemma 2B is MQA, Falcon-40B has eight KV heads. The config of Falcon-7B
    says 71 KV heads, and the model has one.
    """
    expected = {
        "llama-2-7b": "MHA", "llama-2-13b": "MHA", "llama-2-70b": "GQA", "llama-3-8b": "GQA", "llama-3-70b": "GQA",
        "qwen2.5-72b": "GQA", "qwen3-0.6b": "GQA", "mistral-7b": "GQA", "gemma-7b": "MHA", "falcon-7b": "MQA",
        "palm-540b": "MQA", "deepseek-v3": "MLA", "qwen3-next-80b-a3b": "GQA", "mixtral-8x7b": "GQA",
    }  # fmt: skip
    assert {name: MODELS[name].attention_kind for name in expected} == expected
    falcon_7b = {
        "model_type": "falcon", "num_hidden_layers": 32, "hidden_size": 4544, "num_attention_heads": 71,
        "num_kv_heads": 71, "multi_query": True, "new_decoder_architecture": False, "vocab_size": 65024,
    }  # fmt: skip
    falcon_40b = falcon_7b | {
        "num_hidden_layers": 60, "hidden_size": 8192, "num_attention_heads": 128, "num_kv_heads": 8,
        "new_decoder_architecture": True,
    }  # fmt: skip
    gemma_2b = {
        "model_type": "gemma", "num_hidden_layers": 18, "hidden_size": 2048, "num_attention_heads": 8,
        "num_key_value_heads": 1, "head_dim": 256, "intermediate_size": 16384, "vocab_size": 256000,
    }  # fmt: skip
    assert kv_cache.bytes_per_token(from_config(falcon_7b)) == 8192  # not 581,632
    assert from_config(falcon_40b).attention_kind == "GQA"
    assert from_config(gemma_2b).attention_kind == "MQA"


def test_e09_03_latent_attention_caches_a_latent_and_a_rotary_key_like_two_and_a_quarter_groups() -> None:
    """Claim: MLA stores one latent per token and is smaller than any GQA.

    It stores the latent (512) and a shared rotary key (64) per layer: as much as GQA with 2.25 groups of 128, so above
    GQA with 2 and above MQA. Absorbed, 128 query heads share each read: 242 FLOP per byte in bf16.
    """
    deepseek = model("deepseek-v3")
    assert kv_cache.latent_bytes_per_token(61, 512, 64) == kv_cache.bytes_per_token(deepseek) == 70_272
    groups = deepseek.kv_values_per_layer / (2 * 128)
    assert groups == 2.25
    uncompressed = deepseek.num_heads * (deepseek.head_dim + deepseek.value_dim)
    assert uncompressed / deepseek.kv_values_per_layer == pytest.approx(71, abs=0.2)
    intensity = roofline.decode_attention_intensity(deepseek)
    assert intensity == 2 * 128 * (576 + 512) / (576 * 2) == pytest.approx(242, abs=0.5)
    assert intensity < device("H100").ridge() < 2 * intensity  # two verified tokens pass the ridge
    # A growing batch over a long context tends to it: the latent is what each sequence reads for itself.
    assert roofline.max_decode_intensity(deepseek, 10**7) == pytest.approx(intensity, rel=1e-3)


def test_e09_04_an_eighth_of_the_cache_gives_eight_times_the_tokens_and_not_more_memory() -> None:
    """Claim: GQA with 8 of 64 heads serves eight times the users. It gives eight times the tokens in the KV budget."""
    as_mha = dataclasses.replace(L70, num_kv_heads=64)
    memory, weights = 4 * 80 * GB, kv_cache.weight_bytes(L70)
    tokens = [kv_cache.tokens_that_fit(memory, weights, kv_cache.bytes_per_token(s)) for s in (as_mha, L70)]
    assert tokens[1] / tokens[0] == pytest.approx(8, abs=0.01)
    # Total memory for 32 requests of 8192 tokens shrinks 3.7 times, because the weights stay.
    totals = [weights + kv_cache.cache_bytes(s, 8192, 32) for s in (as_mha, L70)]
    assert totals[0] / totals[1] == pytest.approx(3.65, abs=0.05)


def test_e09_04_users_follow_the_cache_until_arithmetic_and_tpot_bind() -> None:
    """70B on eight H100, 256 tokens of context each: eight times the requests fit, and compute their step in 91 ms.

    With 30 ms per token asked for, 2.6 times as many are left; throughput grows 1.9 times.
    """
    as_mha, h100 = dataclasses.replace(L70, num_kv_heads=64), device("H100")
    free = [cost.max_throughput(s, h100, 256, num_devices=8) for s in (as_mha, L70)]
    assert free[1].batch / free[0].batch == 8
    assert (free[0].bound, free[1].bound) == ("capacity", "compute")
    assert free[1].step_seconds == pytest.approx(91e-3, abs=1e-3)
    asked = [cost.max_throughput(s, h100, 256, num_devices=8, tpot=0.03) for s in (as_mha, L70)]
    assert asked[1].batch / asked[0].batch == pytest.approx(2.6, abs=0.05)
    assert asked[1].tokens_per_second / asked[0].tokens_per_second == pytest.approx(1.9, abs=0.05)
    assert asked[1].bound == "objective"


# ---------------------------------------------------------------- units


def test_e00_09_one_quantity_has_one_decimal_and_one_binary_name() -> None:
    """Claim: the same size appears as 2.68, 2.6 and 2.5 GB, or as 268 and 256 MB. Decimal and binary are mixed."""
    eight_k = kv_cache.cache_bytes(L70, 8192)
    assert eight_k == 2_684_354_560
    assert (format_bytes(eight_k), format_bytes(eight_k, binary=True)) == ("2.68 GB", "2.50 GiB")
    slot = kv_cache.cache_bytes(L70, 32_768)
    assert slot == 10 * GiB
    assert (format_bytes(slot, digits=4), format_bytes(slot, binary=True)) == ("10.74 GB", "10.0 GiB")
    matrix = 8192 * 8192 * 4
    assert (format_bytes(matrix), format_bytes(matrix, binary=True)) == ("268 MB", "256 MiB")
    assert format_bytes(8192 * 8192 * 2) == "134 MB"
    assert format_bytes(81_559 * MiB) == "85.5 GB"  # what the driver of an '80 GB' H100 reports
    assert format_bytes(80 * GB, binary=True) == "74.5 GiB"
