"""Chooses a plain model's LinearMethod by its dtype and its device."""

from __future__ import annotations

import torch

from reference_impl.core.linear import UnquantizedLinear
from reference_impl.features.cpu.half import SlowHalfLinear
from reference_impl.features.cpu.operators import PackedIfLarge, PackedLinear, pays
from reference_impl.interfaces import LinearMethod


def default_method(dtype: torch.dtype, device: torch.device) -> LinearMethod:
    """The method for this dtype and device: packed weights on a CPU where they pay, plain ones elsewhere. The numbers
    agree to rounding."""
    if device.type == "cpu" and pays(dtype):
        return PackedLinear(dtype)
    if device.type == "cpu" and pays(dtype, large=True):
        return PackedIfLarge(dtype)
    if device.type == "cpu" and dtype.itemsize == 2:
        return SlowHalfLinear(dtype)
    return UnquantizedLinear(dtype, device)
