"""The table of the kernel bench, at the end; before it what is computed per token: norm, gate, rotary embedding with
the cache write, sampling.

The most telling cases come first: when the time is up, what comes last is left out. Products have the size of the down
projection of Llama 3 8B [4096 x 14336], transposed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from reference_impl.bench import kernel_products as products
from reference_impl.bench.kernel_attention import decode, prefill
from reference_impl.bench.kernels import (
    BLOCK_SIZE,
    FP8,
    INT8,
    UINT8,
    Case,
    Cast,
    Goal,
    Peer,
    Place,
    Work,
    as_is,
    bytes_of,
    double,
    kernel,
    twins,
)
from reference_impl.kernels import reference


def _in_torch(name: str, *given: Any, module: str) -> Work:
    """Work with the reference as its peer, also compiled."""
    return twins(name, *given, module=module, peers=_torch(lambda: getattr(reference, name)(*given)))


def _torch(function: Callable[[], Any]) -> dict[str, Peer]:
    compiled = Peer(lambda: torch.compile(function, dynamic=False), compiles=True)
    return {"torch": Peer(lambda: function), "torch.compile": compiled}


def norm(place: Place, rows: int, size: int) -> Work:
    rows, size = place.pick((rows, size), (5, 80))
    x, residual, weight = place.randn(rows, size), place.randn(rows, size), place.randn(size)
    return _in_torch("add_rms_norm", x, residual, weight, 1e-6, module="rms_norm")


def gate(place: Place, rows: int, size: int) -> Work:
    x = place.randn(*place.pick((rows, 2 * size), (5, 144)))
    return _in_torch("silu_and_mul", x, module="gates")


def gate_to_fp8(place: Place, rows: int, size: int) -> Work:
    """Work of a gate with its result in FP8; both results are compared decoded, codes times scale."""
    rows, size = place.pick((rows, size), (5, 72))
    x, ours = place.randn(rows, 2 * size), kernel("silu_and_mul_fp8", "gates_fp8")

    def decoded(found: tuple[Tensor, Tensor]) -> Tensor:
        return found[0].float() * found[1][:, None]

    def expected(c: Cast) -> Tensor:
        return reference.silu_and_mul(c(x)) if c is double else decoded(reference.silu_and_mul_fp8(x))

    return Work(
        lambda: ours(x), expected, (x,), part=decoded, peers=_torch(lambda: reference.silu_and_mul_fp8(x))
    )  # fmt: skip


def rotary(place: Place, tokens: int) -> Work:
    """Work of rotate_and_write with QK-norm, as in Qwen3; the check compares q and the contents of the cache."""
    tokens, heads, kv_heads, head_dim = place.pick((tokens, 32, 8, 128), (7, 4, 2, 16))
    blocks, device = -(-tokens // BLOCK_SIZE) + 1, place.device
    q, k, v = place.randn(tokens, heads + 2 * kv_heads, head_dim).split((heads, kv_heads, kv_heads), 1)
    frequency = 1e4 ** -torch.linspace(0, 1, head_dim // 2).to(device)
    angle = torch.outer(torch.arange(tokens, device=device).float(), frequency)
    cos = torch.cat((angle.cos(), angle.cos()), -1)[:, None]
    sin = torch.cat((-angle.sin(), angle.sin()), -1)[:, None]
    positions, slots = torch.arange(tokens, device=device), torch.randperm(blocks * BLOCK_SIZE, device=device)[:tokens]
    cache = torch.zeros(2, blocks, BLOCK_SIZE, kv_heads, head_dim, dtype=place.dtype, device=device)
    other, q_norm, k_norm = torch.zeros_like(cache), place.randn(head_dim), place.randn(head_dim)
    ours = kernel("rotate_and_write")

    def by(kernel: Callable[..., Tensor], own: Tensor, c: Cast = as_is) -> tuple[Tensor, Tensor]:
        read = (c(q), c(k), c(v), positions, c(cos), c(sin))
        return kernel(*read, own[0], own[1], slots, c(q_norm), c(k_norm), 1e-6), own

    def separate() -> tuple[Tensor, Tensor]:
        """The same in torch, as the decoder does it there."""
        c, s = cos[positions], sin[positions]
        rotated_q = reference.rotate(reference.rms_norm(q, q_norm, 1e-6), c, s)
        other[0].flatten(0, 1).index_copy_(0, slots, reference.rotate(reference.rms_norm(k, k_norm, 1e-6), c, s))
        other[1].flatten(0, 1).index_copy_(0, slots, v)
        return rotated_q, other

    return Work(
        lambda: by(ours, cache), lambda c: by(reference.rotate_and_write, torch.zeros_like(c(cache)), c),
        moved=2 * bytes_of(q, k, v) + bytes_of(cos, sin), peers=_torch(separate),
    )  # fmt: skip


def sampling(place: Place, rows: int, vocab_size: int, top_k: int = 0, top_p: float = 1.0) -> Work:
    """Work of drawing every row at temperature 0.8. The reference kernel sorts; the kernel chooses exactly its
    tokens."""
    rows, vocab_size = place.pick((rows, vocab_size), (3, 300))
    logits, number = place.randn(rows, vocab_size, scale=3.0), torch.arange(rows, device=place.device)
    ones, zeros = torch.ones(rows, device=place.device), torch.zeros_like(number)
    given = 0.8 * ones, zeros + top_k, top_p * ones, 0 * ones, number * 7919, zeros, number + 100
    ours, expected = kernel("sample_tokens"), lambda: reference.sample_tokens(logits, *given)
    peers = {"torch, with a sort": Peer(lambda: expected)}
    return Work(lambda: ours(logits, *given), lambda c: expected(), (logits,), cold=True, peers=peers)


def _linear(
    name: str, make: Callable[..., Work], m: int, goal: float | None = None, k: int = 4096, n: int = 14336
) -> Case:
    """A case of a linear layer. goal: times as fast as cuBLAS."""

    def work(place: Place) -> Work:
        size = place.pick((m, k, n), (min(m, 9), 128, 48))
        made = make(place, *size)
        return replace(made, flops=made.flops or 2.0 * math.prod(size), cold=m <= 64)

    return Case(f"{name}, m {m}", work, None if goal is None else Goal(goal, "x cuBLAS"))


BY_TRAFFIC = Goal(90, "% of limit")
CASES = [
    Case("decode, B 64, context 4k", lambda p: decode(p, 64, 4096), Goal(85, "% of limit")),
    Case("decode, B 1, context 32k", lambda p: decode(p, 1, 32768), Goal(60, "% of limit")),
    Case("prefill 8k, causal", lambda p: prefill(p, 8192), Goal(460, "TFLOP/s")),
    Case("add_rms_norm [16384, 4096]", lambda p: norm(p, 16384, 4096), BY_TRAFFIC),
    Case("silu_and_mul [8192, 2 x 14336]", lambda p: gate(p, 8192, 14336), BY_TRAFFIC),
    Case("rotate_and_write, 16384 tokens", lambda p: rotary(p, 16384), BY_TRAFFIC),
    _linear("w4a16", products.four_bits, 1, 3.0),
    _linear("w4a16", products.four_bits, 16, 3.0),
    _linear("fp8", products.fp8, 16, 1.7),
    _linear("fp8", products.fp8, 64, 1.7),
    Case("8 experts, 8k tokens", lambda p: products.experts(p, 8192, 8, 4096, 14336), Goal(550, "TFLOP/s")),
    Case("silu_and_mul to fp8 [8192, 2 x 14336]", lambda p: gate_to_fp8(p, 8192, 14336)),
    Case("decode, B 64, context 4k, fp8 cache", lambda p: decode(p, 64, 4096, FP8)),
    Case("decode, B 64, context 4k, int8 cache", lambda p: decode(p, 64, 4096, INT8)),
    Case("decode, B 64, context 4k, int4 cache", lambda p: decode(p, 64, 4096, UINT8)),
    Case("sampling, 64 x 128k, top-k 50, top-p 0.9", lambda p: sampling(p, 64, 128256, 50, 0.9)),
    Case("sampling, 64 x 128k, plain", lambda p: sampling(p, 64, 128256)),
    Case("prefill 16k, causal", lambda p: prefill(p, 16384), Goal(460, "TFLOP/s")),
    Case("prefill 1k, causal", lambda p: prefill(p, 1024)),
    Case("prefill 16k, window 4096", lambda p: prefill(p, 16384, window=p.pick(4096, 20))),
    _linear("w8a16", products.eight_bits, 16),
    _linear("w8a8 int8", products.int8_both, 16),
    _linear("fp8 by block", products.fp8_blocks, 16),
    _linear("nvfp4 emulated", products.fp4, 16),
    _linear("gemm", products.dense, 16),
    _linear("norm, gate and up, gate", products.between_norms, 1),
    _linear("norm, gate and up, gate", products.between_norms, 64),
    _linear("w4a16 and residual", products.before_residual, 1, k=14336, n=4096),
    _linear("gemm", products.dense, 8192),
    _linear("fp8", products.fp8, 8192),
    Case("128 experts, 1k tokens", lambda p: products.experts(p, 1024, 128, 2048, 768)),
    Case("LoRA, 64 tokens, 8 adapters, rank 16", lambda p: products.adapters(p, 64, 8, 16, 4096)),
]
