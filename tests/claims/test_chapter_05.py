"""Errata of attention kernels (E05.x) that counting decides; chapter 05 shows them on kernels."""

import dataclasses

import numpy as np
import pytest

from reference_impl.theory import attention_traffic, kv_cache, roofline
from reference_impl.theory.hardware import device
from reference_impl.theory.model_shapes import model
from reference_impl.theory.units import GB, GiB, KiB, format_bytes

H100, L70, L8 = device("H100"), model("llama-3-70b"), model("llama-3-8b")


def test_e05_01_a_score_matrix_at_8192_has_64_mi_values_for_each_head() -> None:
    """Claim: 512 MB in fp16, or 268 MB, or 256 MB for one 8192 x 8192 matrix.

    67,108,864 values: 134 MB (128 MiB) in fp16 and 268 MB (256 MiB) in fp32, per head. 512 MiB in fp16 is 16,384.
    """
    one = [kv_cache.score_bytes(1, 8192, 8192, size) for size in (1, 2, 4)]
    assert one[0] == 67_108_864
    assert [format_bytes(size) for size in one[1:]] == ["134 MB", "268 MB"]
    assert [format_bytes(size, binary=True) for size in one[1:]] == ["128 MiB", "256 MiB"]
    assert format_bytes(kv_cache.score_bytes(1, 16_384, 16_384), binary=True) == "512 MiB"
    assert [kv_cache.score_bytes(64, 8192, 8192, size) / GiB for size in (2, 4)] == [8, 16]  # a layer of a 70B


def test_e05_02_how_much_traffic_tiling_saves_depends_on_head_dim_and_tile() -> None:
    """Claim: FlashAttention reads 5 to 20 times, or about 10 times, fewer bytes in typical configurations.

    At 8192 tokens, against unfused attention: the order of 2022 with 100 KiB of fp16 values 4.2 times for d = 64 and
    1.1 for d = 128, with 192 KiB 8.1 and 2.0; the order of 2023 with tiles of 128 rows 4 and 2 without the L2 cache.
    The floor, K and V once, is 129 and 65 times less.
    """
    n, d = 8192, np.array([64, 128])
    unfused = attention_traffic.unfused_values(n, d)
    for kib, saved in ((100, [4.2, 1.1]), (192, [8.1, 2.0])):
        tiled = attention_traffic.flash1_values(n, d, kib * KiB / 2)
        assert unfused / tiled == pytest.approx(saved, abs=0.05)
    assert unfused / attention_traffic.flash2_values(n, d, 128) == pytest.approx([4, 2], rel=0.01)
    assert unfused / attention_traffic.fused_floor_values(n, d) == pytest.approx([129, 65], abs=0.5)


def test_e05_05_attention_is_memory_bound_unfused_and_in_decode_and_compute_bound_when_a_prompt_is_fused() -> None:
    """Claim: attention is bound by bandwidth, so half the traffic is half the time.

    Per byte 64 operations unfused (d = 128), 4096 fused over 8192 tokens, 8 in decode with groups of eight; the ridge
    is 295. Fused, the time no longer follows the bytes; in decode there is no score matrix to save.
    """
    n, d = 8192, 128
    flops = attention_traffic.prompt_attention_flops(n, d)
    unfused = flops / (2 * attention_traffic.unfused_values(n, d))
    fused = flops / (2 * attention_traffic.fused_floor_values(n, d))
    decode = roofline.decode_attention_intensity(L70)
    assert flops / (2 * attention_traffic.score_values(n)) == 64
    assert unfused == pytest.approx(63, abs=0.1)  # with Q, K, V and O counted too
    assert (fused, decode) == (4096, 8)
    assert max(unfused, decode) < H100.ridge() < fused
    assert roofline.attainable_flops(fused, H100) == roofline.attainable_flops(2 * fused, H100) == H100.peak()
    assert roofline.attainable_flops(2 * decode, H100) == 2 * roofline.attainable_flops(decode, H100)
    # One query: the score row is n values beside 2 n d of keys and values.
    assert kv_cache.score_bytes(64, 1, n) * 2 < 0.15 * kv_cache.cache_bytes(L70, n) / L70.layers


def test_e05_14_the_bytes_of_a_decoded_token_fall_with_bits_heads_and_batch_not_with_fusing_or_paging() -> None:
    """Claim: FlashAttention and PagedAttention answer the bandwidth that decode needs.

    An 8B at 8192 tokens reads 16.1 GB of weights and 1.07 GB of its own cache per token. Quantization and batching cut
    the first, fewer KV heads or bits the second. Neither paging nor fusing is a term of the sum.
    """
    base = roofline.bytes_per_generated_token(L8, 1, 8192)
    assert base.weights / GB == pytest.approx(16.1, abs=0.05)
    assert base.cache_read / GB == pytest.approx(1.07, abs=0.005)
    assert base.cache_write / base.total < 1e-4
    four_bit = kv_cache.weight_bytes(L8, kv_cache.bits_per_weight(4, 128))
    assert roofline.bytes_per_generated_token(L8, 1, 8192, weights=four_bit).total < 0.31 * base.total
    batched = roofline.bytes_per_generated_token(L8, 32, 8192)
    assert batched.weights == base.weights / 32
    assert batched.cache_read == base.cache_read
    as_mha = dataclasses.replace(L8, num_kv_heads=32)
    assert roofline.bytes_per_generated_token(as_mha, 1, 8192).cache_read == 4 * base.cache_read
    assert roofline.bytes_per_generated_token(L8, 1, 8192, kv_bytes=1).cache_read == base.cache_read / 2
