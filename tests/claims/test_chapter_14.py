"""Errata of KV tiering (E14.x) that bandwidths decide."""

import numpy as np
import pytest

from reference_impl.theory import kv_cache, latency
from reference_impl.theory.hardware import device, hierarchy
from reference_impl.theory.links import break_even_bandwidth, link, transfer_seconds
from reference_impl.theory.model_shapes import model

H100, L70, L8 = device("H100"), model("llama-3-70b"), model("llama-3-8b")
KV_8B, KV_70B = kv_cache.bytes_per_token(L8), kv_cache.bytes_per_token(L70)


def recompute(params: float, devices: int) -> float:
    """Seconds per token of a prefill at half the peak, attention left out."""
    return latency.linear_flops(params, 1) / (devices * 0.5 * H100.peak())


def test_e14_02_fetching_beats_recomputing_above_a_bandwidth_whatever_the_length() -> None:
    """Claim: it depends on the length of the sequence and on DRAM bandwidth.

    Both costs grow with the tokens, so their ratio is a bandwidth, and that of the link: 4.1 GB/s for an 8B on one
    H100, 9.3 for a 70B on eight. PCIe is above both, one NVMe drive between them. Attention favours fetching as prompts
    grow; a fixed latency decides for short ones only.
    """
    eight, seventy = recompute(8e9, 1), recompute(70e9, 8)
    assert break_even_bandwidth(KV_8B, eight) / 1e9 == pytest.approx(4.1, abs=0.05)
    assert break_even_bandwidth(KV_70B, seventy) / 1e9 == pytest.approx(9.3, abs=0.05)
    drive, pcie = link("NVMe SSD, PCIe 4 x4").per_direction, 50e9
    assert transfer_seconds(KV_8B, drive) < eight
    assert transfer_seconds(KV_70B, drive) > seventy
    assert transfer_seconds(KV_8B, pcie) < transfer_seconds(KV_8B, drive)
    tokens = np.array([1000, 10_000, 100_000])
    needed = break_even_bandwidth(tokens * KV_8B, latency.prefill_seconds(L8, tokens, H100, mfu=0.5))
    assert needed[0] == pytest.approx(needed[1], rel=0.2)
    assert needed[2] < 0.5 * needed[0]  # attention makes recomputing dearer
    # A latency of 5 ms is worth 168 tokens of an 8B.
    saved_each = eight - transfer_seconds(KV_8B, pcie)
    assert 5e-3 / saved_each == pytest.approx(168, abs=0.5)


def test_e14_03_host_memory_is_as_fast_as_the_path_to_it() -> None:
    """Claim: CPU memory at 200 GB/s, in a table beside HBM. That is what the CPU sees.

    A GPU on PCIe 4 or 5 sees 32 or 63 GB/s of line rate (25-28 and 50-60 in copies), one on Grace about 360. The choice
    between fetching and recomputing changes with it.
    """
    seen = {
        name: next(level for level in hierarchy(device(name)) if level.name == "host memory").bandwidth[0] / 1e9
        for name in ("A100-80GB", "H100", "GH200")
    }
    assert seen == {"A100-80GB": 31.5, "H100": 63.0, "GH200": 360.0}
    assert all(rate != 200 for rate in seen.values())
    assert link("NVLink-C2C").per_direction / 1e9 == 450  # of the link; its memory is slower
