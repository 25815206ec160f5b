"""What is computed for each token by itself: norm, gates, and rotary embedding with the write into the cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from reference_impl.kernels.reference.attention import rotate

Activation = Literal["silu", "gelu_tanh"]


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in the weight's dtype; returned in that of x."""
    if weight is None or weight.dtype is x.dtype:
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    return F.rms_norm(x.to(weight.dtype), x.shape[-1:], weight, eps).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(sum), sum), with sum = x + residual; all of one shape and dtype."""
    total = x + residual
    return rms_norm(total, weight, eps), total


def add_rms_norm_fp8(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """(codes, scale, sum): `add_rms_norm` with the norm in FP8 and a scale per row, for an FP8 product. The sum is
    rounded to the dtype of x, the norm is not before it is in FP8: so it is finite also beyond float16's largest."""
    total = x + residual
    normed = rms_norm(_wide(total), None if weight is None else _wide(weight), eps)
    return *to_eight_bits(normed, torch.float8_e4m3fn), total


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def to_eight_bits(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(codes, scale), x about codes x scale: codes like x in int8 or a float8, scale [...] float32.

    The last dimension shares a scale: its largest magnitude becomes the largest code. A magnitude below 2^-64 counts as
    2^-64, so that nothing is divided by zero. With NaN or infinity there the scale is NaN, and so is all that is made
    of it; the codes may be any.
    """
    limit = 127.0 if dtype is torch.int8 else torch.finfo(dtype).max
    exact = _wide(x)
    largest = exact.abs().amax(-1, keepdim=True).clamp(min=2.0**-64)
    scale = largest / torch.full_like(largest, limit)  # by a number, a GPU would multiply by its reciprocal
    scale = scale.masked_fill(~largest.isfinite(), torch.nan)
    codes = (exact * (1 / scale)).clamp(-limit, limit)  # as the kernels do it; rounding may pass the limit
    return (codes.round() if dtype is torch.int8 else codes).to(dtype), scale[..., 0].float()


def rotate_and_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    slot_mapping: Tensor,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    *,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> Tensor:
    """Applies QK-norm and rotary embedding, writes k and v into the cache, and returns q as a new tensor.

    q [num_tokens, num_heads, head_dim], k and v [num_tokens, num_kv_heads, head_dim]: they may be parts of one
    projection. positions [num_tokens], padding included, index cos and sin [max_position, 1, head_dim] (RotaryTable).
    keys and values [num_blocks, block_size, num_kv_heads, head_dim] are written at slot_mapping [num_tokens]: block x
    block_size + offset, or -1 for a token that only pads the batch and is written nowhere. q_norm, k_norm [head_dim].

    A cache of int8 or a float8 has scales [num_blocks, block_size, num_kv_heads] float32, which are written, too. One
    of 4 bits, uint8 with head_dim / 2 bytes a head, has them in float16, [num_blocks, block_size, num_kv_heads, 2]: see
    `to_four_bits`. What goes into the cache is rounded once, to the cache's numbers. Of a head with NaN or infinity (in
    4 bits: a number beyond float16) the scale is NaN, so that all of it is NaN when it is read. Raises ValueError if
    scales are missing, or given for another cache.
    """
    if (keys.element_size() == 1) != (key_scale is not None) or (key_scale is None) != (value_scale is None):
        raise ValueError(
            f"expected key_scale and value_scale with a cache of 8 or 4 bits, and only then; it is {keys.dtype}"
        )
    query, k, v = _wide(q), _wide(k), _wide(v)
    query = query if q_norm is None else rms_norm(query, _wide(q_norm), eps)
    k = k if k_norm is None else rms_norm(k, _wide(k_norm), eps)
    query, k = (rotate(x, cos[positions], sin[positions]) for x in (query, k))
    real = slot_mapping >= 0
    slots = slot_mapping[real].long()
    at, four = (slots // keys.shape[1], slots % keys.shape[1]), keys.dtype is torch.uint8
    if four:
        from reference_impl.kernels.reference.four_bits import to_four_bits
    for cache, scale, fresh in ((keys, key_scale, k[real]), (values, value_scale, v[real])):
        if scale is None:
            cache[at] = fresh.to(cache.dtype)
        else:
            codes, scale[at] = to_four_bits(fresh) if four else to_eight_bits(fresh, cache.dtype)
            cache.view(torch.uint8)[at] = codes.view(torch.uint8)  # torch cannot assign to an indexed float8
    return query.to(q.dtype)


def silu_and_mul(x: Tensor) -> Tensor:
    """SwiGLU's gate: x [..., 2 n] = (gate, up) -> silu(gate) * up, [..., n]."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def silu_and_mul_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """(codes, scale): `silu_and_mul` in FP8 with a scale per row; the products are not rounded to the dtype of x."""
    return to_eight_bits(silu_and_mul(_wide(x)), torch.float8_e4m3fn)


def gelu_tanh_and_mul(x: Tensor) -> Tensor:
    """GeGLU's gate (Gemma), with the tanh approximation of gelu: x [..., 2 n] = (gate, up) -> gelu(gate) * up."""
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


GATES: dict[Activation, Callable[[Tensor], Tensor]] = {"silu": silu_and_mul, "gelu_tanh": gelu_tanh_and_mul}
