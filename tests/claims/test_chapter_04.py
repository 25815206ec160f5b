"""Errata of paged attention (E04.x) that arithmetic decides; chapter 04 shows them on the pool."""

import numpy as np
import pytest

from reference_impl.interfaces import KVSpec
from reference_impl.theory import kv_cache
from reference_impl.theory.model_shapes import model
from reference_impl.theory.units import MB, KiB

L70 = model("llama-3-70b")


def test_e04_04_waste_in_the_last_block_depends_on_the_length_of_the_sequence() -> None:
    """Claim: paging wastes under 4 %. With blocks of 16 that needs sequences of about 200 tokens or more.

    13.0, 3.6, 1.5, 0.4 % at 50, 200, 500, 2000 tokens; blocks of 128 waste 56, 24, 11, 3 %. Lengths drawn at random
    confirm the mean.
    """
    lengths = np.array([50, 200, 500, 2000])
    assert kv_cache.tail_waste_share(lengths, 16) * 100 == pytest.approx([13.0, 3.6, 1.5, 0.4], abs=0.06)
    assert kv_cache.tail_waste_share(lengths, 128) * 100 == pytest.approx([56, 24, 11, 3], abs=0.4)
    drawn = np.random.default_rng(0).integers(100, 101 + 16 * 30, 100_000)
    slots = -(-drawn // 16) * 16
    simulated = (slots - drawn).sum() / slots.sum()
    assert simulated == pytest.approx(kv_cache.tail_waste_share(drawn.mean(), 16), rel=0.01)


def test_e04_05_a_block_of_16_tokens_is_5_mb_over_all_layers_and_64_kib_in_one() -> None:
    """Claim: a block of a 70B is an object of 5.2 MB. That sums 80 layers; a kernel sees 64 KiB, half of it keys."""
    total = kv_cache.cache_bytes(L70, 16)
    assert total / MB == pytest.approx(5.24, abs=0.005)
    assert total / L70.layers == 64 * KiB
    engine = KVSpec(L70.layers, L70.num_kv_heads, L70.head_dim, block_size=16, bits_per_value=16)
    assert engine.bytes_per_block == total
    assert (
        KVSpec(L70.layers, L70.num_kv_heads // 8, L70.head_dim, 16, bits_per_value=16).bytes_per_block == total / 8
    )  # TP 8
