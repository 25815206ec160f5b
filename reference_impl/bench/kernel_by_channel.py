"""A cache by channel (kv_dtype="kivi") for the kernel bench: one layer of a Llama, blocks in random order."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from reference_impl.bench.kernel_attention import BLOCK_SIZE
from reference_impl.bench.kernel_work import Cast, Place, Work, bytes_of
from reference_impl.kernels import reference
from reference_impl.kernels.reference.by_channel import ByChannel


def decode(place: Place, rows: int, context: int, heads: int = 32, kv_heads: int = 8, head_dim: int = 128) -> Work:
    """One query per row. The check takes three of the rows."""
    from reference_impl.kernels.decode_by_channel import decode_by_channel

    rows, context, heads, kv_heads, head_dim = place.pick(
        (rows, context, heads, kv_heads, head_dim), (min(rows, 3), 40, 4, 2, 16)
    )
    cache, table, seats = _cache(place, rows, context, kv_heads, head_dim)
    q, k, v = (place.randn(rows, n, head_dim) for n in (heads, kv_heads, kv_heads))
    lens = torch.full((rows,), context, dtype=torch.int32, device=place.device)
    some, scale = torch.tensor(sorted({0, rows // 2, rows - 1}), device=place.device), head_dim**-0.5

    return Work(
        ours=lambda: decode_by_channel(q, k, v, cache, seats, table, lens, context, scale),
        expected=lambda cast: reference.decode_by_channel(
            cast(q[some]), cast(k[some]), cast(v[some]), _cast(cache, cast), seats[some], table[some], lens[some],
            context, scale,
        ),
        part=lambda out: out[some],
        moved=bytes_of(cache.keys, cache.values, cache.key_scale, cache.value_scale) + 2 * bytes_of(q),
        flops=4.0 * rows * context * heads * head_dim,
        cold=True,
    )  # fmt: skip


def prefill(place: Place, length: int, heads: int = 32, kv_heads: int = 8, head_dim: int = 128) -> Work:
    """One prompt, causal; its full blocks are written. The check takes its last queries."""
    from reference_impl.kernels.flash_by_channel import flash_by_channel

    length, heads, kv_heads, head_dim = place.pick((length, heads, kv_heads, head_dim), (5 * BLOCK_SIZE, 4, 2, 16))
    cache, table, seats = _cache(place, 1, length, kv_heads, head_dim)
    q, k, v = (place.randn(length, n, head_dim) for n in (heads, kv_heads, kv_heads))
    last, scale = 2 * BLOCK_SIZE, head_dim**-0.5  # whole blocks: nothing of them is open before
    starts, of_last = (torch.tensor([0, n], dtype=torch.int32, device=place.device) for n in (length, last))
    lens = starts[1:]
    return Work(
        ours=lambda: flash_by_channel(q, k, v, cache, seats, table, starts, lens, scale),
        expected=lambda cast: reference.flash_by_channel(
            cast(q[-last:]), cast(k[-last:]), cast(v[-last:]), _cast(cache, cast), seats, table, of_last, lens, scale
        ),
        part=lambda out: out[-last:],
        moved=2 * bytes_of(q) + bytes_of(cache.keys, cache.values, cache.key_scale, cache.value_scale),
        flops=2.0 * heads * head_dim * length * (length + 1),
    )


def write(place: Place, tokens: int, kv_heads: int = 8, head_dim: int = 128) -> Work:
    """A prompt's keys and values: all of its blocks are rounded. The check takes the codes of the keys."""
    from reference_impl.kernels.write_by_channel import write_by_channel

    tokens, kv_heads, head_dim = place.pick((tokens, kv_heads, head_dim), (4 * BLOCK_SIZE, 2, 16))
    cache, table, seats = _cache(place, 1, tokens, kv_heads, head_dim)
    k, v = (place.randn(tokens, kv_heads, head_dim) for _ in range(2))
    starts = torch.tensor([0, tokens], dtype=torch.int32, device=place.device)
    slots = table[0].long().repeat_interleave(BLOCK_SIZE) * BLOCK_SIZE
    slots += torch.arange(BLOCK_SIZE, device=place.device).repeat(len(table[0]))

    def ours() -> Tensor:
        write_by_channel(k, v, cache, seats, slots, starts, starts[1:])
        return cache.keys

    def expected(cast: Cast) -> Tensor:
        twin = copy.deepcopy(cache)
        reference.write_by_channel(k, v, twin, seats, slots, starts, starts[1:])
        return twin.keys

    written = bytes_of(cache.keys, cache.values, cache.key_scale, cache.value_scale)
    return Work(ours=ours, expected=expected, moved=bytes_of(k, v) + written)


def _cache(place: Place, rows: int, context: int, kv_heads: int, head_dim: int) -> tuple[ByChannel, Tensor, Tensor]:
    """(the cache with random codes, block_table, seats)."""
    blocks = -(-context // BLOCK_SIZE)
    table = torch.randperm(rows * blocks, device=place.device).int().view(rows, blocks)
    shape = (rows * blocks, BLOCK_SIZE, kv_heads, head_dim // 2)
    codes = [torch.randint(256, shape, dtype=torch.uint8, device=place.device) for _ in range(2)]

    def scales(*dims: int, at: int) -> Tensor:
        """Around 0.2, and lowest numbers around -1.5, side by side in dimension `at`."""
        scale, lowest = torch.rand(2, *dims, device=place.device) / 10
        return torch.stack((scale + 0.15, lowest - 1.55), at).half()

    of_keys = scales(rows * blocks, kv_heads, head_dim, at=2).mT
    of_values = scales(rows * blocks, kv_heads, BLOCK_SIZE, at=1).permute(0, 3, 2, 1)
    opened = [place.randn(rows * BLOCK_SIZE, kv_heads, head_dim) for _ in range(2)]
    return (
        ByChannel(codes[0], codes[1], of_keys, of_values, opened[0], opened[1], 1),
        table,
        torch.arange(rows, device=place.device),
    )


def _cast(cache: ByChannel, cast: Cast) -> ByChannel:
    return ByChannel(*map(cast, cache))
