"""Attention over a cache whose blocks lie in random order, and torch's own over keys side by side: 32 heads and 8 KV
heads of 128, as in Llama 3 8B."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from reference_impl.bench.kernels import BLOCK_SIZE, UINT8, Cast, Peer, Place, Work, kernel
from reference_impl.kernels import reference


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
        lambda: ours(q, keys, values, table, starts, lens, scale, **options), expected, (q, k, v),
        flops=4.0 * heads * head_dim * seen, part=lambda out: torch.cat((out[:n], out[-n:])),
        peers={} if window else _attention_peers(q[None], k, v, scale, causal=True),
    )  # fmt: skip


def decode(place: Place, rows: int, context: int, cache: torch.dtype | None = None) -> Work:
    """Work of one query per row. cache: of 8 bits, with a scale per slot and head; uint8: of 4 bits. The check takes
    three rows."""
    rows, context, heads, kv_heads, head_dim = place.pick((rows, context, 32, 8, 128), (min(rows, 3), 40, 4, 2, 16))
    scales, ours = dict[str, Any](), kernel("paged_decode")
    q, (k, v), (keys, values, table, lens) = _cache(place, rows, context, heads, kv_heads, head_dim)
    scale, some = head_dim**-0.5, torch.tensor(sorted({0, rows // 2, rows - 1}), device=place.device)
    peers = _attention_peers(q[:, None], k, v, scale, causal=False)
    if cache is not None:
        wide = (keys, values)  # torch's own attention reads no codes
        peers = {"SDPA flash": peers["SDPA flash"]}
        peers["ours, 16-bit cache"] = Peer(lambda: lambda: ours(q, *wide, table, lens, context, scale))
        (keys, scales["key_scale"]), (values, scales["value_scale"]) = (
            reference.to_four_bits(t) if cache is UINT8 else reference.to_eight_bits(t, cache) for t in wide
        )
    return Work(
        lambda: ours(q, keys, values, table, lens, context, scale, **scales),
        lambda cast: reference.paged_decode(
            cast(q[some]), cast(keys), cast(values), table[some], lens[some], context, scale, **scales
        ),
        (q, keys, values, *scales.values()), flops=4.0 * rows * context * heads * head_dim,
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
    """Peers from torch: q [rows, queries, heads, head_dim], k and v [rows, context, kv_heads, head_dim] -> [rows x
    queries, ...]."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    group = q.shape[2] // k.shape[2]

    def sdpa(backend: SDPBackend) -> Peer:
        def prepare() -> Callable[[], Tensor]:
            query, key, value = (t.transpose(1, 2) for t in (q, k, v))

            def run() -> Tensor:
                with sdpa_kernel(backend):
                    out = F.scaled_dot_product_attention(
                        query, key, value, is_causal=causal, scale=scale, enable_gqa=group > 1
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

    return {
        "SDPA flash": sdpa(SDPBackend.FLASH_ATTENTION),
        "SDPA cuDNN": sdpa(SDPBackend.CUDNN_ATTENTION),
        "varlen": Peer(varlen),
    }
