"""Random paged caches for the tests of the attention kernels, and the rule by which an error is judged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# A query and its context: a lone token, a chunk behind a prefix, a whole prompt, lengths around tiles and splits.
RAGGED = [(1, 1328), (5, 18), (129, 463), (1, 1), (40, 40), (64, 64), (65, 129), (2, 512), (16, 513)]
# What `make test` has in the interpreter, where each tile costs about the same: a tile of queries that is full and one
# that is not; keys that end in a tile, at its end, one behind it; a query that sees all keys of a tile but the last.
RAGGED_FEW = [(1, 193), (5, 18), (129, 200), (1, 1), (64, 64), (2, 128)]


@dataclass
class Case:
    """Arguments of flash_attention, in order, and its options."""

    q: Tensor
    keys: Tensor
    values: Tensor
    block_table: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    scale: float
    options: dict[str, Any]

    @property
    def ragged(self) -> tuple[Any, ...]:
        return (self.q, self.keys, self.values, self.block_table, self.query_start_loc, self.seq_lens, self.scale)

    @property
    def decode(self) -> tuple[Any, ...]:
        longest = int(self.seq_lens.max())
        return (self.q, self.keys, self.values, self.block_table, self.seq_lens, longest, self.scale)


def make(
    rows: Sequence[tuple[int, int]],
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    *,
    block_size: int = 16,
    cache: torch.dtype | None = None,
    first_block: int = 0,
    seed: int = 0,
    **options: Any,
) -> Case:
    """rows: (queries, context). Blocks lie in random order; what no row owns is NaN (of a cache of codes: the largest).

    cache: float8_e4m3fn or int8, with random scales per slot and head; uint8: 4 bits, with random scales and lowest
    numbers. first_block: block ids begin there.
    """
    random = torch.Generator().manual_seed(seed)
    needed = [-(-context // block_size) for _, context in rows]
    ids = first_block + torch.randperm(sum(needed) + 3, generator=random)
    table = torch.full((len(rows), max(needed) + 1), first_block, dtype=torch.int32)
    for row, blocks in enumerate(ids[: sum(needed)].split(needed)):
        table[row, : len(blocks)] = blocks
    stored: list[Tensor] = []
    for _ in range(2):
        content = torch.full((first_block + len(ids), block_size, kv_heads, head_dim), torch.nan)
        for row, (_, context) in enumerate(rows):
            blocks = table[row, : needed[row]].long()
            fresh = torch.full((needed[row] * block_size, kv_heads, head_dim), torch.nan)
            fresh[:context] = torch.randn(context, kv_heads, head_dim, generator=random)
            content[blocks] = fresh.view(needed[row], block_size, kv_heads, head_dim)
        stored.append(content)
    if cache is not None:
        names = ("key_scale", "value_scale")
        for number, (name, content) in enumerate(zip(names, stored, strict=True)):
            if cache is torch.uint8:
                stored[number], options[name] = (t.to(DEVICE) for t in packed(content, random))
                continue
            scale = (0.5 + torch.rand(content.shape[:3], generator=random)) / 40
            largest = 127 if cache is torch.int8 else 448
            codes = (content / scale[..., None]).nan_to_num(largest).clamp(-largest, largest)
            stored[number] = (codes.round() if cache is torch.int8 else codes).to(cache)
            options[name] = scale.to(DEVICE)
    starts = torch.tensor([0, *(queries for queries, _ in rows)]).cumsum(0).int()
    lens = torch.tensor([context for _, context in rows]).int()
    q = torch.randn(int(starts[-1]), heads, head_dim, generator=random).to(dtype)
    keys, values = (t.to(dtype) if cache is None else t for t in stored)
    tensors = (t.to(DEVICE) for t in (q, keys, values, table, starts, lens))
    return Case(*tensors, head_dim**-0.5, options)


def packed(content: Tensor, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """(codes, scales) of 4 bits: steps and lowest numbers that differ from head to head, which cut off what is beyond.
    In memory slots come last, as in the engine's cache."""
    scale = 0.15 + torch.rand((*content.shape[:3], 2), generator=random) / 10
    scale[..., 1] = -1.5 - 2 * scale[..., 1]
    scale = scale.half().permute(0, 3, 2, 1).contiguous().permute(0, 3, 2, 1)
    step, lowest = scale.float().split(1, -1)
    codes = ((content - lowest) / step).nan_to_num(15.0).round().clamp(0, 15).to(torch.uint8)
    half = content.shape[-1] // 2
    return codes[..., :half] + 16 * codes[..., half:], scale


def decoded(cache: Tensor, scale: Tensor) -> Tensor:
    """The numbers in float64 that codes of 4 bits stand for."""
    numbers = torch.cat((cache % 16, cache // 16), -1).double()
    return numbers * scale[..., :1].double() + scale[..., 1:].double()


def random_tree(rows: Sequence[tuple[int, int]], seed: int = 0) -> Tensor:
    """ancestors [num_tokens]: every draft continues some earlier one of its row, or the context."""
    random, found = torch.Generator().manual_seed(seed), []
    for queries, _ in rows:
        bits: list[int] = []
        for i in range(queries):
            parent = int(torch.randint(-1, i, (1,), generator=random)) if i else -1
            bits.append((bits[parent] if parent >= 0 else 0) | 1 << i)
        found += [b - (1 << 64) if b >= 1 << 63 else b for b in bits]
    return torch.tensor(found, device=DEVICE)


def check(
    kernel: Callable[..., Tensor],
    twin: Callable[..., Tensor],
    arguments: Sequence[Any],
    *,
    lost: float = 0.0,
    **options: Any,
) -> None:
    """The kernel's error against float64 is at most twice that of plain torch in its precision, and 2 eps max |ref|.

    lost: and what a matrix unit loses besides.
    """
    found, plain = kernel(*arguments, **options), twin(*arguments, **options)
    exact = twin(*map(_double, arguments), **options)
    assert found.shape == plain.shape
    assert found.dtype is plain.dtype
    assert exact.isfinite().all()
    error, allowed = (found.double() - exact).abs().max(), 2 * (plain.double() - exact).abs().max()
    allowed += 2 * torch.finfo(found.dtype).eps * exact.abs().max() + lost
    assert error <= allowed, f"error {error:.3g}, allowed {allowed:.3g}"


def _double(value: Any) -> Any:
    is_float = isinstance(value, Tensor) and value.is_floating_point() and value.element_size() > 1
    return value.double() if is_float else value
