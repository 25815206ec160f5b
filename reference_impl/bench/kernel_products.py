"""Linear layers of m tokens, k inputs and n outputs, of experts and of adapters.

`_linear` in kernel_cases.py adds the FLOP of a layer, and that few tokens meet a cold L2.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from reference_impl.bench.kernels import FP8, INT8, UINT8, Cast, Peer, Place, Work, kernel, twins
from reference_impl.kernels import reference
from reference_impl.kernels.reference.linear import FP4_STEP, GROUP


def _cublas(x: Tensor, weight: Callable[[], Tensor]) -> dict[str, Peer]:
    """The same layer from a weight in 16 bits, which is made before anything is timed."""

    def prepare() -> Callable[[], Tensor]:
        plain = weight()
        return lambda: F.linear(x, plain)

    return {"cuBLAS": Peer(prepare)}


def dense(place: Place, m: int, k: int, n: int) -> Work:
    x, w = place.randn(m, k), place.randn(n, k, scale=k**-0.5)
    return twins("gemm", x, w, peers=_cublas(x, lambda: w))


def between_norms(place: Place, m: int, k: int, n: int) -> Work:
    """Norm, the product of gate and up, and the gate, in one launch; `norm, cuBLAS, gate`: in three."""
    norm_rows, gate = kernel("rms_norm"), kernel("silu_and_mul", "gates")
    x, norm, w = place.randn(m, k), 1 + place.randn(k, scale=0.1), place.randn(2 * n, k, scale=k**-0.5)
    peers = {"norm, cuBLAS, gate": Peer(lambda: lambda: gate(F.linear(norm_rows(x, norm, 1e-5), w)))}
    options = {"norm": norm, "eps": 1e-5, "gate": "silu"}
    return twins("fused_linear", x, w, options=options, peers=peers, flops=4.0 * m * k * n)


def _int4(place: Place, m: int, k: int, n: int, group: int = 128) -> tuple[Tensor, ...]:
    """(x, codes, packed, scales [k / group, n], the weight in 16 bits)."""
    codes = torch.randint(16, (n, k), dtype=torch.uint8, device=place.device)
    x, scales = place.randn(m, k), (place.randn(k // group, n).abs() + 0.5) * k**-0.5 / 8
    weight = (codes.to(x.dtype) - 8) * scales.T.repeat_interleave(group, 1)
    return x, codes, reference.pack_int4(codes, group), scales, weight


def before_residual(place: Place, m: int, k: int, n: int) -> Work:
    """A product of 4-bit weights, and the residual added to it, in one launch; the peer: in two, from 16 bits."""
    (x, _, packed, scales, weight), residual = _int4(place, m, k, n), place.randn(m, n)
    peers = {"cuBLAS, add": Peer(lambda: lambda: F.linear(x, weight) + residual)}
    return twins("fused_linear_w4a16", x, packed, scales, options={"residual": residual}, peers=peers)


def four_bits(place: Place, m: int, k: int, n: int) -> Work:
    x, codes, packed, scales, weight = _int4(place, m, k, n)

    def tinygemm() -> Callable[[], Tensor]:
        """torch's own kernel, that of gpt-fast; its code 8 is zero, too."""
        stored = torch.ops.aten._convert_weight_to_int4pack(codes[:, ::2] << 4 | codes[:, 1::2], 8)
        both = torch.stack((scales, torch.zeros_like(scales)), -1)
        return lambda: torch.ops.aten._weight_int4pack_mm(x, stored, 128, both)

    peers = _cublas(x, lambda: weight) | {"tinygemm": Peer(tinygemm)}
    return twins("gemm_w4a16", x, packed, scales, None, 128, peers=peers)


def eight_bits(place: Place, m: int, k: int, n: int) -> Work:
    x, scales = place.randn(m, k), (place.randn(1, n).abs() + 0.5) * k**-0.5 / 64
    w = torch.randint(-127, 128, (n, k), dtype=INT8, device=place.device)
    return twins("gemm_w8a16", x, w, scales, peers=_cublas(x, lambda: w.to(x.dtype) * scales.T))


def fp8(place: Place, m: int, k: int, n: int) -> Work:
    """Work of the product alone, of given codes; cuBLAS in 16 bits gets the dequantized numbers."""
    codes, scale = reference.quantize_rows_fp8(place.randn(m, k))
    w, w_scale = reference.quantize_rows_fp8(place.randn(n, k))
    x = (codes.float() * scale[:, None]).to(place.dtype)
    scaled: dict[str, Any] = {"scale_a": scale[:, None], "scale_b": w_scale[None], "out_dtype": place.dtype}
    peers = _cublas(x, lambda: (w.float() * w_scale[:, None]).to(place.dtype))
    peers["torch._scaled_mm"] = Peer(lambda: lambda: torch._scaled_mm(codes, w.t(), **scaled))
    return twins("gemm_fp8", codes, scale, w, w_scale, place.dtype, precision="fp8", peers=peers)


def int8_both(place: Place, m: int, k: int, n: int) -> Work:
    """Work of a product in int8 with the rounding of the tokens, a launch of its own; cuBLAS in 16 bits gets the
    numbers that codes stand for."""
    product, rounded, x = kernel("gemm_w8a8"), kernel("quantize_rows_int8", "quantize_rows"), place.randn(m, k)
    (codes, scale), (w, w_scale) = (reference.quantize_rows_int8(t) for t in (x, place.randn(n, k)))
    return Work(
        lambda: product(*rounded(x), w, w_scale, place.dtype),
        lambda c: reference.gemm_w8a8(codes, c(scale), w, c(w_scale), c(place.dtype)),
        (x, w, w_scale), peers=_cublas(x, lambda: (w.float() * w_scale[:, None]).to(place.dtype)),
    )  # fmt: skip


def fp8_blocks(place: Place, m: int, k: int, n: int) -> Work:
    """Work of a product in FP8 by blocks, with the rounding of the tokens by groups of 128 inputs, a launch of its
    own."""
    product, rounded = kernel("gemm_fp8_blocks"), kernel("quantize_groups_fp8", "quantize_rows")
    x, w = place.randn(m, k), place.randn(n, k).to(FP8)
    codes, scale = reference.quantize_groups_fp8(x)
    blocks = place.randn(-(-n // GROUP), -(-k // GROUP)).abs().float() + 0.5

    def plain() -> Tensor:
        return (w.float() * blocks.repeat_interleave(GROUP, 0)[:n].repeat_interleave(GROUP, 1)[:, :k]).to(place.dtype)

    return Work(
        lambda: product(*rounded(x), w, blocks, place.dtype),
        lambda c: reference.gemm_fp8_blocks(codes, c(scale), w, c(blocks), c(place.dtype)),
        (x, w, blocks), precision="fp8", peers=_cublas(x, plain),
    )  # fmt: skip


def fp4(place: Place, m: int, k: int, n: int) -> Work:
    """Work of a product with NVFP4 weights, multiplied in 16 bits."""
    x, codes = place.randn(m, k), torch.randint(16, (n, k), dtype=UINT8, device=place.device)
    scales = (place.randn(n, k // 16).abs().float() + 0.5).to(FP8).view(UINT8)
    w = reference.pack_int4(codes, FP4_STEP), scales, torch.full((n,), k**-0.5 / 8, device=place.device)

    def plain() -> Tensor:
        return reference.gemm_fp4(torch.eye(k, device=place.device), *w).T.to(x.dtype)

    return twins("gemm_fp4", x, *w, peers=_cublas(x, plain))


def experts(place: Place, m: int, num_experts: int, k: int, n: int) -> Work:
    """Work of experts, with tokens dealt evenly, up to chance, as a router does."""
    m, num_experts, k, n = place.pick((m, num_experts, k, n), (11, 3, 64, 48))
    x, w = place.randn(m, k), place.randn(num_experts, n, k, scale=k**-0.5)
    counts = torch.randint(num_experts, (m,), device=place.device).bincount(minlength=num_experts)
    offsets = F.pad(counts.cumsum(0), (1, 0)).int()
    host = offsets.tolist()

    def loop() -> Tensor:
        out = x.new_empty(m, n)
        for e, (i, j) in enumerate(itertools.pairwise(host)):
            torch.mm(x[i:j], w[e].t(), out=out[i:j])
        return out

    peers = {
        "torch._grouped_mm": Peer(lambda: lambda: torch._grouped_mm(x, w.transpose(1, 2), offs=offsets[1:])),
        "a loop of cuBLAS": Peer(lambda: loop),
    }
    return twins("grouped_gemm", x, w, offsets, peers=peers, flops=2.0 * m * k * n)


def adapters(place: Place, m: int, num_adapters: int, rank: int, size: int) -> Work:
    """Work of adapters: shrink and expand, a square layer. The peer gathers each token's adapter for a batched
    product."""
    shrink, expand = kernel("lora_shrink", "lora"), kernel("lora_expand", "lora")
    m, num_adapters, rank, size = place.pick((m, num_adapters, rank, size), (7, 3, 8, 48))
    x, out = place.randn(m, size), torch.zeros(m, size, dtype=place.dtype, device=place.device)
    a, b = place.randn(num_adapters, rank, size, scale=size**-0.5), place.randn(num_adapters, size, rank)
    index = torch.arange(m, device=place.device).int() % num_adapters

    def expected(c: Cast) -> Tensor:
        return reference.lora_expand(reference.lora_shrink(c(x), c(a), index), c(b), index, torch.zeros_like(c(out)))

    return Work(
        lambda: expand(shrink(x, a, index), b, index, out.zero_()), expected, (x, out, a, b),
        flops=4.0 * m * rank * size, cold=True,
        peers={"gather and torch.bmm": Peer(lambda: lambda: (b[index] @ (a[index] @ x[:, :, None]))[:, :, 0])},
    )  # fmt: skip
