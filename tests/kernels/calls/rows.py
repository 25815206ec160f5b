"""Norms, gates and the cache's write with the sizes of a Llama of 8 billion parameters, and their options."""

from __future__ import annotations

import torch
from torch import Tensor

from reference_impl.kernels import gates, gates_fp8, rms_norm
from reference_impl.kernels.rotate_and_write import rotate_and_write
from tests.kernels.calls.meta import Call, empty, scales

ROWS = 64


def _norm(name: str, hidden: int, weight: torch.dtype | None = None) -> Call:
    """A call of the norm `name`. weight: the weight's dtype, if not that of x."""

    def call(dtype: torch.dtype) -> object:
        x = empty(ROWS, hidden, dtype=dtype)
        added = () if name == "rms_norm" else (x,)
        return getattr(rms_norm, name)(x, *added, empty(hidden, dtype=weight or dtype), 1e-5)

    return call


def _gate(name: str, intermediate: int) -> Call:
    module = gates_fp8 if name.endswith("fp8") else gates
    return lambda dtype: getattr(module, name)(empty(ROWS, 2 * intermediate, dtype=dtype))


def _rotate(heads: int, kv_heads: int, head_dim: int, qk_norm: bool = False, cache: torch.dtype | None = None) -> Call:
    def call(dtype: torch.dtype) -> Tensor:
        qkv = empty(ROWS, heads + 2 * kv_heads, head_dim, dtype=dtype)
        q, k, v = qkv.split((heads, kv_heads, kv_heads), 1)
        at, turns = empty(ROWS, dtype=torch.int64), empty(4096, 1, head_dim, dtype=torch.float32)
        stored = empty(1000, 16, kv_heads, head_dim // (1 + (cache is torch.uint8)), dtype=cache or dtype)
        weight = empty(head_dim, dtype=dtype) if qk_norm else None
        scale = None if cache is None else scales(1000, kv_heads, 16, cache)
        return rotate_and_write(
            q, k, v, at, turns, turns, stored, stored, at, weight, weight, key_scale=scale, value_scale=scale
        )

    return call


CALLS: dict[str, Call] = {
    "rms_norm": _norm("rms_norm", 4096),
    "rms_norm, float32 weight": _norm("rms_norm", 2304, torch.float32),
    "add_rms_norm": _norm("add_rms_norm", 4096),
    "add_rms_norm, one tile": _norm("add_rms_norm", 16384),
    "add_rms_norm, two tiles": _norm("add_rms_norm", 18432),
    "add_rms_norm to fp8": _norm("add_rms_norm_fp8", 4096),
    "add_rms_norm to fp8, two tiles": _norm("add_rms_norm_fp8", 18432),
    "silu_and_mul": _gate("silu_and_mul", 14336),
    "gelu_tanh_and_mul": _gate("gelu_tanh_and_mul", 9216),
    "silu_and_mul to fp8": _gate("silu_and_mul_fp8", 14336),
    "silu_and_mul to fp8, two tiles": _gate("silu_and_mul_fp8", 25600),
    "rotate_and_write": _rotate(32, 8, 128),
    "rotate_and_write, QK-norm": _rotate(16, 8, 128, qk_norm=True),
    "rotate_and_write, head_dim 80": _rotate(32, 32, 80),
    "rotate_and_write, int8 cache": _rotate(32, 8, 128, cache=torch.int8),
    "rotate_and_write, fp8 cache": _rotate(32, 8, 128, cache=torch.float8_e4m3fn),
    "rotate_and_write, e5m2 cache": _rotate(32, 8, 128, cache=torch.float8_e5m2),
    "rotate_and_write, int4 cache": _rotate(32, 8, 128, cache=torch.uint8),
}
