"""The worked problem of chapter 12: four more H100 for Llama-3-70B in BF16 on four, tensor parallel."""

from dataclasses import replace

import pytest

from reference_impl.theory.collectives import ring_all_reduce
from reference_impl.theory.deployment import WORKED
from reference_impl.theory.units import MB, KiB, MiB


def test_worked_12_four_more_gpus() -> None:
    eight = replace(WORKED, num_devices=8)
    cache, rate = 64 * 2000 * WORKED.bytes_per_token, WORKED.device.bandwidth
    assert rate == 3.35e12  # 3.35 TB/s
    assert (WORKED.read / 1e9, cache / 1e9) == pytest.approx((139.0, 41.9), abs=0.05)
    assert (WORKED.read + cache) / (4 * rate) * 1e3 == pytest.approx(13.5, abs=0.05)
    assert (WORKED.read + cache) / (8 * rate) * 1e3 == pytest.approx(6.8, abs=0.05)
    assert (WORKED.read + cache / 2) / (4 * rate) * 1e3 == pytest.approx(11.9, abs=0.05)
    rings = [ring_all_reduce(MiB, n, 2e-6, 450e9) for n in (4, 8)]
    assert [t * 1e6 for t in rings] == pytest.approx([15.5, 32.1], abs=0.05)
    assert [160 * t * 1e3 for t in rings] == pytest.approx([2.5, 5.1], abs=0.05)
    assert 160 * ring_all_reduce(MiB / 2, 4, 2e-6, 450e9) * 1e3 == pytest.approx(2.2, abs=0.05)
    times = [WORKED.tpot(2000, 64), eight.tpot(2000, 64), WORKED.tpot(2000, 32)]
    assert [t * 1e3 for t in times] == pytest.approx([16.0, 11.9, 14.1], abs=0.05)
    assert times[0] / times[1] == pytest.approx(1.34, abs=0.005)
    fit = [WORKED.cache_tokens() // 4096, eight.cache_tokens() // 4096]
    assert fit == [109, 324]
    assert (2 * fit[0], fit[1] - 2 * fit[0]) == (218, 106)
    assert 160 * 2 * 7 / 8 * 16 * KiB / MB == pytest.approx(4.6, abs=0.05)
    assert WORKED.shape.hidden_size * 2 == 16 * KiB
