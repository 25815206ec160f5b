"""Linear layers of m tokens, k inputs and n outputs, of experts and of adapters."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from reference_impl.bench.kernel_work import Cast, Peer, Place, Work, bytes_of
from reference_impl.kernels import reference
from reference_impl.kernels.reference.linear import FP4_STEP, GROUP

INT8, UINT8, FP8 = torch.int8, torch.uint8, torch.float8_e4m3fn


def _cublas(x: Tensor, weight: Callable[[], Tensor]) -> Peer:
    def prepare() -> Callable[[], Tensor]:
        plain = weight()
        return lambda: F.linear(x, plain)

    return Peer(prepare)


def _product(ours: Any, expected: Any, held: tuple[Tensor, ...], m: int, k: int, n: int, **fields: Any) -> Work:
    """held: what is read, the tokens first, in the dtype of the result unless `itemsize` says another."""
    moved = bytes_of(*held) + m * n * fields.pop("itemsize", held[0].element_size())
    return Work(ours, expected, moved, 2.0 * m * k * n, **{"cold": m <= 64} | fields)


def dense(place: Place, m: int, k: int, n: int) -> Work:
    from reference_impl.kernels.gemm import gemm

    x, w = place.randn(m, k), place.randn(n, k, scale=k**-0.5)
    peers = {"cuBLAS": _cublas(x, lambda: w)}
    return _product(lambda: gemm(x, w), lambda c: reference.gemm(c(x), c(w)), (x, w), m, k, n, peers=peers)


def between_norms(place: Place, m: int, k: int, n: int) -> Work:
    """Norm, the product of gate and up, and the gate, in one launch; `norm, cuBLAS, gate`: in three."""
    from reference_impl.kernels.fused_linear import fused_linear
    from reference_impl.kernels.gates import silu_and_mul
    from reference_impl.kernels.rms_norm import rms_norm

    x, norm, w = place.randn(m, k), 1 + place.randn(k, scale=0.1), place.randn(2 * n, k, scale=k**-0.5)
    return _product(
        lambda: fused_linear(x, w, norm=norm, eps=1e-5, gate="silu"),
        lambda c: reference.fused_linear(c(x), c(w), norm=c(norm), eps=1e-5, gate="silu"), (x, norm, w), m, 2 * k, n,
        peers={"norm, cuBLAS, gate": Peer(lambda: lambda: silu_and_mul(F.linear(rms_norm(x, norm, 1e-5), w)))},
    )  # fmt: skip


def _int4(place: Place, m: int, k: int, n: int, group: int = 128) -> tuple[Tensor, ...]:
    """(x, codes, packed, scales [k / group, n], the weight in 16 bits)."""
    codes = torch.randint(16, (n, k), dtype=torch.uint8, device=place.device)
    x, scales = place.randn(m, k), (place.randn(k // group, n).abs() + 0.5) * k**-0.5 / 8
    weight = (codes.to(x.dtype) - 8) * scales.T.repeat_interleave(group, 1)
    return x, codes, reference.pack_int4(codes, group), scales, weight


def before_residual(place: Place, m: int, k: int, n: int) -> Work:
    """A product of 4-bit weights, and the residual added to it, in one launch; the peer: in two, from 16 bits."""
    from reference_impl.kernels.fused_linear_w4a16 import fused_linear_w4a16

    (x, _, packed, scales, weight), residual = _int4(place, m, k, n), place.randn(m, n)
    return _product(
        lambda: fused_linear_w4a16(x, packed, scales, residual=residual),
        lambda c: reference.fused_linear_w4a16(c(x), packed, c(scales), residual=c(residual)),
        (x, packed, scales, residual), m, k, n,
        peers={"cuBLAS, add": Peer(lambda: lambda: F.linear(x, weight) + residual)},
    )  # fmt: skip


def four_bits(place: Place, m: int, k: int, n: int) -> Work:
    from reference_impl.kernels.gemm_w4a16 import gemm_w4a16

    x, codes, packed, scales, weight = _int4(place, m, k, n)

    def tinygemm() -> Callable[[], Tensor]:
        """torch's own kernel, that of gpt-fast; its code 8 is zero, too."""
        stored = torch.ops.aten._convert_weight_to_int4pack(codes[:, ::2] << 4 | codes[:, 1::2], 8)
        both = torch.stack((scales, torch.zeros_like(scales)), -1)
        return lambda: torch.ops.aten._weight_int4pack_mm(x, stored, 128, both)

    return _product(
        lambda: gemm_w4a16(x, packed, scales, None, 128),
        lambda c: reference.gemm_w4a16(c(x), packed, c(scales), None, 128), (x, packed, scales), m, k, n,
        peers={"cuBLAS": _cublas(x, lambda: weight), "tinygemm": Peer(tinygemm)},
    )  # fmt: skip


def eight_bits(place: Place, m: int, k: int, n: int) -> Work:
    from reference_impl.kernels.gemm_w8a16 import gemm_w8a16

    x, scales = place.randn(m, k), (place.randn(1, n).abs() + 0.5) * k**-0.5 / 64
    w = torch.randint(-127, 128, (n, k), dtype=INT8, device=place.device)
    return _product(
        lambda: gemm_w8a16(x, w, scales), lambda c: reference.gemm_w8a16(c(x), w, c(scales)), (x, w, scales), m, k, n,
        peers={"cuBLAS": _cublas(x, lambda: w.to(x.dtype) * scales.T)},
    )  # fmt: skip


def fp8(place: Place, m: int, k: int, n: int) -> Work:
    """The product alone, of given codes; cuBLAS in 16 bits gets the dequantized numbers."""
    from reference_impl.kernels.gemm_fp8 import gemm_fp8

    codes, scale = reference.quantize_rows_fp8(place.randn(m, k))
    w, w_scale = reference.quantize_rows_fp8(place.randn(n, k))
    x = (codes.float() * scale[:, None]).to(place.dtype)
    scaled: dict[str, Any] = {"scale_a": scale[:, None], "scale_b": w_scale[None], "out_dtype": place.dtype}
    return _product(
        lambda: gemm_fp8(codes, scale, w, w_scale, place.dtype),
        lambda c: reference.gemm_fp8(codes, c(scale), w, c(w_scale), c(x).dtype), (codes, w, scale, w_scale), m, k, n,
        itemsize=x.element_size(), precision="fp8",
        peers={
            "cuBLAS": _cublas(x, lambda: (w.float() * w_scale[:, None]).to(place.dtype)),
            "torch._scaled_mm": Peer(lambda: lambda: torch._scaled_mm(codes, w.t(), **scaled)),
        },
    )  # fmt: skip


def int8_both(place: Place, m: int, k: int, n: int) -> Work:
    """With the rounding of the tokens, a launch of its own; cuBLAS in 16 bits gets the numbers that codes stand for."""
    from reference_impl.kernels.gemm_w8a8 import gemm_w8a8
    from reference_impl.kernels.quantize_rows import quantize_rows_int8

    x = place.randn(m, k)
    (codes, scale), (w, w_scale) = (reference.quantize_rows_int8(t) for t in (x, place.randn(n, k)))
    return _product(
        lambda: gemm_w8a8(*quantize_rows_int8(x), w, w_scale, place.dtype),
        lambda c: reference.gemm_w8a8(codes, c(scale), w, c(w_scale), c(x).dtype), (x, w, w_scale), m, k, n,
        peers={"cuBLAS": _cublas(x, lambda: (w.float() * w_scale[:, None]).to(place.dtype))},
    )  # fmt: skip


def fp8_blocks(place: Place, m: int, k: int, n: int) -> Work:
    """With the rounding of the tokens by groups of 128 inputs, a launch of its own."""
    from reference_impl.kernels.gemm_fp8_blocks import gemm_fp8_blocks
    from reference_impl.kernels.quantize_rows import quantize_groups_fp8

    x, w = place.randn(m, k), place.randn(n, k).to(FP8)
    codes, scale = reference.quantize_groups_fp8(x)
    blocks = place.randn(-(-n // GROUP), -(-k // GROUP)).abs().float() + 0.5

    def plain() -> Tensor:
        return (w.float() * blocks.repeat_interleave(GROUP, 0)[:n].repeat_interleave(GROUP, 1)[:, :k]).to(place.dtype)

    return _product(
        lambda: gemm_fp8_blocks(*quantize_groups_fp8(x), w, blocks, place.dtype),
        lambda c: reference.gemm_fp8_blocks(codes, c(scale), w, c(blocks), c(x).dtype), (x, w, blocks), m, k, n,
        precision="fp8", peers={"cuBLAS": _cublas(x, plain)},
    )  # fmt: skip


def fp4(place: Place, m: int, k: int, n: int) -> Work:
    """NVFP4, multiplied in 16 bits."""
    from reference_impl.kernels.gemm_fp4 import gemm_fp4

    x, codes = place.randn(m, k), torch.randint(16, (n, k), dtype=UINT8, device=place.device)
    scales = (place.randn(n, k // 16).abs().float() + 0.5).to(FP8).view(UINT8)
    w = reference.pack_int4(codes, FP4_STEP), scales, torch.full((n,), k**-0.5 / 8, device=place.device)

    def plain() -> Tensor:
        return reference.gemm_fp4(torch.eye(k, device=place.device), *w).T.to(x.dtype)

    peers = {"cuBLAS": _cublas(x, plain)}
    return _product(lambda: gemm_fp4(x, *w), lambda c: reference.gemm_fp4(c(x), *w), (x, *w), m, k, n, peers=peers)


def experts(place: Place, m: int, num_experts: int, k: int, n: int) -> Work:
    """Tokens dealt evenly, up to chance, as a router does."""
    from reference_impl.kernels.grouped_gemm import grouped_gemm

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

    return _product(
        lambda: grouped_gemm(x, w, offsets), lambda c: reference.grouped_gemm(c(x), c(w), offsets), (x, w), m, k, n,
        cold=False,
        peers={
            "torch._grouped_mm": Peer(lambda: lambda: torch._grouped_mm(x, w.transpose(1, 2), offs=offsets[1:])),
            "a loop of cuBLAS": Peer(lambda: loop),
        },
    )  # fmt: skip


def adapters(place: Place, m: int, num_adapters: int, rank: int, size: int) -> Work:
    """Shrink and expand over a square layer. The peer gathers each token's adapter, as a batched product needs it."""
    from reference_impl.kernels.lora import lora_expand, lora_shrink

    m, num_adapters, rank, size = place.pick((m, num_adapters, rank, size), (7, 3, 8, 48))
    x, out = place.randn(m, size), torch.zeros(m, size, dtype=place.dtype, device=place.device)
    a, b = place.randn(num_adapters, rank, size, scale=size**-0.5), place.randn(num_adapters, size, rank)
    index = torch.arange(m, device=place.device).int() % num_adapters

    def expected(c: Cast) -> Tensor:
        return reference.lora_expand(
            reference.lora_shrink(c(x), c(a), index), c(b), index, torch.zeros_like(c(out))
        )  # fmt: skip

    return Work(
        lambda: lora_expand(lora_shrink(x, a, index), b, index, out.zero_()), expected,
        moved=bytes_of(x, out, out, a, b), flops=4.0 * m * rank * size, cold=True,
        peers={
            "gather and torch.bmm": Peer(lambda: lambda: (b[index] @ (a[index] @ x[:, :, None]))[:, :, 0]),
        },
    )  # fmt: skip
