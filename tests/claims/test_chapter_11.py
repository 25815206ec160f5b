"""Errata of mixtures of experts (E11.x) that sizes alone decide; chapter 11 shows routing."""

import numpy as np
import pytest

from reference_impl.theory import kv_cache
from reference_impl.theory.hardware import device
from reference_impl.theory.latency import require_fit
from reference_impl.theory.model_shapes import model
from reference_impl.theory.roofline import gemm_intensity
from reference_impl.theory.units import GB, MB

H100 = device("H100")


def test_e11_03_one_expert_is_small_and_slicing_it_makes_its_products_thin() -> None:
    """Claim: a single expert is too large for tensor parallelism. One of DeepSeek-V3 is 44 MB in FP8.

    Slicing it eight ways works and lowers what its products can reach: at most 247 operations per byte of 16 bits
    instead of 1593, below an H100's ridge.
    """
    hidden, wide = model("deepseek-v3").hidden_size, 2048
    assert 3 * hidden * wide / MB == pytest.approx(44.0, abs=0.05)
    assert 3 * hidden * wide < H100.capacity / 1000
    whole, sliced = gemm_intensity(1e9, hidden, np.array([wide, wide // 8]))
    assert (whole, sliced) == (pytest.approx(1593, abs=1), pytest.approx(247, abs=1))
    assert sliced < H100.ridge() < whole


def test_e11_05_deepseek_r1_in_fp8_needs_eight_devices_of_more_than_84_gb() -> None:
    """Claim: TP2 x EP4 serves DeepSeek-R1 on eight GPUs. Which ones decides: 671 GB over eight are 84 GB each."""
    weights = kv_cache.weight_bytes(model("deepseek-r1"), 8)
    assert weights / 8 / GB == pytest.approx(84, abs=0.5)
    for name in ("H100", "A100-80GB"):
        with pytest.raises(ValueError, match="at least 9 devices"):
            require_fit(weights, device(name), 8)
    for name in ("H200", "B200", "MI300X"):
        require_fit(weights, device(name), 8)
    require_fit(weights, H100, 16)


def test_e11_06_the_layout_follows_the_bytes_and_not_the_parameter_count() -> None:
    """Claim: models of 100B and more need TP, EP and PP together.

    117 billion parameters at 4.25 bits (MXFP4: a scale of 8 bits for 32 values) are 62 GB and fit one 80 GB device.
    """
    bits = kv_cache.bits_per_weight(4, 32, scale_bits=8)
    assert bits == 4.25
    require_fit(117e9 * bits / 8, H100)
    assert 117e9 * bits / 8 / GB == pytest.approx(62, abs=0.5)
    with pytest.raises(ValueError, match="at least 3 devices"):
        require_fit(117e9 * 2, H100)
