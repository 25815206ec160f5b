"""Calls of host functions that launch nothing: with tensors that have a shape and no memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Call = Callable[[torch.dtype], Any]  # a host function with tensors on the meta device, given the activations' dtype


def empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
