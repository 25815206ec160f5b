"""Rotary frequencies against the formulas, and a table that can tell positions apart."""

from __future__ import annotations

import math

import pytest
import torch

from reference_impl.assembly.config import RopeConfig
from reference_impl.core.rotary import RotaryTable, inverse_frequencies
from reference_impl.kernels import reference

CPU = torch.device("cpu")


def test_frequencies_fall_from_one_by_powers_of_theta() -> None:
    expected = [10_000 ** (-i / 6) for i in (0, 2, 4)]
    assert inverse_frequencies(RopeConfig(), 6).tolist() == pytest.approx(expected, rel=1e-15)


def test_linear_scaling_divides_every_frequency() -> None:
    plain, scaled = (
        inverse_frequencies(RopeConfig(), 16),
        inverse_frequencies(RopeConfig(kind="linear", factor=4.0), 16),
    )
    assert torch.equal(scaled, plain / 4)


def test_llama3_scaling_keeps_fast_waves_stretches_slow_ones_and_blends_between() -> None:
    rope = RopeConfig(500_000.0, "llama3", 8.0, 1.0, 4.0, 8192)
    plain, scaled = inverse_frequencies(RopeConfig(500_000.0), 128), inverse_frequencies(rope, 128)
    kinds = set()
    for before, after in zip(plain.tolist(), scaled.tolist(), strict=True):
        turns = 8192 * before / (2 * math.pi)
        if turns > 4:
            kinds.add("kept")
            assert after == before
        elif turns < 1:
            kinds.add("stretched")
            assert after == before / 8
        else:
            kinds.add("blended")
            keep = (turns - 1) / 3
            assert after == pytest.approx(keep * before + (1 - keep) * before / 8, rel=1e-14)
    assert kinds == {"kept", "stretched", "blended"}


@pytest.mark.parametrize(("dtype", "kept"), [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)])
def test_the_table_is_kept_in_float32_so_that_positions_stay_apart(dtype: torch.dtype, kept: torch.dtype) -> None:
    """bf16 has 8 bits: 257 and 256 would be one angle."""
    cos, sin = RotaryTable(RopeConfig(), 4, 1000, dtype, CPU).cos_sin[:, [0, 256, 257]]
    assert cos.dtype is sin.dtype is kept
    assert cos.shape == (3, 1, 4)
    assert (cos[1] - cos[2]).abs().max() > 0.1


def test_of_a_head_that_is_rotated_in_part_the_other_pairs_stay_as_they_are() -> None:
    table = RotaryTable(RopeConfig(partial=0.5), 16, 8, torch.float64, CPU)
    cos, sin = table.cos_sin[:, :, 0].unflatten(-1, (2, 2, 4)).unbind()  # [position, half, rotated or still, pair]
    assert (cos[:, :, 1] == 1).all()
    assert (sin[:, :, 1] == 0).all()
    assert (sin[1:, :, 0] != 0).all()


def test_a_score_depends_on_the_distance_only() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 1, 16, dtype=torch.float64, generator=generator) for _ in range(2))
    table = RotaryTable(RopeConfig(), 16, 200, torch.float64, CPU)

    def score(query_position: int, key_position: int) -> float:
        a = reference.rotate(q, *table.cos_sin[:, [query_position]])
        b = reference.rotate(k, *table.cos_sin[:, [key_position]])
        return float((a * b).sum())

    assert score(9, 4) == pytest.approx(score(150, 145), rel=1e-12)
    assert score(9, 4) != pytest.approx(score(9, 5), rel=1e-3)
