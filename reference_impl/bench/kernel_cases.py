"""The cases of the kernel bench, the most telling first: when the time is up, what comes last is left out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from reference_impl.bench import kernel_attention as attention
from reference_impl.bench import kernel_formats as formats
from reference_impl.bench import kernel_products as products
from reference_impl.bench import kernel_rows as rows
from reference_impl.bench.kernel_work import Place, Work


@dataclass(frozen=True)
class Goal:
    """From the project's list of goals. unit: "% of limit", "TFLOP/s", or "x PEER": times as fast as that peer."""

    value: float
    unit: str


@dataclass(frozen=True)
class Case:
    name: str
    make: Callable[[Place], Work]
    goal: Goal | None = None


BY_TRAFFIC = Goal(90, "% of limit")
INT8, UINT8, FP8 = torch.int8, torch.uint8, torch.float8_e4m3fn

# Attention: 32 heads, 8 KV heads of 128, as in Llama 3 8B. Products: its down projection [4096 x 14336], transposed.
CASES = [
    Case("decode, B 64, context 4k", lambda p: attention.decode(p, 64, 4096), Goal(85, "% of limit")),
    Case("decode, B 1, context 32k", lambda p: attention.decode(p, 1, 32768), Goal(60, "% of limit")),
    Case("prefill 8k, causal", lambda p: attention.prefill(p, 8192), Goal(460, "TFLOP/s")),
    Case("add_rms_norm [16384, 4096]", lambda p: rows.norm(p, 16384, 4096), BY_TRAFFIC),
    Case("silu_and_mul [8192, 2 x 14336]", lambda p: rows.gate(p, 8192, 14336), BY_TRAFFIC),
    Case("rotate_and_write, 16384 tokens", lambda p: rows.rotary(p, 16384), BY_TRAFFIC),
    Case("w4a16, m 1", lambda p: products.four_bits(p, 1, 4096, 14336), Goal(3.0, "x cuBLAS")),
    Case("w4a16, m 16", lambda p: products.four_bits(p, 16, 4096, 14336), Goal(3.0, "x cuBLAS")),
    Case("fp8, m 16", lambda p: products.fp8(p, 16, 4096, 14336), Goal(1.7, "x cuBLAS")),
    Case("fp8, m 64", lambda p: products.fp8(p, 64, 4096, 14336), Goal(1.7, "x cuBLAS")),
    Case("8 experts, 8k tokens", lambda p: products.experts(p, 8192, 8, 4096, 14336), Goal(550, "TFLOP/s")),
    Case("silu_and_mul to fp8 [8192, 2 x 14336]", lambda p: rows.gate_to_fp8(p, 8192, 14336)),
    Case("decode, B 64, context 4k, fp8 cache", lambda p: attention.decode(p, 64, 4096, cache=FP8)),
    Case("decode, B 64, context 4k, int8 cache", lambda p: attention.decode(p, 64, 4096, cache=INT8)),
    Case("decode, B 64, context 4k, int4 cache", lambda p: attention.decode(p, 64, 4096, cache=UINT8)),
    Case("sampling, 64 x 128k, top-k 50, top-p 0.9", lambda p: rows.sampling(p, 64, 128256, 50, 0.9)),
    Case("sampling, 64 x 128k, plain", lambda p: rows.sampling(p, 64, 128256)),
    Case("prefill 16k, causal", lambda p: attention.prefill(p, 16384), Goal(460, "TFLOP/s")),
    Case("prefill 1k, causal", lambda p: attention.prefill(p, 1024)),
    Case("prefill 16k, window 4096", lambda p: attention.prefill(p, 16384, window=p.pick(4096, 20))),
    Case("w8a16, m 16", lambda p: products.eight_bits(p, 16, 4096, 14336)),
    Case("w8a8 int8, m 16", lambda p: formats.int8_both(p, 16, 4096, 14336)),
    Case("fp8 by block, m 16", lambda p: formats.fp8_blocks(p, 16, 4096, 14336)),
    Case("nvfp4 emulated, m 16", lambda p: formats.fp4(p, 16, 4096, 14336)),
    Case("gemm, m 16", lambda p: products.dense(p, 16, 4096, 14336)),
    Case("norm, gate and up, gate, m 1", lambda p: products.between_norms(p, 1, 4096, 14336)),
    Case("norm, gate and up, gate, m 64", lambda p: products.between_norms(p, 64, 4096, 14336)),
    Case("w4a16 and residual, m 1", lambda p: products.before_residual(p, 1, 14336, 4096)),
    Case("gemm, m 8192", lambda p: products.dense(p, 8192, 4096, 14336)),
    Case("fp8, m 8192", lambda p: products.fp8(p, 8192, 4096, 14336)),
    Case("128 experts, 1k tokens", lambda p: products.experts(p, 1024, 128, 2048, 768)),
    Case("LoRA, 64 tokens, 8 adapters, rank 16", lambda p: products.adapters(p, 64, 8, 16, 4096)),
]
