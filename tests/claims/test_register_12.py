"""Numbers of chapters 12 to 17 that the calculators can already reproduce, one test per row of the list."""

import numpy as np
import pytest

from reference_impl.theory import adapters, collectives, cost, kv_cache, latency, links, queueing
from reference_impl.theory.hardware import device
from reference_impl.theory.model_shapes import model
from reference_impl.theory.units import GB, KiB, MiB

H100, L70, L8 = device("H100"), model("llama-3-70b"), model("llama-3-8b")
KV_8B, KV_70B = kv_cache.bytes_per_token(L8), kv_cache.bytes_per_token(L70)


def test_n38_all_reduces_per_token_and_their_message() -> None:
    assert collectives.all_reduces_per_token(80) == 160
    assert collectives.all_reduce_message(64, 8192) == MiB


def test_n39_ring_and_one_shot_and_where_they_meet() -> None:
    """'16 KB' is 16,384 bytes, one token of a 70B; '16 MB' is 16e6."""
    args = (8, 2e-6, 450e9)
    messages = np.array([16 * KiB, 16e6])
    assert collectives.ring_all_reduce(messages, *args) * 1e6 == pytest.approx([28, 90], abs=0.5)
    assert collectives.one_shot_all_reduce(messages, *args) * 1e6 == pytest.approx([2.25, 251], rel=2.5e-3)
    assert collectives.all_reduce_break_even(*args) / 1e6 == pytest.approx(2.2, abs=0.05)


def test_n40_what_a_three_times_faster_all_reduce_saves() -> None:
    saved = 1 - collectives.amdahl(0.23, np.array([3, np.inf]))
    assert saved * 100 == pytest.approx([15.3, 23], abs=0.05)


def test_n41_a_140_gb_model_with_50_gb_in_host_memory() -> None:
    for rate, expected in ((360e9, [139, 161]), (450e9, [111, 134])):
        parts = [(90e9, 4e12), (50e9, rate)]
        seconds = [latency.tiered_read_seconds(parts, overlapped) for overlapped in (True, False)]
        assert [s * 1e3 for s in seconds] == pytest.approx(expected, abs=0.5)
    assert device("GH200").bandwidth == 4e12
    assert links.transfer_seconds(140e9, 4e12) * 1e3 == 35


def test_n42_transfer_of_8k_tokens_over_three_links() -> None:
    seconds = links.transfer_seconds(kv_cache.cache_bytes(L70, 8192), np.array([450e9, 50e9, 12.5e9]))
    assert seconds * 1e3 == pytest.approx([6, 54, 215], abs=0.5)


def test_n43_recompute_and_fetch_per_token() -> None:
    """Half the peak, matrices only, 8.0e9 and 70.0e9; fetched at 50 GB/s by each device."""
    recomputed = [2 * 8e9 / (0.5 * H100.peak()), 2 * 70e9 / (8 * 0.5 * H100.peak())]
    assert [s * 1e6 for s in recomputed] == pytest.approx([32, 35], abs=0.5)
    fetched = [links.transfer_seconds(KV_8B, 50e9), links.transfer_seconds(KV_70B, 8 * 50e9)]
    assert [s * 1e6 for s in fetched] == pytest.approx([2.6, 0.8], abs=0.05)


def test_n44_bandwidth_at_which_fetching_equals_recomputing() -> None:
    """With 8.03e9 and 70.55e9 parameters 4.0 and 9.2."""
    printed = [
        links.break_even_bandwidth(KV_8B, 2 * 8e9 / (0.5 * H100.peak())),
        links.break_even_bandwidth(KV_70B, 2 * 70e9 / (8 * 0.5 * H100.peak())),
    ]
    assert [rate / GB for rate in printed] == pytest.approx([4.1, 9.3], abs=0.05)
    published = links.break_even_bandwidth(KV_8B, 2 * L8.num_params / (0.5 * H100.peak()))
    assert published / GB == pytest.approx(4.04, abs=0.005)


def test_n45_a_rank_16_adapter_and_64_of_them() -> None:
    adapter = adapters.lora_params(L8, 16)
    assert adapter == 41_943_040
    assert adapter / L8.num_params * 100 == pytest.approx(0.52, abs=0.005)
    weights = kv_cache.weight_bytes(L8)
    assert 64 * links.transfer_seconds(weights, H100.bandwidth) * 1e3 == pytest.approx(307, abs=0.5)
    together = links.transfer_seconds(weights + 64 * 2 * adapter, H100.bandwidth)
    assert together * 1e3 == pytest.approx(6.4, abs=0.05)


def test_n46_time_in_a_single_queue_by_load() -> None:
    assert queueing.mm1_seconds(1.0, np.array([0.5, 0.8, 0.9, 0.95])) == pytest.approx([2, 5, 10, 20])


def test_n47_price_per_million_and_ratios_of_bandwidth() -> None:
    assert cost.dollars_per_million_tokens(3, 1000, utilization=np.array([1, 0.1])) == pytest.approx(
        [0.83, 8.33], abs=0.005
    )
    ratios = [device(name).bandwidth / H100.bandwidth for name in ("H200", "MI300X")]
    assert ratios == pytest.approx([1.433, 1.582], abs=5e-4)
    # A gain of 30 % on a thousand H100 at $3: 231 devices, about six million a year.
    saved = cost.devices_saved(1000, 0.3)
    assert saved == pytest.approx(231, abs=0.5)
    assert cost.dollars_per_year(saved, 3) / 1e6 == pytest.approx(6.06, abs=0.01)


def test_n48_image_and_video_tokens() -> None:
    tokens = np.array([50, 50 + (336 // 14) ** 2])
    assert tokens[1] == 626
    flops = latency.linear_flops(7e9, tokens)
    assert flops[1] / flops[0] == pytest.approx(12.5, abs=0.05)
    ratios = [float(np.divide(*latency.step_bound(flops[::-1], 14e9, H100, mfu=mfu))) for mfu in (1.0, 0.5)]
    assert ratios == pytest.approx([2.1, 4.2], abs=0.05)
    assert kv_cache.cache_bytes(L70, 30 * 256) / GB == pytest.approx(2.52, abs=0.005)
