"""What study materials say about prefill, decode and latency, and what comes out when it is computed (errata E01.x).

Claims that need a running engine are in test_ch01_engine.py. '7B', '8B' and '70B' are 7, 8 and 70 billion parameters
where a figure was printed with those; the published counts (8.03, of which a token meets 7.50) give others, shown too.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference_impl.observe.metrics import RequestMetrics, WorkloadMetrics
from reference_impl.theory import collectives, cost, latency, roofline
from reference_impl.theory.hardware import device
from reference_impl.theory.kv_cache import bytes_per_token, read_bytes, weight_bytes
from reference_impl.theory.model_shapes import model

H100, L70, L8 = device("H100"), model("llama-3-70b"), model("llama-3-8b")
PER_PAIR_8B = 4 * 32 * 32 * 128  # FLOP per (query, key) pair, all layers and heads
PER_PAIR_70B = 4 * 80 * 64 * 128


# ---------------------------------------------------------------- floors


def test_e01_01_a_7b_decodes_in_4_2_ms_and_30_ms_is_a_seventh_of_the_bandwidth() -> None:
    """Claim: a 7B in bf16 takes about 30 ms per token on an H100, said right after 'every weight must be read'.

    Reading 14 GB takes 4.18 ms. 30 ms is 467 GB/s, 14 % of the bandwidth: overhead of a loop that launches kernels.
    """
    weights = 2 * 7e9
    floor = latency.decode_seconds(model("llama-2-7b"), 1, H100, weights=weights)
    assert floor == pytest.approx(4.18e-3, abs=5e-6)
    assert 1 / floor == pytest.approx(239, abs=0.5)
    assert weights / 30e-3 == pytest.approx(467e9, rel=1e-3)
    assert latency.model_bandwidth_utilization(weights, 30e-3, H100) == pytest.approx(0.14, abs=0.005)
    within_twice = latency.model_bandwidth_utilization(weights, np.array([1.3, 2.0]) * floor, H100)
    assert within_twice == pytest.approx([0.77, 0.5], abs=0.005)  # where a compiled engine should land


def test_e01_02_a_prefill_of_1024_tokens_takes_a_7b_14_5_ms_at_the_peak() -> None:
    """Claim: about 50 ms. That is 29 % of the peak; 60 to 40 % give 24 to 36 ms. State the utilization."""
    flops = latency.linear_flops(7e9, 1024)
    assert flops == pytest.approx(1.43e13, rel=3e-3)
    at_peak = latency.step_bound(flops, 14e9, H100)
    assert at_peak == pytest.approx(14.5e-3, abs=5e-5)
    assert latency.model_flops_utilization(flops, 50e-3, H100) == pytest.approx(0.29, abs=0.005)
    assert latency.step_bound(flops, 14e9, H100, mfu=np.array([0.6, 0.4])) * 1e3 == pytest.approx([24, 36], abs=0.5)


def test_e01_03_prefill_is_flat_then_linear_then_quadratic_in_the_prompt() -> None:
    """Claim: the cost of a prompt, and with it TTFT, is linear in its length, above all for long prompts.

    Long prompts are where it is not: attention adds 2 L^2 d per layer, as much as the matrices at 61 thousand tokens
    (8B). Short prompts cost what reading the weights costs. Linear is the middle.
    """
    lengths = np.array([1024, 8192, 32_768, 131_072])
    share = latency.attention_over_linear(8e9, lengths**2 / 2, lengths, PER_PAIR_8B)
    assert share == pytest.approx([0.017, 0.134, 0.537, 2.147], abs=5e-4)
    assert latency.equal_prompt_length(8e9, PER_PAIR_8B) == pytest.approx(61_000, abs=500)
    assert latency.equal_prompt_length(70e9, PER_PAIR_70B) == pytest.approx(107_000, abs=500)

    def exponent(tokens: int) -> float:
        one, two = latency.prefill_seconds(L8, np.array([tokens, 2 * tokens]), H100)
        return float(np.log2(two / one))

    assert latency.flat_prefill_tokens(H100) == pytest.approx(295, abs=0.5)
    assert exponent(100) == pytest.approx(0, abs=0.01)
    assert exponent(1500) == pytest.approx(1, abs=0.05)
    assert exponent(1_000_000) == pytest.approx(2, abs=0.06)


def test_e01_04_a_decoded_token_costs_2n_and_attention_over_its_context() -> None:
    """Claim: two operations per parameter and token. The context adds 4 d per token and layer.

    For an 8B that is 27 % at 8192 tokens, 107 % at 32,768 and 429 % at 131,072. test_ch01_engine.py counts it.
    """
    context = np.array([8192, 32_768, 131_072])
    extra = latency.attention_over_linear(8e9, context, 1, PER_PAIR_8B)
    assert extra == pytest.approx([0.27, 1.07, 4.29], abs=0.005)
    # With all matrices but the input embedding, 7.5 billion, the shares are larger.
    decode = latency.decode_flops(L8, context) / latency.linear_flops(L8.linear_params, 1) - 1
    assert decode == pytest.approx([0.29, 1.14, 4.58], abs=0.01)


# ---------------------------------------------------------------- one stream


def test_e01_05_a_70b_in_sixteen_bits_does_not_fit_one_h100_so_no_rate_of_it_exists() -> None:
    """Claim: 24 tokens per second on one H100, because 3350 / 140 is 24. 140 GB do not fit 80.

    Two of them read together at 6.7 TB/s and pay 160 all-reduces: 44 tokens/s at 10 us each, 83 on four, 147 on eight.
    """
    with pytest.raises(ValueError, match="at least 2 devices"):
        latency.require_fit(140e9, H100)
    latency.require_fit(140e9, H100, 2)
    seconds = collectives.tensor_parallel_seconds(140e9, H100.bandwidth, np.array([2, 4, 8]), 80, 10e-6)
    assert 1 / seconds == pytest.approx([44, 83, 147], abs=0.5)
    assert 140e9 / (2 * H100.bandwidth) == pytest.approx(20.9e-3, abs=5e-5)
    hypothetical = 1 / collectives.tensor_parallel_seconds(140e9, H100.bandwidth, 1, 80, 0)
    assert hypothetical == pytest.approx(24, abs=0.1)


@given(st.integers(1, 4096), st.integers(1, 32_768))
def test_e01_06_a_stream_never_passes_bandwidth_over_bytes_and_a_batch_raises_only_the_sum(
    batch: int, context: int
) -> None:
    """Claim: 10 to 25 tokens/s below a ceiling of 24; batching brings one stream to the top of its range.

    The ceiling is bandwidth over the bytes of a step. A batch can only lengthen the step; what grows is the sum of all
    streams. That weights are read again each step is in the ceiling already, so it explains no shortfall.
    """
    alone = latency.decode_seconds(L8, context, H100)
    step = latency.decode_seconds(L8, context, H100, batch=batch)
    ceiling = H100.bandwidth / read_bytes(L8)
    assert 1 / step <= 1 / alone < ceiling
    assert batch / step >= (1 - 1e-12) / alone
    assert H100.bandwidth / 140e9 < 25  # the claimed range exceeds the claimed ceiling
    # What does lower it: reading the cache.
    kv_share = context * bytes_per_token(L8) / (read_bytes(L8) + context * bytes_per_token(L8))
    assert alone * ceiling == pytest.approx(1 / (1 - kv_share))


def test_e01_07_tensor_parallelism_speeds_up_one_stream_until_communication_dominates() -> None:
    """Claim: more GPUs do not make one stream faster; or, elsewhere, two halve its latency.

    They split the weight reads: 41.8, 22.5, 12.0, 6.8 ms on 1, 2, 4, 8 with all-reduces of 10 us. Over a ring, whose
    latency grows with every device, a 1B is fastest on two, an 8B on four, a 70B on eight.
    """
    degrees = np.array([1, 2, 4, 8])
    seconds = collectives.tensor_parallel_seconds(140e9, H100.bandwidth, degrees, 80, 10e-6)
    assert seconds * 1e3 == pytest.approx([41.8, 22.5, 12.0, 6.8], abs=0.05)
    assert seconds[0] / seconds[1:] == pytest.approx([1.86, 3.5, 6.1], abs=0.05)
    best = {}
    for name in ("llama-3.2-1b", "llama-3-8b", "llama-3-70b"):
        shape = model(name)
        message = collectives.all_reduce_message(1, shape.hidden_size)
        best[name] = collectives.best_tensor_parallel_degree(
            weight_bytes(shape), H100.bandwidth, shape.layers,
            lambda n, message=message: collectives.ring_all_reduce(message, n, 2e-6, H100.link_per_direction),
            (1, 2, 4, 8, 16),
        )  # fmt: skip
    assert best == {"llama-3.2-1b": 2, "llama-3-8b": 4, "llama-3-70b": 8}
    small = weight_bytes(model("llama-3.2-1b"))
    one, two = (collectives.tensor_parallel_seconds(small, H100.bandwidth, n, 16, 10e-6) for n in (1, 2))
    assert one / two < 1.1  # a 1B hardly gains from the second


# ---------------------------------------------------------------- metrics


def of_gaps(*gaps: float) -> RequestMetrics:
    return RequestMetrics.of(0.0, [float(t) for t in np.cumsum([1.0, *gaps])])


def test_e01_09_mean_tpot_weighs_requests_and_mean_itl_weighs_tokens_so_either_may_be_larger() -> None:
    """Claim: TPOT belongs to the system and is at least ITL; or they are one thing; or ITL is a variance.

    TPOT is (latency - TTFT) / (N - 1) of one request, ITL every gap. Gaps of 9 x 10 ms beside 10, 10, 200 ms give a
    mean TPOT of 41.7 and a mean ITL of 25.8; 9 x 100 beside 3 x 10 give 55.0 and 77.5.
    """
    for first, second, tpot, itl in (
        ([10.0] * 9, [10.0, 10.0, 200.0], 41.7, 25.8),
        ([100.0] * 9, [10.0] * 3, 55.0, 77.5),
    ):
        load = WorkloadMetrics.of((0.0, of_gaps(*gaps)) for gaps in (first, second))
        assert np.mean(load.tpot) == pytest.approx(tpot, abs=0.05)
        assert np.mean(load.itl) == pytest.approx(itl, abs=0.05)


@given(st.lists(st.floats(0.001, 10), min_size=1, max_size=50), st.floats(0.001, 100))
def test_e01_09_latency_is_ttft_and_n_minus_one_gaps(gaps: list[float], ttft: float) -> None:
    """Claim: latency = TTFT + output tokens * TPOT. There are N - 1 gaps; the difference doubles a decode of N = 2."""
    one = RequestMetrics.of(5.0, [5.0 + ttft, *(5.0 + ttft + t for t in np.cumsum(gaps))])
    assert one.latency is not None
    assert one.ttft is not None
    assert one.tpot is not None
    assert one.latency == pytest.approx(one.ttft + sum(one.itl))
    assert one.latency == pytest.approx(one.ttft + (one.num_output_tokens - 1) * one.tpot)
    assert one.latency == pytest.approx(latency.request_seconds(0, one.ttft, one.tpot, one.num_output_tokens))
    if len(gaps) == 1:
        claimed = one.ttft + one.num_output_tokens * one.tpot
        assert claimed - one.ttft == pytest.approx(2 * (one.latency - one.ttft))


def test_e01_15_a_first_token_target_makes_a_batch_job_rent_devices_that_a_deadline_does_not_need() -> None:
    """Claim: batch processing wants a TTFT below 2 s. Nobody reads its first tokens.

    Ten thousand prompts of 1024 tokens that arrive at once, 8B at half the peak: the last first token within 2 s needs
    148 H100, and they idle afterwards. Done within an hour, the same prefill needs one.
    """
    one = latency.prefill_seconds(L8, 1024, H100, mfu=0.5)
    per_device = 1024 / one
    for seconds, devices in ((2, 148), (3600, 1)):
        needed = cost.devices_for_load(10_000 * 1024 / seconds, per_device)
        assert needed == devices
    busy = 10_000 * one / 148
    assert busy / 3600 < 0.001  # of the hour that the deadline would have allowed


def test_e01_06_the_terms_of_a_decode_step_account_for_all_of_its_bytes() -> None:
    """The first steps from ceiling to measurement: weights, own cache read, own cache written."""
    ledger = roofline.bytes_per_generated_token(L8, 1, 8191)
    moved = ledger.weights + ledger.cache_read + ledger.cache_write
    assert moved / H100.bandwidth == pytest.approx(latency.decode_seconds(L8, 8192, H100))
