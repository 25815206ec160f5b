"""What is computed for each token by itself: norm, rotary embedding, gates."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in the weight's dtype; given back in that of x."""
    if weight is None or weight.dtype is x.dtype:
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    return F.rms_norm(x.to(weight.dtype), x.shape[-1:], weight, eps).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding, halves convention (Su et al. 2021, as Llama and Qwen store it).

    x [num_tokens, heads, head_dim]; cos and sin [num_tokens, 1, head_dim], sin with its first half negated:
    (a, b) -> (a cos - b sin, b cos + a sin).
    """
    swapped = x.roll(x.shape[-1] // 2, dims=-1)  # (b, a)
    return torch.addcmul(x * cos, swapped, sin).to(x.dtype)


def silu_and_mul(x: Tensor) -> Tensor:
    """SwiGLU's gate: x [..., 2 n] = (gate, up) -> silu(gate) * up, [..., n]."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu_tanh_and_mul(x: Tensor) -> Tensor:
    """GeGLU's gate (Gemma), with the tanh approximation of gelu: x [..., 2 n] = (gate, up) -> gelu(gate) * up."""
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """cap x tanh(x / cap): near 0 it is x, and it never passes the cap (Gemma 2)."""
    return cap * torch.tanh(x / cap)
