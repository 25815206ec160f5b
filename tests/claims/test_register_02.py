"""The numbers that chapter 02 has to reproduce, one test per row of its list."""

import pytest

from reference_impl.theory import kv_cache, latency
from reference_impl.theory.model_shapes import model
from reference_impl.theory.units import GB

L70 = model("llama-3-70b")
PER_TOKEN_70B = kv_cache.bytes_per_token(L70)


def test_kv_bytes_per_token_of_the_reference_models() -> None:
    names = ("llama-3-70b", "llama-3-8b", "llama-2-7b", "llama-2-13b", "llama-2-70b", "deepseek-v3")
    values = [kv_cache.bytes_per_token(model(name)) for name in names]
    assert values == [327_680, 131_072, 524_288, 819_200, 327_680, 70_272]


def test_kv_of_one_70b_sequence_from_4k_to_1m_tokens() -> None:
    """'k' is 1024 tokens here, '1M' is a million; 2^20 tokens would be 344 GB."""
    lengths = [4096, 8192, 32_768, 65_536, 131_072, 1_000_000]
    sizes = [kv_cache.cache_bytes(L70, n) / GB for n in lengths]
    assert sizes == pytest.approx([1.34, 2.68, 10.7, 21.5, 42.9, 328], rel=5e-3)
    assert kv_cache.cache_bytes(L70, 2**20) / GB == pytest.approx(343.6, abs=0.1)


def test_kv_of_128_requests_of_2048_tokens() -> None:
    sizes = [kv_cache.cache_bytes(model(name), 2048, 128) / GB for name in ("llama-2-13b", "llama-2-70b")]
    assert sizes == pytest.approx([214.7, 85.9], abs=0.1)


def test_tokens_per_user_of_180_gb_for_50_and_100_users() -> None:
    tokens = [kv_cache.max_context_for_budget(180 * GB, 0, users, PER_TOKEN_70B, 1.0) for users in (50, 100)]
    assert tokens == [10_986, 5493]


def test_attention_pairs_with_and_without_a_cache() -> None:
    assert latency.uncached_attention_pairs(200, 500) == 55_833_250
    assert latency.cached_attention_pairs(200, 500) == 244_650


def test_linear_tokens_with_and_without_a_cache() -> None:
    assert latency.uncached_linear_tokens(200, 500) == 224_750
    assert latency.cached_linear_tokens(200, 500) == 699
    ratio = latency.uncached_linear_tokens(16, 256) / latency.cached_linear_tokens(16, 256)
    assert ratio == pytest.approx(135.6, abs=0.05)


def test_kv_tokens_left_beside_a_70b_at_nine_tenths_of_the_memory() -> None:
    """The published count, 70,553,706,496, gives 8,827 and 4,413; 8,850 comes from 70.55e9, 4,272 from 70.6e9."""
    bf16 = kv_cache.weight_bytes(L70)
    left = [kv_cache.tokens_that_fit(n * 80 * GB, bf16, PER_TOKEN_70B) for n in (2, 4, 8)]
    assert left == [8827, 448_280, 1_327_186]
    assert left[1] == pytest.approx(448_000, rel=1e-3)
    assert left[2] == pytest.approx(1.33e6, rel=5e-3)
    assert kv_cache.tokens_that_fit(160 * GB, 2 * 70.55e9, PER_TOKEN_70B) == 8850
    assert kv_cache.tokens_that_fit(80 * GB, kv_cache.weight_bytes(L70, 8), PER_TOKEN_70B) == 4413
    assert kv_cache.tokens_that_fit(80 * GB, 70.6e9, PER_TOKEN_70B) == 4272
    four_bit = [kv_cache.weight_bytes(L70, 4.125, embedding_bits=16), kv_cache.weight_bytes(L70, 4.125)]
    assert [weights / GB for weights in four_bit] == pytest.approx([39.5, 36.4], abs=0.05)
    left = [kv_cache.tokens_that_fit(80 * GB, weights, PER_TOKEN_70B) for weights in four_bit]
    assert [round(count / 1000) for count in left] == [99, 109]


def test_worked_sizes_of_an_8b_at_8k_and_a_72b_at_4k_with_and_without_shared_heads() -> None:
    assert kv_cache.cache_bytes(model("llama-3-8b"), 8192) / GB == pytest.approx(1.07, abs=0.005)
    qwen = model("qwen2.5-72b")
    assert kv_cache.cache_bytes(qwen, 4096) / GB == pytest.approx(1.34, abs=0.005)
    without_gqa = kv_cache.attention_bytes_per_token(80, 64, 128) * 4096
    assert without_gqa / GB == pytest.approx(10.7, abs=0.05)
    assert PER_TOKEN_70B / 1024 == 320  # KiB
