"""Kernels run in Triton's interpreter where there is no GPU; it has to be told before the first kernel is defined."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
