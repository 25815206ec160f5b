"""The table of the kernel bench, at the end; before it what each kernel is given, and what else computes the same.

Attention has 32 heads and 8 KV heads of 128, as in Llama 3 8B, over a cache whose blocks lie in random order; products
have the size of its down projection [4096 x 14336], transposed. The most telling cases come first: when the time is up,
what comes last is left out.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from reference_impl.bench import kernels
from reference_impl.bench.gpu_rows import Goal
from reference_impl.bench.kernels import (
    BLOCK_SIZE,
    FP8,
    INT8,
    UINT8,
    Case,
    Cast,
    Peers,
    Place,
    Run,
    Work,
    kernel,
    twins,
)
from reference_impl.kernels import reference
from reference_impl.kernels.reference.linear import FP4_STEP, GROUP

# Attention.


def prefill(place: Place, length: int, **options: Any) -> Work:
    """Work of one prompt, causal. The check takes its first and its last queries."""
    length, heads, kv_heads, head_dim = place.pick((length, 32, 8, 128), (70, 4, 2, 16))
    _, (k, v), (keys, values, table, lens) = _cache(place, 1, length, heads, kv_heads, head_dim)
    starts = torch.tensor([0, length], dtype=torch.int32, device=place.device)
    scale, n, window = head_dim**-0.5, min(64, length), options.get("window")
    q, ours = place.randn(length, heads, head_dim), kernel("flash_attention")

    def expected(cast: Cast) -> Tensor:
        first = reference.attention_one_row(cast(q[:n]), cast(k[0, :n]), cast(v[0, :n]), scale, window)
        last = reference.attention_one_row(cast(q[-n:]), cast(k[0]), cast(v[0]), scale, window)
        return torch.cat((first, last))

    seen = length * (length + 1) / 2 if window is None else length * window - window * (window - 1) / 2
    return Work(
        partial(ours, q, keys, values, table, starts, lens, scale, **options),
        expected,
        (q, k, v),
        flops=4.0 * heads * head_dim * seen,
        part=lambda out: torch.cat((out[:n], out[-n:])),
        peers={} if window else _attention_peers(q[None], k, v, scale, causal=True),
    )


def decode(place: Place, rows: int, context: int, cache: torch.dtype | None = None) -> Work:
    """Work of one query per row. cache: of 8 bits, with a scale per slot and head; uint8: of 4 bits. The check takes
    three rows."""
    rows, context, heads, kv_heads, head_dim = place.pick((rows, context, 32, 8, 128), (min(rows, 3), 40, 4, 2, 16))
    q, (k, v), (keys, values, table, lens) = _cache(place, rows, context, heads, kv_heads, head_dim)
    scale, some = head_dim**-0.5, torch.tensor(sorted({0, rows // 2, rows - 1}), device=place.device)
    scales, ours, peers = dict[str, Any](), kernel("paged_decode"), _attention_peers(q[:, None], k, v, scale, False)
    if cache is not None:
        plain = partial(ours, q, keys, values, table, lens, context, scale)
        peers = {"SDPA flash": peers["SDPA flash"], "ours, 16-bit cache": lambda: plain}  # torch's own reads no codes
        (keys, scales["key_scale"]), (values, scales["value_scale"]) = (
            reference.to_four_bits(t) if cache is UINT8 else reference.to_eight_bits(t, cache) for t in (keys, values)
        )
    return Work(
        partial(ours, q, keys, values, table, lens, context, scale, **scales),
        lambda cast: reference.paged_decode(
            cast(q[some]), cast(keys), cast(values), table[some], lens[some], context, scale, **scales
        ),
        (q, keys, values, *scales.values()),
        flops=4.0 * rows * context * heads * head_dim,
        part=lambda out: out[some],
        cold=True,
        peers=peers,
    )


def _cache(place: Place, rows: int, context: int, heads: int, kv_heads: int, head_dim: int) -> Any:
    """(q of one query per row, (k, v) of each row side by side, (keys, values, block_table, seq_lens) in blocks)."""
    blocks = -(-context // BLOCK_SIZE)
    table = torch.randperm(rows * blocks, device=place.device).int().view(rows, blocks)
    paged = [place.randn(rows * blocks, BLOCK_SIZE, kv_heads, head_dim) for _ in range(2)]
    side_by_side = [t[table.long()].flatten(1, 2)[:, :context].contiguous() for t in paged]
    lens = torch.full((rows,), context, dtype=torch.int32, device=place.device)
    return place.randn(rows, heads, head_dim), side_by_side, (*paged, table, lens)


def _attention_peers(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Peers:
    """Peers from torch: q [rows, queries, heads, head_dim], k and v [rows, context, kv_heads, head_dim] -> [rows x
    queries, ...]."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def sdpa(backend: SDPBackend) -> Tensor:
        query, key, value = (t.transpose(1, 2) for t in (q, k, v))
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(query, key, value, is_causal=causal, scale=scale, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)

    def varlen() -> Run:
        """torch.nn.attention.varlen: its arguments changed from torch 2.10 to 2.13."""
        from torch.nn.attention.varlen import varlen_attn

        known = inspect.signature(varlen_attn).parameters
        wanted: dict[str, Any] = {"scale": scale, "enable_gqa": True}
        wanted |= {"window_size": (-1, 0), "is_causal": True} if causal else {}
        group = 1 if "enable_gqa" in known else q.shape[2] // k.shape[2]
        starts = [torch.arange(len(t) + 1, dtype=torch.int32, device=q.device) * t.shape[1] for t in (q, k)]
        packed = [t.flatten(0, 1) for t in (q, *(t.repeat_interleave(group, 2) for t in (k, v)))]
        options = {name: value for name, value in wanted.items() if name in known}
        given: list[Any] = [*packed, *starts, q.shape[1], k.shape[1]]
        return partial(varlen_attn, *given, **options)

    return {
        "SDPA flash": lambda: partial(sdpa, SDPBackend.FLASH_ATTENTION),
        "SDPA cuDNN": lambda: partial(sdpa, SDPBackend.CUDNN_ATTENTION),
        "varlen": varlen,
    }


# What is computed per token: norm, gate, rotary embedding with the cache write, sampling.


def _in_torch(run: Run) -> Peers:
    return {"torch": lambda: run, kernels.COMPILES: lambda: torch.compile(run, dynamic=False)}


def norm(place: Place, rows: int, size: int) -> Work:
    rows, size = place.pick((rows, size), (5, 80))
    given = place.randn(rows, size), place.randn(rows, size), place.randn(size), 1e-6
    peers = _in_torch(lambda: reference.add_rms_norm(*given))
    return twins("add_rms_norm", *given, module="rms_norm", peers=peers)


def gate(place: Place, rows: int, size: int) -> Work:
    x = place.randn(*place.pick((rows, 2 * size), (5, 144)))
    return twins("silu_and_mul", x, module="gates", peers=_in_torch(lambda: reference.silu_and_mul(x)))


def gate_to_fp8(place: Place, rows: int, size: int) -> Work:
    """Work of a gate with its result in FP8; both results are compared decoded, codes times scale."""
    x = place.randn(*place.pick((rows, 2 * size), (5, 144)))

    def decoded(found: tuple[Tensor, Tensor]) -> Tensor:
        return found[0].float() * found[1][:, None]

    def expected(cast: Cast) -> Tensor:
        exact = cast is kernels.double
        return reference.silu_and_mul(cast(x)) if exact else decoded(reference.silu_and_mul_fp8(x))

    peers = _in_torch(lambda: reference.silu_and_mul_fp8(x))
    work = twins("silu_and_mul_fp8", x, module="gates_fp8", part=decoded, peers=peers)
    return replace(work, expected=expected)


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

    def by(function: Callable[..., Tensor], own: Tensor, cast: Cast = kernels.as_is) -> tuple[Tensor, Tensor]:
        read = (cast(q), cast(k), cast(v), positions, cast(cos), cast(sin))
        return function(*read, own[0], own[1], slots, cast(q_norm), cast(k_norm), 1e-6), own

    def separate() -> tuple[Tensor, Tensor]:
        """The same in torch, as the decoder does it there."""
        c, s = cos[positions], sin[positions]
        rotated_q = reference.rotate(reference.rms_norm(q, q_norm, 1e-6), c, s)
        other[0].flatten(0, 1).index_copy_(0, slots, reference.rotate(reference.rms_norm(k, k_norm, 1e-6), c, s))
        other[1].flatten(0, 1).index_copy_(0, slots, v)
        return rotated_q, other

    return Work(
        lambda: by(ours, cache),
        lambda cast: by(reference.rotate_and_write, torch.zeros_like(cast(cache)), cast),
        moved=2 * kernels.bytes_of(q, k, v) + kernels.bytes_of(cos, sin),
        peers=_in_torch(separate),
    )


def sampling(place: Place, rows: int, vocab_size: int, top_k: int = 0, top_p: float = 1.0) -> Work:
    """Work of drawing every row at temperature 0.8. The reference kernel sorts; the kernel chooses exactly its
    tokens."""
    rows, vocab_size = place.pick((rows, vocab_size), (3, 300))
    logits, number = place.randn(rows, vocab_size, scale=3.0), torch.arange(rows, device=place.device)
    ones, zeros = torch.ones(rows, device=place.device), torch.zeros_like(number)
    given = logits, 0.8 * ones, zeros + top_k, top_p * ones, 0 * ones, number * 7919, zeros, number + 100
    sorting = partial(reference.sample_tokens, *given)
    peers = {"torch, with a sort": lambda: sorting}
    return Work(partial(kernel("sample_tokens"), *given), lambda _: sorting(), (logits,), cold=True, peers=peers)


# Linear layers of m tokens, k inputs and n outputs; of experts and of adapters.


def _cublas(x: Tensor, weight: Callable[[], Tensor]) -> Peers:
    """The same layer from a weight in 16 bits, which is made before anything is timed."""
    return {"cuBLAS": lambda: partial(F.linear, x, weight())}


def dense(place: Place, m: int, k: int, n: int) -> Work:
    x, w = place.randn(m, k), place.randn(n, k, scale=k**-0.5)
    return twins("gemm", x, w, peers=_cublas(x, lambda: w))


def between_norms(place: Place, m: int, k: int, n: int) -> Work:
    """Norm, the product of gate and up, and the gate, in one launch; `norm, cuBLAS, gate`: in three."""
    norm_rows, gate = kernel("rms_norm"), kernel("silu_and_mul", "gates")
    x, norm, w = place.randn(m, k), 1 + place.randn(k, scale=0.1), place.randn(2 * n, k, scale=k**-0.5)
    peers = {"norm, cuBLAS, gate": lambda: lambda: gate(F.linear(norm_rows(x, norm, 1e-5), w))}
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
    peers = {"cuBLAS, add": lambda: lambda: F.linear(x, weight) + residual}
    return twins("fused_linear_w4a16", x, packed, scales, options={"residual": residual}, peers=peers)


def four_bits(place: Place, m: int, k: int, n: int) -> Work:
    x, codes, packed, scales, weight = _int4(place, m, k, n)

    def tinygemm() -> Run:
        """torch's own kernel, that of gpt-fast; its code 8 is zero, too."""
        stored = torch.ops.aten._convert_weight_to_int4pack(codes[:, ::2] << 4 | codes[:, 1::2], 8)
        both = torch.stack((scales, torch.zeros_like(scales)), -1)
        return lambda: torch.ops.aten._weight_int4pack_mm(x, stored, 128, both)

    peers = {**_cublas(x, lambda: weight), "tinygemm": tinygemm}
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
    peers = {
        **_cublas(x, lambda: (w.float() * w_scale[:, None]).to(place.dtype)),
        "torch._scaled_mm": lambda: partial(torch._scaled_mm, codes, w.t(), **scaled),
    }
    return twins("gemm_fp8", codes, scale, w, w_scale, place.dtype, precision="fp8", peers=peers)


def _behind_rounding(rounding: str, name: str, x: Tensor, *given: Any, **fields: Any) -> Work:
    """Work of a product of codes, with the rounding of the tokens, a launch of its own."""
    rounded, product = kernel(rounding, "quantize_rows"), kernel(name)
    work = twins(name, *getattr(reference, rounding)(x), *given, **fields)
    return replace(work, ours=lambda: product(*rounded(x), *given), given=(x, *given[:2]))


def int8_both(place: Place, m: int, k: int, n: int) -> Work:
    """Work of a product in int8; cuBLAS in 16 bits gets the numbers that codes stand for."""
    x, (w, w_scale) = place.randn(m, k), reference.quantize_rows_int8(place.randn(n, k))
    peers = _cublas(x, lambda: (w.float() * w_scale[:, None]).to(place.dtype))
    return _behind_rounding("quantize_rows_int8", "gemm_w8a8", x, w, w_scale, place.dtype, peers=peers)


def fp8_blocks(place: Place, m: int, k: int, n: int) -> Work:
    """Work of a product in FP8 by blocks; tokens are rounded by groups of 128 inputs."""
    x, w = place.randn(m, k), place.randn(n, k).to(FP8)
    blocks = place.randn(-(-n // GROUP), -(-k // GROUP)).abs().float() + 0.5

    def plain() -> Tensor:
        return (w.float() * blocks.repeat_interleave(GROUP, 0)[:n].repeat_interleave(GROUP, 1)[:, :k]).to(place.dtype)

    fields: dict[str, Any] = {"precision": "fp8", "peers": _cublas(x, plain)}
    return _behind_rounding("quantize_groups_fp8", "gemm_fp8_blocks", x, w, blocks, place.dtype, **fields)


def fp4(place: Place, m: int, k: int, n: int) -> Work:
    """Work of a product with NVFP4 weights, multiplied in 16 bits."""
    x, codes = place.randn(m, k), torch.randint(16, (n, k), dtype=UINT8, device=place.device)
    scales = (place.randn(n, k // 16).abs().float() + 0.5).to(FP8).view(UINT8)
    w = reference.pack_int4(codes, FP4_STEP), scales, torch.full((n,), k**-0.5 / 8, device=place.device)
    return twins(
        "gemm_fp4", x, *w,
        peers=_cublas(x, lambda: reference.gemm_fp4(torch.eye(k, device=place.device), *w).T.to(x.dtype)),
    )  # fmt: skip


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
        "torch._grouped_mm": lambda: partial(torch._grouped_mm, x, w.transpose(1, 2), offs=offsets[1:]),
        "a loop of cuBLAS": lambda: loop,
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

    def expected(cast: Cast) -> Tensor:
        inner = reference.lora_shrink(cast(x), cast(a), index)
        return reference.lora_expand(inner, cast(b), index, torch.zeros_like(cast(out)))

    return Work(
        lambda: expand(shrink(x, a, index), b, index, out.zero_()),
        expected,
        (x, out, a, b),
        flops=4.0 * m * rank * size,
        cold=True,
        peers={"gather and torch.bmm": lambda: lambda: (b[index] @ (a[index] @ x[:, :, None]))[:, :, 0]},
    )


def _linear(
    name: str, make: Callable[..., Work], m: int, goal: float | None = None, k: int = 4096, n: int = 14336
) -> Case:
    """A case of a linear layer, with its FLOP; few tokens meet a cold L2. goal: times as fast as cuBLAS."""

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
