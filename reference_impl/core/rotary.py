"""Rotary position embedding: the table of cosines and sines, one row per position."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from reference_impl.core.model_config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """The frequencies theta^(-2i / n), i < n / 2, rescaled for long contexts: [n / 2] float64. n: the values of a head
    that are rotated."""
    rotated = int(head_dim * rope.partial)
    exponent = torch.arange(0, rotated, 2, dtype=torch.float64) / rotated
    frequency = rope.theta**-exponent
    if rope.kind == "linear":  # position interpolation (Chen et al. 2023)
        return frequency / rope.factor
    if rope.kind == "longrope":  # Ding et al. 2024; why only the short factors: models/phi3.py
        return frequency / torch.tensor(rope.short_factors, dtype=torch.float64)
    if rope.kind == "llama3":
        # Llama 3.1: slow waves are stretched by `factor`, fast ones kept, those in between blended.
        wavelength = 2 * math.pi / frequency
        low = rope.original_max_position / rope.low_freq_factor
        high = rope.original_max_position / rope.high_freq_factor
        share = rope.original_max_position / wavelength - rope.low_freq_factor
        blend = share / (rope.high_freq_factor - rope.low_freq_factor)
        blended = (1 - blend) * frequency / rope.factor + blend * frequency
        scaled = torch.where(wavelength > low, frequency / rope.factor, blended)
        return torch.where(wavelength < high, frequency, scaled)
    return frequency


class RotaryTable:
    """The cosines and sines of positions below max_position, in the form of `kernels.reference.rotate`.

    They are kept in float32 (float64 for a float64 model): bf16 cannot tell apart positions above 256.
    """

    def __init__(self, rope: RopeConfig, head_dim: int, max_position: int, dtype: torch.dtype, device: torch.device):
        frequency = inverse_frequencies(rope, head_dim)
        angle = torch.outer(torch.arange(max_position, dtype=torch.float64), frequency)
        still = (0, head_dim // 2 - len(frequency))  # the pairs that are not rotated, if any, come last
        cos = F.pad(angle.cos() * rope.attention_factor, still, value=1.0)
        sin = F.pad(angle.sin() * rope.attention_factor, still)
        kept = torch.float64 if dtype is torch.float64 else torch.float32
        both = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)))
        self.cos_sin = both.to(device, kept)[:, :, None]  # [2, max_position, 1, head_dim]

    @property
    def max_position(self) -> int:
        return self.cos_sin.shape[1]
