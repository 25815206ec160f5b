"""The table of the kernel bench: every kernel on given tensors, how its result is checked, what else can compute it.

The most telling cases come first: when the time is up, what comes last is left out. Attention has 32 heads and 8 KV
heads of 128, as in Llama 3 8B; products have the size of its down projection [4096 x 14336], transposed.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from reference_impl.kernels import reference
from reference_impl.kernels.reference.linear import FP4_STEP, GROUP

Cast = Callable[[Any], Any]
BLOCK_SIZE = 16
INT8, UINT8, FP8 = torch.int8, torch.uint8, torch.float8_e4m3fn


@dataclass(frozen=True)
class Place:
    """Where and in which dtype; tiny: sizes for the interpreter."""

    device: torch.device
    dtype: torch.dtype
    tiny: bool = False

    def pick(self, real: Any, tiny: Any) -> Any:
        return tiny if self.tiny else real

    def randn(self, *shape: int, scale: float = 1.0) -> Tensor:
        """The same numbers in every run. Drawn on the device: there may be billions."""
        return torch.randn(shape, device=self.device, dtype=self.dtype) * scale


@dataclass(frozen=True)
class Peer:
    """prepare() gives what is timed; what it prepares, a compilation or a custom layout, is not."""

    prepare: Callable[[], Callable[[], Any]]
    compiles: bool = False  # torch.compile: takes long, and a dry run leaves it out


def flat(found: Any) -> Tensor:
    return found if isinstance(found, Tensor) else torch.cat([t.flatten() for t in found])


@dataclass
class Work:
    """ours: the kernel. expected: the same with plain torch, from tensors given to `cast`; `part` takes from results
    what is compared.

    moved: bytes that must be read and written once; precision: that of `flops`. cold: flush the L2 before each run, as
    between two layers of a decoding step.
    """

    ours: Callable[[], Any]
    expected: Callable[[Cast], Any]
    moved: float
    flops: float = 0.0
    precision: str = "16 bits"
    cold: bool = False
    part: Callable[[Any], Tensor] = flat
    peers: dict[str, Peer] = field(default_factory=dict)


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


def as_is(value: Any) -> Any:
    return value


def double(value: Any) -> Any:
    """float64; codes of 8 bits and whole numbers stay."""
    is_float = isinstance(value, Tensor) and value.is_floating_point() and value.element_size() > 1
    return value.double() if is_float else value


def wrong(work: Work, found: Any) -> str | None:
    """The error rule: against float64 at most twice the error of plain torch, and 2 eps max |reference|."""
    exact, plain, part = flat(work.expected(double)), flat(work.expected(as_is)), work.part(found)
    if part.shape != plain.shape:
        return f"has the shape {list(part.shape)}, expected {list(plain.shape)}"
    if not exact.is_floating_point():
        differ = int((part != exact).sum())
        return f"differs in {differ} of {exact.numel()} places" if differ else None
    error, allowed = (part.double() - exact).abs().max(), 2 * (plain.double() - exact).abs().max()
    allowed += 2 * torch.finfo(plain.dtype).eps * exact.abs().max()
    return None if bool(error <= allowed) else f"has an error of {float(error):.3g}, allowed {float(allowed):.3g}"


def bytes_of(*tensors: Tensor) -> float:
    return float(sum(t.numel() * t.element_size() for t in tensors))


# Attention over a cache whose blocks lie in random order, and torch's own over keys side by side.


def prefill(place: Place, length: int, **options: Any) -> Work:
    """One prompt, causal. The check takes its first and its last queries."""
    from reference_impl.kernels.flash_attention import flash_attention

    length, heads, kv_heads, head_dim = place.pick((length, 32, 8, 128), (70, 4, 2, 16))
    _, (k, v), (keys, values, table, lens) = _cache(place, 1, length, heads, kv_heads, head_dim)
    starts = torch.tensor([0, length], dtype=torch.int32, device=place.device)
    scale, n, window = head_dim**-0.5, min(64, length), options.get("window")
    q = place.randn(length, heads, head_dim)

    def expected(cast: Cast) -> Tensor:
        first = reference.attention_one_row(cast(q[:n]), cast(k[0, :n]), cast(v[0, :n]), scale, window)
        last = reference.attention_one_row(cast(q[-n:]), cast(k[0]), cast(v[0]), scale, window)
        return torch.cat((first, last))

    seen = length * (length + 1) / 2 if window is None else length * window - window * (window - 1) / 2
    return Work(
        lambda: flash_attention(q, keys, values, table, starts, lens, scale, **options), expected,
        moved=2.0 * q.element_size() * (q.numel() + k.numel()), flops=4.0 * heads * head_dim * seen,
        part=lambda out: torch.cat((out[:n], out[-n:])),
        peers={} if window else _attention_peers(q[None], k, v, scale, causal=True),
    )  # fmt: skip


def decode(place: Place, rows: int, context: int, cache: torch.dtype | None = None) -> Work:
    """One query per row. cache: of 8 bits, with a scale per slot and head; uint8: of 4 bits. The check takes three of
    the rows."""
    from reference_impl.kernels.paged_decode import paged_decode

    rows, context, heads, kv_heads, head_dim = place.pick((rows, context, 32, 8, 128), (min(rows, 3), 40, 4, 2, 16))
    scales: dict[str, Any] = {}
    q, (k, v), (keys, values, table, lens) = _cache(place, rows, context, heads, kv_heads, head_dim)
    scale, some = head_dim**-0.5, torch.tensor(sorted({0, rows // 2, rows - 1}), device=place.device)
    peers = _attention_peers(q[:, None], k, v, scale, causal=False)
    if cache is not None:
        wide = (keys, values)  # torch's own attention reads no codes
        peers = {"SDPA flash": peers["SDPA flash"]}
        peers["ours, 16-bit cache"] = Peer(lambda: lambda: paged_decode(q, *wide, table, lens, context, scale))
        (keys, scales["key_scale"]), (values, scales["value_scale"]) = (
            reference.to_four_bits(t) if cache is UINT8 else reference.to_eight_bits(t, cache) for t in wide
        )
    slot = keys.shape[-1] * keys.element_size() + 4 * (cache is not None)  # bytes of a head's key
    return Work(
        lambda: paged_decode(q, keys, values, table, lens, context, scale, **scales),
        lambda cast: reference.paged_decode(
            cast(q[some]), cast(keys), cast(values), table[some], lens[some], context, scale, **scales
        ),
        moved=2.0 * rows * context * kv_heads * slot + 2 * bytes_of(q), flops=4.0 * rows * context * heads * head_dim,
        part=lambda out: out[some], cold=True, peers=peers,
    )  # fmt: skip


def _cache(place: Place, rows: int, context: int, heads: int, kv_heads: int, head_dim: int) -> Any:
    """(q of one query per row, (k, v) of each row side by side, (keys, values, block_table, seq_lens) in blocks)."""
    blocks = -(-context // BLOCK_SIZE)
    table = torch.randperm(rows * blocks, device=place.device).int().view(rows, blocks)
    paged = [place.randn(rows * blocks, BLOCK_SIZE, kv_heads, head_dim) for _ in range(2)]
    side_by_side = [t[table.long()].flatten(1, 2)[:, :context].contiguous() for t in paged]
    lens = torch.full((rows,), context, dtype=torch.int32, device=place.device)
    return place.randn(rows, heads, head_dim), side_by_side, (*paged, table, lens)


def _attention_peers(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> dict[str, Peer]:
    """q [rows, queries, heads, head_dim], k and v [rows, context, kv_heads, head_dim] -> [rows x queries, ...]."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    group = q.shape[2] // k.shape[2]

    def sdpa(backend: SDPBackend, repeat: int = 1) -> Peer:
        """repeat: a backend that knows no groups gets copies of the KV heads."""

        def prepare() -> Callable[[], Tensor]:
            query, key, value = (t.transpose(1, 2) for t in (q, *(t.repeat_interleave(repeat, 2) for t in (k, v))))

            def run() -> Tensor:
                with sdpa_kernel(backend):
                    out = F.scaled_dot_product_attention(
                        query, key, value, is_causal=causal, scale=scale, enable_gqa=repeat < group
                    )
                return out.transpose(1, 2).flatten(0, 1)

            return run

        return Peer(prepare)

    def varlen() -> Callable[[], Tensor]:
        """torch.nn.attention.varlen: its arguments changed from torch 2.10 to 2.13."""
        from torch.nn.attention.varlen import varlen_attn

        known, options, run = inspect.signature(varlen_attn).parameters, dict[str, Any](), varlen_attn
        if causal:
            options |= {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
        options |= {"enable_gqa": True} if "enable_gqa" in known else {}
        options |= {"scale": scale} if "scale" in known else {}
        key, value = (t if "enable_gqa" in known else t.repeat_interleave(group, 2) for t in (k, v))
        starts = [torch.arange(len(t) + 1, dtype=torch.int32, device=q.device) * t.shape[1] for t in (q, k)]
        given: list[Any] = [*(t.flatten(0, 1) for t in (q, key, value)), *starts, q.shape[1], k.shape[1]]
        return lambda: run(*given, **options)  # type: ignore[return-value]

    def flex() -> Callable[[], Tensor]:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        size, mask = (q.shape[1], k.shape[1]), None
        if causal:
            mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, *size, device=str(q.device))
        query, key, value = (t.transpose(1, 2) for t in (q, k, v))
        run: Any = torch.compile(flex_attention, dynamic=False)
        given = {"block_mask": mask, "scale": scale, "enable_gqa": True}
        return lambda: run(query, key, value, **given).transpose(1, 2).flatten(0, 1)

    return {
        "SDPA flash": sdpa(SDPBackend.FLASH_ATTENTION),
        "SDPA cuDNN": sdpa(SDPBackend.CUDNN_ATTENTION),
        "SDPA efficient": sdpa(SDPBackend.EFFICIENT_ATTENTION, group),
        "varlen": Peer(varlen),
        "FlexAttention": Peer(flex, compiles=True),
    }


# Linear layers: m tokens of k inputs, n outputs.


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


# What is computed per token: norm, gate, rotary embedding with the cache write, sampling.


def _torch(function: Callable[[], Any]) -> dict[str, Peer]:
    compiled = Peer(lambda: torch.compile(function, dynamic=False), compiles=True)
    return {"torch": Peer(lambda: function), "torch.compile": compiled}


def norm(place: Place, rows: int, size: int) -> Work:
    from reference_impl.kernels.rms_norm import add_rms_norm

    rows, size = place.pick((rows, size), (5, 80))
    x, residual, weight = place.randn(rows, size), place.randn(rows, size), place.randn(size)
    return Work(
        lambda: add_rms_norm(x, residual, weight, 1e-6),
        lambda c: reference.add_rms_norm(c(x), c(residual), c(weight), 1e-6),
        moved=4 * bytes_of(x) + bytes_of(weight),
        peers=_torch(lambda: reference.add_rms_norm(x, residual, weight, 1e-6)),
    )


def gate(place: Place, rows: int, size: int) -> Work:
    from reference_impl.kernels.gates import silu_and_mul

    x = place.randn(*place.pick((rows, 2 * size), (5, 144)))
    peers = _torch(lambda: reference.silu_and_mul(x))
    return Work(lambda: silu_and_mul(x), lambda c: reference.silu_and_mul(c(x)), 1.5 * bytes_of(x), peers=peers)


def gate_to_fp8(place: Place, rows: int, size: int) -> Work:
    """The result of both is compared decoded: codes times scale."""
    from reference_impl.kernels.gates_fp8 import silu_and_mul_fp8

    rows, size = place.pick((rows, size), (5, 72))
    x = place.randn(rows, 2 * size)

    def decoded(found: tuple[Tensor, Tensor]) -> Tensor:
        return found[0].float() * found[1][:, None]

    def expected(c: Cast) -> Tensor:
        return reference.silu_and_mul(c(x)) if c is double else decoded(reference.silu_and_mul_fp8(x))

    moved, peers = bytes_of(x) + rows * size + 4 * rows, _torch(lambda: reference.silu_and_mul_fp8(x))
    return Work(lambda: silu_and_mul_fp8(x), expected, moved, part=decoded, peers=peers)


def rotary(place: Place, tokens: int) -> Work:
    """rotate_and_write with QK-norm, as in Qwen3; the check compares q and the contents of the cache."""
    from reference_impl.kernels.rotate_and_write import rotate_and_write

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

    def by(kernel: Callable[..., Tensor], own: Tensor, c: Cast = as_is) -> tuple[Tensor, Tensor]:
        read = (c(q), c(k), c(v), positions, c(cos), c(sin))
        return kernel(*read, own[0], own[1], slots, c(q_norm), c(k_norm), 1e-6), own

    def separate() -> tuple[Tensor, Tensor]:
        """As the decoder does it in torch."""
        c, s = cos[positions], sin[positions]
        rotated_q = reference.rotate(reference.rms_norm(q, q_norm, 1e-6), c, s)
        other[0].flatten(0, 1).index_copy_(0, slots, reference.rotate(reference.rms_norm(k, k_norm, 1e-6), c, s))
        other[1].flatten(0, 1).index_copy_(0, slots, v)
        return rotated_q, other

    return Work(
        lambda: by(rotate_and_write, cache), lambda c: by(reference.rotate_and_write, torch.zeros_like(c(cache)), c),
        moved=2 * bytes_of(q, k, v) + bytes_of(cos, sin), peers=_torch(separate),
    )  # fmt: skip


def sampling(place: Place, rows: int, vocab_size: int, top_k: int = 0, top_p: float = 1.0) -> Work:
    """Every row drawn at temperature 0.8. The reference kernel sorts; the kernel chooses exactly its tokens."""
    from reference_impl.kernels.sample_tokens import sample_tokens

    rows, vocab_size = place.pick((rows, vocab_size), (3, 300))
    logits, number = place.randn(rows, vocab_size, scale=3.0), torch.arange(rows, device=place.device)
    ones, zeros = torch.ones(rows, device=place.device), torch.zeros_like(number)
    given = 0.8 * ones, zeros + top_k, top_p * ones, 0 * ones, number * 7919, zeros, number + 100
    expected = lambda: reference.sample_tokens(logits, *given)  # noqa: E731
    return Work(
        lambda: sample_tokens(logits, *given), lambda c: expected(), bytes_of(logits), cold=True,
        peers={"torch, with a sort": Peer(lambda: expected)},
    )  # fmt: skip


def _linear(
    name: str, make: Callable[..., Work], m: int, goal: float | None = None, k: int = 4096, n: int = 14336
) -> Case:
    """goal: times as fast as cuBLAS."""
    aim = None if goal is None else Goal(goal, "x cuBLAS")
    return Case(f"{name}, m {m}", lambda p: make(p, *p.pick((m, k, n), (min(m, 9), 128, 48))), aim)


BY_TRAFFIC = Goal(90, "% of limit")
CASES = [
    Case("decode, B 64, context 4k", lambda p: decode(p, 64, 4096), Goal(85, "% of limit")),
    Case("decode, B 1, context 32k", lambda p: decode(p, 1, 32768), Goal(60, "% of limit")),
    Case("prefill 8k, causal", lambda p: prefill(p, 8192), Goal(460, "TFLOP/s")),
    Case("add_rms_norm [16384, 4096]", lambda p: norm(p, 16384, 4096), BY_TRAFFIC),
    Case("silu_and_mul [8192, 2 x 14336]", lambda p: gate(p, 8192, 14336), BY_TRAFFIC),
    Case("rotate_and_write, 16384 tokens", lambda p: rotary(p, 16384), BY_TRAFFIC),
    _linear("w4a16", four_bits, 1, 3.0),
    _linear("w4a16", four_bits, 16, 3.0),
    _linear("fp8", fp8, 16, 1.7),
    _linear("fp8", fp8, 64, 1.7),
    Case("8 experts, 8k tokens", lambda p: experts(p, 8192, 8, 4096, 14336), Goal(550, "TFLOP/s")),
    Case("silu_and_mul to fp8 [8192, 2 x 14336]", lambda p: gate_to_fp8(p, 8192, 14336)),
    Case("decode, B 64, context 4k, fp8 cache", lambda p: decode(p, 64, 4096, FP8)),
    Case("decode, B 64, context 4k, int8 cache", lambda p: decode(p, 64, 4096, INT8)),
    Case("decode, B 64, context 4k, int4 cache", lambda p: decode(p, 64, 4096, UINT8)),
    Case("sampling, 64 x 128k, top-k 50, top-p 0.9", lambda p: sampling(p, 64, 128256, 50, 0.9)),
    Case("sampling, 64 x 128k, plain", lambda p: sampling(p, 64, 128256)),
    Case("prefill 16k, causal", lambda p: prefill(p, 16384), Goal(460, "TFLOP/s")),
    Case("prefill 1k, causal", lambda p: prefill(p, 1024)),
    Case("prefill 16k, window 4096", lambda p: prefill(p, 16384, window=p.pick(4096, 20))),
    _linear("w8a16", eight_bits, 16),
    _linear("w8a8 int8", int8_both, 16),
    _linear("fp8 by block", fp8_blocks, 16),
    _linear("nvfp4 emulated", fp4, 16),
    _linear("gemm", dense, 16),
    _linear("norm, gate and up, gate", between_norms, 1),
    _linear("norm, gate and up, gate", between_norms, 64),
    _linear("w4a16 and residual", before_residual, 1, k=14336, n=4096),
    _linear("gemm", dense, 8192),
    _linear("fp8", fp8, 8192),
    Case("128 experts, 1k tokens", lambda p: experts(p, 1024, 128, 2048, 768)),
    Case("LoRA, 64 tokens, 8 adapters, rank 16", lambda p: adapters(p, 64, 8, 16, 4096)),
]
