"""A cache of eight bits together with a soft cap and a window: each alone says nothing about their order."""

from __future__ import annotations

import pytest
import torch

from reference_impl.kernels import reference
from reference_impl.kernels.flash_attention import flash_attention
from reference_impl.kernels.paged_decode import paged_decode
from tests.kernels.paged import check, make

E4M3, INT8 = torch.float8_e4m3fn, torch.int8
# Each two of the options together; the other half is slow.
PAIRS = [(0.5, None, E4M3), (0.5, 37, INT8), (20.0, None, INT8), (20.0, 37, E4M3)]
OTHERS = [(0.5, None, INT8), (0.5, 37, E4M3), (20.0, None, E4M3), (20.0, 37, INT8)]


@pytest.mark.parametrize(
    ("softcap", "window", "cache"), [*PAIRS, *(pytest.param(*one, marks=pytest.mark.slow) for one in OTHERS)]
)
def test_scores_are_scaled_then_capped_then_masked(softcap, window, cache) -> None:
    ragged = make([(1, 130), (5, 18), (33, 63)], 4, 2, 32, torch.float32, cache=cache)
    check(flash_attention, reference.flash_attention, ragged.ragged, window=window, softcap=softcap, **ragged.options)
    lone = make([(1, 130), (1, 18), (1, 63)], 4, 2, 32, torch.float32, cache=cache)
    check(paged_decode, reference.paged_decode, lone.decode, window=window, softcap=softcap, **lone.options)
