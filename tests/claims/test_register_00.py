"""The numbers that chapters 00 and 01 have to reproduce, one test per row of the list (N02 to N10, N26).

Two of its rows round the parameters first: 70 billion for the 70B and 8 billion for the 8B. The published counts less
the input embedding, which no product reads, give the second value of each pair.
"""

import numpy as np
import pytest

from reference_impl.theory import collectives, latency, roofline
from reference_impl.theory.hardware import device
from reference_impl.theory.kv_cache import bytes_per_token, weight_bytes
from reference_impl.theory.model_shapes import model
from reference_impl.theory.units import MiB

H100, L70, L8 = device("H100"), model("llama-3-70b"), model("llama-3-8b")
PER_PAIR_8B, PER_PAIR_70B = (latency.flops_per_pair(shape)[1] for shape in (L8, L70))


def test_n02_intensity_of_decode_at_batch_one_by_bits_per_weight() -> None:
    assert roofline.weight_intensity(1, np.array([16, 8, 4])).tolist() == [1, 2, 4]


def test_n03_whole_step_intensity_of_a_70b_in_both_conventions() -> None:
    """Printed with N = 70.0e9 for products and bytes alike. Published shape: 69.5e9 multiplied and read."""
    batch, context = np.array([1, 8, 32, 128, 512]), 8192
    attention, cache = PER_PAIR_70B * context, context * bytes_per_token(L70)

    def rounded(params: float) -> np.ndarray:
        return batch * (latency.linear_flops(params, 1) + attention) / (2 * params + batch * cache)

    assert rounded(70e9) == pytest.approx([1.1, 8.0, 22.9, 42.7, 54.6], abs=0.05)
    assert (latency.linear_flops(70e9, 1) + attention) / cache == pytest.approx(60.2, abs=0.05)
    assert rounded(70.6e9)[3:] == pytest.approx([42.95, 54.96], abs=0.01)  # not the printed row
    published = roofline.step_intensity(L70, batch, context - 1)
    assert published == pytest.approx([1.1, 8.0, 22.8, 42.6, 54.3], abs=0.05)
    assert roofline.max_decode_intensity(L70, context) == pytest.approx(59.8, abs=0.05)
    assert roofline.step_intensity(L70, 10**9, context - 1) == pytest.approx(59.8, abs=0.05)


def test_n04_context_beyond_which_no_batch_reaches_the_ridge() -> None:
    """1,489 and 421 with N as printed and a ridge of 295; 1,487 and 420.6 with 295.3; 1,476 and 393 as published."""
    rows = ((L70, 70.0e9, 8), (L8, 8.03e9, 4))
    with_295, exact, published = (
        [roofline.compute_bound_context(n(s, p), bytes_per_token(s), ridge, group) for s, p, group in rows]
        for n, ridge in (
            (lambda s, p: p, 295), (lambda s, p: p, H100.ridge()), (lambda s, p: s.linear_params, H100.ridge()),
        )
    )  # fmt: skip
    assert with_295 == pytest.approx([1488.7, 421.1], abs=0.05)
    assert exact == pytest.approx([1486.9, 420.6], abs=0.05)
    assert published == pytest.approx([1476.3, 393.0], abs=0.05)
    for (shape, _, _), limit in zip(rows, published, strict=True):
        assert roofline.batch_for_ridge(shape, 0.99 * limit, H100.ridge()) < np.inf
        assert roofline.batch_for_ridge(shape, 1.01 * limit, H100.ridge()) == np.inf


def test_n05_decode_floor_of_a_7b_an_8b_and_a_70b_per_3_35_tb_s() -> None:
    floors = [latency.step_bound(0, weights, H100) * 1e3 for weights in (14e9, weight_bytes(L8), 140e9)]
    assert floors == pytest.approx([4.18, 4.79, 41.8], rel=1.5e-3)


def test_n06_prefill_of_a_7b_with_1024_tokens_at_the_peak_and_at_half_of_it() -> None:
    seconds = latency.step_bound(latency.linear_flops(7e9, 1024), 14e9, H100, mfu=np.array([1, 0.5]))
    assert seconds * 1e3 == pytest.approx([14.5, 29], abs=0.05)


def test_n07_attention_over_matrices_in_prefill_of_an_8b() -> None:
    """Printed with N = 8.0e9; 8.03e9 gives 214 % at 131,072 tokens, 7.50e9 229 %."""
    tokens = np.array([1024, 8192, 32_768, 131_072])
    share = latency.attention_over_linear(8e9, tokens**2 / 2, tokens, PER_PAIR_8B) * 100
    assert share == pytest.approx([1.7, 13.4, 53.7, 215], abs=0.5)
    assert share[:3] == pytest.approx([1.7, 13.4, 53.7], abs=0.05)
    exact = latency.prefill_flops(L8, tokens) / latency.linear_flops(L8.linear_params, tokens) - 1
    assert exact[3] * 100 == pytest.approx(229, abs=0.5)


def test_n08_prompt_length_at_which_attention_equals_the_matrices() -> None:
    lengths = [latency.equal_prompt_length(8e9, PER_PAIR_8B), latency.equal_prompt_length(70e9, PER_PAIR_70B)]
    assert [round(n, -3) for n in lengths] == [61_000, 107_000]
    for shape, per_pair, rounded in ((L8, PER_PAIR_8B, 57_000), (L70, PER_PAIR_70B, 106_000)):
        length = latency.equal_prompt_length(shape.linear_params, per_pair)
        assert round(length, -3) == rounded  # without the input embedding
        assert latency.prefill_flops(shape, length) == pytest.approx(
            2 * latency.linear_flops(shape.linear_params, length), rel=1e-4
        )


def test_n09_attention_over_matrices_in_decode_of_an_8b() -> None:
    """Printed with N = 8.0e9; 8.03e9 gives 428 % at 131,072."""
    context = np.array([8192, 32_768, 131_072])
    assert latency.attention_over_linear(8e9, context, 1, PER_PAIR_8B) * 100 == pytest.approx([27, 107, 429], abs=0.5)
    assert latency.attention_over_linear(8.03e9, context, 1, PER_PAIR_8B)[2] * 100 == pytest.approx(427.9, abs=0.05)


def test_n10_tensor_parallel_floor_of_140_gb_with_160_all_reduces_of_10_us() -> None:
    seconds = collectives.tensor_parallel_seconds(140e9, H100.bandwidth, np.array([1, 2, 4, 8]), 80, 10e-6)
    assert seconds * 1e3 == pytest.approx([41.8, 22.5, 12.0, 6.8], abs=0.05)


def test_n26_sizes_on_an_h100_and_bandwidth_of_shared_memory() -> None:
    chip, a100 = H100.chip, device("A100-80GB").chip
    assert [chip.register_bytes / MiB, chip.shared_bytes / MiB] == pytest.approx([33, 29.4], abs=0.05)
    assert chip.l2_bytes == 50 * MiB  # what the driver reports; data sheets print 50 MB
    assert [chip.shared_bandwidth / 1e12, a100.shared_bandwidth / 1e12] == pytest.approx([30.9, 19.5], abs=0.05)
    assert (chip.clock, a100.clock) == (1.83e9, 1.41e9)
