"""Kernels run in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import os

import torch

from tests.executor.forked import forked_workers as forked_workers

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before the first kernel is defined
