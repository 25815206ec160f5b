"""Attention for the kernel bench: rows of a Llama over a cache whose blocks lie in random order, and torch's own."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from reference_impl.bench.kernel_work import Cast, Peer, Place, Work
from reference_impl.kernels import reference

BLOCK_SIZE = 16


def prefill(place: Place, length: int, heads: int = 32, kv_heads: int = 8, head_dim: int = 128, **options: Any) -> Work:
    """One prompt, causal. The check takes its first and its last queries."""
    from reference_impl.kernels.flash_attention import flash_attention

    length, heads, kv_heads, head_dim = place.pick((length, heads, kv_heads, head_dim), (70, 4, 2, 16))
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
        ours=lambda: flash_attention(q, keys, values, table, starts, lens, scale, **options),
        expected=expected,
        part=lambda out: torch.cat((out[:n], out[-n:])),
        moved=2.0 * q.element_size() * (q.numel() + k.numel()),
        flops=4.0 * heads * head_dim * seen,
        peers={} if window else _peers(q[None], k, v, scale, causal=True),
    )


def decode(
    place: Place, rows: int, context: int, heads: int = 32, kv_heads: int = 8, head_dim: int = 128,
    cache: torch.dtype | None = None,
) -> Work:  # fmt: skip
    """One query per row. cache: of 8 bits, with a scale per slot and head; uint8: of 4 bits. The check takes three of
    the rows."""
    from reference_impl.kernels.paged_decode import paged_decode

    rows, context, heads, kv_heads, head_dim = place.pick(
        (rows, context, heads, kv_heads, head_dim), (min(rows, 3), 40, 4, 2, 16)
    )
    scales: dict[str, Any] = {}
    q, (k, v), (keys, values, table, lens) = _cache(place, rows, context, heads, kv_heads, head_dim)
    scale, some = head_dim**-0.5, torch.tensor(sorted({0, rows // 2, rows - 1}), device=place.device)
    peers = _peers(q[:, None], k, v, scale, causal=False)
    if cache is not None:
        wide = (keys, values)  # torch's own attention reads no codes
        peers = {"SDPA flash": peers["SDPA flash"]}
        peers["ours, 16-bit cache"] = Peer(lambda: lambda: paged_decode(q, *wide, table, lens, context, scale))
        (keys, scales["key_scale"]), (values, scales["value_scale"]) = (
            reference.to_four_bits(t) if cache is torch.uint8 else reference.to_eight_bits(t, cache)
            for t in (keys, values)
        )

    def expected(cast: Cast) -> Tensor:
        return reference.paged_decode(
            cast(q[some]), cast(keys), cast(values), table[some], lens[some], context, scale, **scales
        )

    return Work(
        ours=lambda: paged_decode(q, keys, values, table, lens, context, scale, **scales),
        expected=expected,
        part=lambda out: out[some],
        moved=float(2 * rows * context * kv_heads * (keys.shape[-1] * keys.element_size() + 4 * (cache is not None)))
        + 2 * q.numel() * q.element_size(),
        flops=4.0 * rows * context * heads * head_dim,
        cold=True,
        peers=peers,
    )


def _cache(place: Place, rows: int, context: int, heads: int, kv_heads: int, head_dim: int) -> Any:
    """(q of one query per row, (k, v) of each row side by side, (keys, values, block_table, seq_lens) in blocks)."""
    blocks = -(-context // BLOCK_SIZE)
    table = torch.randperm(rows * blocks, device=place.device).int().view(rows, blocks)
    paged = [place.randn(rows * blocks, BLOCK_SIZE, kv_heads, head_dim) for _ in range(2)]
    flat = [t[table.long()].flatten(1, 2)[:, :context].contiguous() for t in paged]
    lens = torch.full((rows,), context, dtype=torch.int32, device=place.device)
    return place.randn(rows, heads, head_dim), flat, (*paged, table, lens)


def _peers(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> dict[str, Peer]:
    """q [rows, queries, heads, head_dim], k and v [rows, context, kv_heads, head_dim] -> [rows x queries, ...]."""
    from torch.nn.attention import SDPBackend

    gqa = q.shape[2] != k.shape[2]

    def sdpa(backend: SDPBackend, repeated: bool) -> Callable[[], Callable[[], Tensor]]:
        def prepare() -> Callable[[], Tensor]:
            from torch.nn.attention import sdpa_kernel

            group = q.shape[2] // k.shape[2] if repeated else 1  # a backend without groups gets copies of the heads
            query, key, value = (t.transpose(1, 2) for t in (q, *(t.repeat_interleave(group, 2) for t in (k, v))))

            def run() -> Tensor:
                with sdpa_kernel(backend):
                    out = F.scaled_dot_product_attention(
                        query, key, value, is_causal=causal, scale=scale, enable_gqa=gqa and not repeated
                    )
                return out.transpose(1, 2).flatten(0, 1)

            return run

        return prepare

    return {
        "SDPA flash": Peer(sdpa(SDPBackend.FLASH_ATTENTION, False)),
        "SDPA cuDNN": Peer(sdpa(SDPBackend.CUDNN_ATTENTION, False)),
        "SDPA efficient": Peer(sdpa(SDPBackend.EFFICIENT_ATTENTION, True)),
        "varlen": Peer(lambda: _varlen(q, k, v, scale, causal)),
        "FlexAttention": Peer(lambda: _flex(q, k, v, scale, causal), compiles=True),
    }


def _varlen(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Callable[[], Tensor]:
    """torch.nn.attention.varlen: its arguments changed from torch 2.10 to 2.13."""
    from torch.nn.attention.varlen import varlen_attn

    known, options = inspect.signature(varlen_attn).parameters, dict[str, Any]()
    if causal:
        options |= {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    key, value = k, v
    if "enable_gqa" in known:
        options["enable_gqa"] = True
    else:
        key, value = (t.repeat_interleave(q.shape[2] // t.shape[2], 2) for t in (k, v))
    if "scale" in known:
        options["scale"] = scale
    starts: list[Any] = [torch.arange(len(t) + 1, dtype=torch.int32, device=q.device) * t.shape[1] for t in (q, k)]
    given: list[Any] = [*(t.flatten(0, 1) for t in (q, key, value)), *starts, q.shape[1], k.shape[1]]
    run: Callable[..., Any] = varlen_attn
    return lambda: run(*given, **options)


def _flex(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Callable[[], Tensor]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = None
    if causal:
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, q.shape[1], k.shape[1], device=str(q.device))
    query, key, value = (t.transpose(1, 2) for t in (q, k, v))
    compiled = torch.compile(flex_attention, dynamic=False)
    run = lambda: compiled(query, key, value, block_mask=mask, scale=scale, enable_gqa=True)  # noqa: E731
    return lambda: run().transpose(1, 2).flatten(0, 1)
