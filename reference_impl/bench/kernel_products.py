"""Products of linear layers for the kernel bench: 16, 8 and 4 bits, experts, adapters."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from reference_impl.bench.kernel_work import Peer, Place, Work, bytes_of
from reference_impl.kernels import reference

PROVEN = 128  # outputs of a product that the check computes


def sizes(place: Place, tokens: int, in_features: int, out_features: int) -> tuple[int, int, int]:
    found: tuple[int, int, int] = place.pick((tokens, in_features, out_features), (min(tokens, 9), 128, 48))
    return found


def cublas(x: Tensor, weight: Callable[[], Tensor]) -> Peer:
    def prepare() -> Callable[[], Tensor]:
        plain = weight()
        return lambda: F.linear(x, plain)

    return Peer(prepare)


def dense(place: Place, tokens: int, in_features: int, out_features: int) -> Work:
    from reference_impl.kernels.gemm import gemm

    tokens, in_features, out_features = sizes(place, tokens, in_features, out_features)
    x, weight = place.randn(tokens, in_features), place.randn(out_features, in_features, scale=in_features**-0.5)
    return Work(
        ours=lambda: gemm(x, weight),
        expected=lambda cast: reference.gemm(cast(x), cast(weight[:PROVEN])),
        part=lambda y: y[:, :PROVEN],
        moved=bytes_of(x, weight) + tokens * out_features * x.element_size(),
        flops=2.0 * tokens * in_features * out_features,
        cold=tokens <= 64,
        peers={"cuBLAS": cublas(x, lambda: weight)},
    )


def between_norms(place: Place, tokens: int, size: int, intermediate: int) -> Work:
    """Norm, the product of gate and up, and the gate, in one launch; `norm, cuBLAS, gate`: in three."""
    from reference_impl.kernels.fused_linear import fused_linear
    from reference_impl.kernels.gates import silu_and_mul
    from reference_impl.kernels.rms_norm import rms_norm

    tokens, size, intermediate = sizes(place, tokens, size, intermediate)
    x, norm = place.randn(tokens, size), 1 + place.randn(size, scale=0.1)
    weight = place.randn(2 * intermediate, size, scale=size**-0.5)

    def computed(gate_up: Tensor, cast: Callable[[Tensor], Tensor]) -> Tensor:
        return reference.fused_linear(cast(x), cast(gate_up), norm=cast(norm), eps=1e-5, gate="silu")

    n = min(PROVEN, intermediate)
    return Work(
        ours=lambda: fused_linear(x, weight, norm=norm, eps=1e-5, gate="silu"),
        expected=lambda cast: computed(torch.cat((weight[:n], weight[intermediate : intermediate + n])), cast),
        part=lambda y: y[:, :n],
        moved=bytes_of(x, norm, weight) + tokens * intermediate * x.element_size(),
        flops=4.0 * tokens * size * intermediate,
        cold=True,
        peers={
            "norm, cuBLAS, gate": Peer(lambda: lambda: silu_and_mul(F.linear(rms_norm(x, norm, 1e-5), weight))),
        },
    )


def before_residual(place: Place, tokens: int, in_features: int, out_features: int, group_size: int = 128) -> Work:
    """A product of 4-bit weights, and the residual added to it, in one launch; the peer: in two, from 16 bits."""
    from reference_impl.kernels.fused_linear_w4a16 import fused_linear_w4a16

    tokens, in_features, out_features = sizes(place, tokens, in_features, out_features)
    x, residual = place.randn(tokens, in_features), place.randn(tokens, out_features)
    codes = torch.randint(16, (out_features, in_features), dtype=torch.uint8, device=place.device)
    packed = reference.pack_int4(codes, group_size)
    scales = (place.randn(in_features // group_size, out_features).abs() + 0.5) * in_features**-0.5 / 8

    def in_two() -> Callable[[], Tensor]:
        weight = (codes.to(x.dtype) - 8) * scales.T.repeat_interleave(group_size, 1)
        return lambda: F.linear(x, weight) + residual

    n = min(PROVEN, out_features)
    return Work(
        ours=lambda: fused_linear_w4a16(x, packed, scales, residual=residual),
        expected=lambda cast: reference.fused_linear_w4a16(
            cast(x), packed[:n], cast(scales[:, :n]), residual=cast(residual[:, :n])
        ),
        part=lambda y: y[:, :n],
        moved=bytes_of(x, packed, scales, residual) + tokens * out_features * x.element_size(),
        flops=2.0 * tokens * in_features * out_features,
        cold=True,
        peers={"cuBLAS, add": Peer(in_two)},
    )


def four_bits(place: Place, tokens: int, in_features: int, out_features: int, group_size: int = 128) -> Work:
    from reference_impl.kernels.gemm_w4a16 import gemm_w4a16

    tokens, in_features, out_features = sizes(place, tokens, in_features, out_features)
    x = place.randn(tokens, in_features)
    codes = torch.randint(16, (out_features, in_features), dtype=torch.uint8, device=place.device)
    packed = reference.pack_int4(codes, group_size)
    scales = (place.randn(in_features // group_size, out_features).abs() + 0.5) * in_features**-0.5 / 8

    def weight() -> Tensor:
        return (codes.to(x.dtype) - 8) * scales.T.repeat_interleave(group_size, 1)

    def tinygemm() -> Callable[[], Tensor]:
        """torch's own kernel, that of gpt-fast; its code 8 is zero, too."""
        even_first = codes[:, ::2] << 4 | codes[:, 1::2]
        stored = torch.ops.aten._convert_weight_to_int4pack(even_first, 8)
        both = torch.stack((scales, torch.zeros_like(scales)), -1)
        return lambda: torch.ops.aten._weight_int4pack_mm(x, stored, group_size, both)

    return Work(
        ours=lambda: gemm_w4a16(x, packed, scales, None, group_size),
        expected=lambda cast: reference.gemm_w4a16(
            cast(x), packed[:PROVEN], cast(scales[:, :PROVEN]), None, group_size
        ),
        part=lambda y: y[:, :PROVEN],
        moved=bytes_of(x, packed, scales) + tokens * out_features * x.element_size(),
        flops=2.0 * tokens * in_features * out_features,
        cold=tokens <= 64,
        peers={"cuBLAS": cublas(x, weight), "tinygemm": Peer(tinygemm)},
    )


def eight_bits(place: Place, tokens: int, in_features: int, out_features: int) -> Work:
    from reference_impl.kernels.gemm_w8a16 import gemm_w8a16

    tokens, in_features, out_features = sizes(place, tokens, in_features, out_features)
    x = place.randn(tokens, in_features)
    weight = torch.randint(-127, 128, (out_features, in_features), dtype=torch.int8, device=place.device)
    scales = (place.randn(1, out_features).abs() + 0.5) * in_features**-0.5 / 64
    return Work(
        ours=lambda: gemm_w8a16(x, weight, scales),
        expected=lambda cast: reference.gemm_w8a16(cast(x), weight[:PROVEN], cast(scales[:, :PROVEN])),
        part=lambda y: y[:, :PROVEN],
        moved=bytes_of(x, weight, scales) + tokens * out_features * x.element_size(),
        flops=2.0 * tokens * in_features * out_features,
        cold=tokens <= 64,
        peers={"cuBLAS": cublas(x, lambda: weight.to(x.dtype) * scales.T)},
    )


def fp8(place: Place, tokens: int, in_features: int, out_features: int) -> Work:
    """The product alone, of given codes; cuBLAS in 16 bits gets the dequantized numbers."""
    from reference_impl.kernels.gemm_fp8 import gemm_fp8

    tokens, in_features, out_features = sizes(place, tokens, in_features, out_features)
    codes, scale = reference.quantize_rows_fp8(place.randn(tokens, in_features))
    weight, weight_scale = reference.quantize_rows_fp8(place.randn(out_features, in_features))

    def scaled_mm() -> Callable[[], Tensor]:
        return lambda: torch._scaled_mm(
            codes, weight.t(), scale_a=scale[:, None], scale_b=weight_scale[None], out_dtype=place.dtype
        )

    return Work(
        ours=lambda: gemm_fp8(codes, scale, weight, weight_scale, place.dtype),
        expected=lambda cast: reference.gemm_fp8(
            codes, cast(scale), weight[:PROVEN], cast(weight_scale[:PROVEN]),
            place.dtype if cast(scale).dtype is torch.float32 else torch.float64,
        ),
        part=lambda y: y[:, :PROVEN],
        moved=bytes_of(codes, weight, scale, weight_scale) + tokens * out_features * place.dtype.itemsize,
        flops=2.0 * tokens * in_features * out_features,
        precision="fp8",
        cold=tokens <= 64,
        peers={
            "cuBLAS": cublas(
                (codes.float() * scale[:, None]).to(place.dtype),
                lambda: (weight.float() * weight_scale[:, None]).to(place.dtype),
            ),
            "torch._scaled_mm": Peer(scaled_mm),
        },
    )  # fmt: skip


def experts(place: Place, tokens: int, num_experts: int, in_features: int, out_features: int) -> Work:
    """Tokens dealt evenly, up to chance, as a router does."""
    from reference_impl.kernels.grouped_gemm import grouped_gemm

    tokens, num_experts, in_features, out_features = place.pick(
        (tokens, num_experts, in_features, out_features), (11, 3, 64, 48)
    )
    x = place.randn(tokens, in_features)
    weights = place.randn(num_experts, out_features, in_features, scale=in_features**-0.5)
    counts = torch.randint(num_experts, (tokens,), device=place.device).bincount(minlength=num_experts)
    offsets = F.pad(counts.cumsum(0), (1, 0)).int()
    host = offsets.tolist()

    def loop() -> Tensor:
        out = x.new_empty(tokens, out_features)
        for e in range(num_experts):
            torch.mm(x[host[e] : host[e + 1]], weights[e].t(), out=out[host[e] : host[e + 1]])
        return out

    return Work(
        ours=lambda: grouped_gemm(x, weights, offsets),
        expected=lambda cast: reference.grouped_gemm(cast(x), cast(weights[:, :PROVEN]), offsets),
        part=lambda y: y[:, :PROVEN],
        moved=bytes_of(x, weights) + tokens * out_features * x.element_size(),
        flops=2.0 * tokens * in_features * out_features,
        peers={
            "torch._grouped_mm": Peer(lambda: lambda: torch._grouped_mm(x, weights.transpose(1, 2), offs=offsets[1:])),
            "a loop of cuBLAS": Peer(lambda: loop),
        },
    )


def adapters(place: Place, tokens: int, num_adapters: int, rank: int, size: int) -> Work:
    """Shrink and expand over a square layer. The peer gathers each token's adapter, as a batched product needs it."""
    from reference_impl.kernels.lora import lora_expand, lora_shrink

    tokens, num_adapters, rank, size = place.pick((tokens, num_adapters, rank, size), (7, 3, 8, 48))
    x, out = place.randn(tokens, size), torch.zeros(tokens, size, dtype=place.dtype, device=place.device)
    a, b = place.randn(num_adapters, rank, size, scale=size**-0.5), place.randn(num_adapters, size, rank)
    index = torch.arange(tokens, device=place.device).int() % num_adapters

    def gathered() -> Tensor:
        h = torch.bmm(a[index], x[:, :, None])
        return torch.bmm(b[index], h)[:, :, 0]

    def expected(reshape: Callable[[Tensor], Tensor]) -> Tensor:
        h = reference.lora_shrink(reshape(x), reshape(a), index)
        return reference.lora_expand(h, reshape(b), index, torch.zeros_like(reshape(out)))

    return Work(
        ours=lambda: lora_expand(lora_shrink(x, a, index), b, index, out.zero_()),
        expected=expected,
        moved=bytes_of(x, out, out, a, b),
        flops=4.0 * tokens * rank * size,
        cold=True,
        peers={"gather and torch.bmm": Peer(lambda: gathered)},
    )
