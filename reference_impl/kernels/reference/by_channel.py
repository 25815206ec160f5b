"""The twins of the kernels for a cache by channel (KIVI, Liu et al. 2024): keys in 4 bits by channel over a full block,
values in 4 bits by token, and what lies in a block that is not full as it is, beside the pool.

A query at position p reads positions of its own block as they are, and those of earlier blocks rounded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from reference_impl.kernels.reference.attention import context_slots, masked_attention
from reference_impl.kernels.reference.four_bits import (
    channels_from_four_bits,
    channels_to_four_bits,
    from_four_bits,
    to_four_bits,
)


class ByChannel(NamedTuple):
    """One layer of such a cache.

    keys, values [num_blocks, block_size, num_kv_heads, head_dim / 2] uint8, two codes in a byte; key_scale [num_blocks,
    num_kv_heads, head_dim, 2] and value_scale [num_blocks, block_size, num_kv_heads, 2] float16: (scale, lowest).
    open_keys, open_values [seats x open_blocks x block_size, num_kv_heads, head_dim], of the model's dtype: position p
    of the request at a seat is at seat x ring + p % ring, where ring = open_blocks x block_size.
    """

    keys: Tensor
    values: Tensor
    key_scale: Tensor
    value_scale: Tensor
    open_keys: Tensor
    open_values: Tensor
    open_blocks: int


def write_by_channel(
    k: Tensor,
    v: Tensor,
    cache: ByChannel,
    seats: Tensor,
    slot_mapping: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    *,
    rounds: bool = True,
    keeps: bool = True,
) -> None:
    """Rows as of `flash_attention`; k, v [num_tokens, num_kv_heads, head_dim], slot_mapping [num_tokens]: of the new
    tokens; seats [num_rows]: where each row's open blocks lie. k and v have to be finite where a block is full.

    rounds: writes the blocks that the step fills, from the new tokens and those that were open. keeps: puts a row's new
    tokens of its last open_blocks blocks among the open ones. Attention of rows that go on beyond these comes between
    the two: it reads what was open before. A row with seq_len 0 only pads the batch: nothing is written.
    """
    size = cache.keys.shape[1]
    ring = cache.open_blocks * size
    for row, end in enumerate(seq_lens.tolist()):
        first, last = query_start_loc[row : row + 2].tolist()
        start, seat = end - (last - first), int(seats[row])
        if start < 0:
            continue
        if rounds:
            keys, values = _exact(k[first:last], v[first:last], cache, seat, start)
            for number in range(end // size - start // size):
                part = slice(number * size, (number + 1) * size)
                block = int(slot_mapping[first + (start // size + number + 1) * size - 1 - start]) // size
                cache.keys[block], cache.key_scale[block] = channels_to_four_bits(keys[part])
                cache.values[block], cache.value_scale[block] = to_four_bits(values[part])
        if keeps:
            oldest = max(start, ((end - 1) // size - cache.open_blocks + 1) * size)
            at = seat * ring + torch.arange(oldest, end, device=k.device) % ring
            cache.open_keys[at] = k[first + oldest - start : last]
            cache.open_values[at] = v[first + oldest - start : last]


def flash_by_channel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: ByChannel,
    seats: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    ancestors: Tensor | None = None,
) -> Tensor:
    """As `flash_attention`, of rows whose new tokens are k and v, and whose full blocks are written
    (`write_by_channel`, rounds).

    ancestors: as there; of a row that is a tree the first token is known, the others are guesses. A guess reads blocks
    that its path fills as rounding them would give them: what the cache has there is of places, no positions.
    """
    out, size = torch.zeros_like(q), cache.keys.shape[1]
    for row, end in enumerate(seq_lens.tolist()):
        first, last = query_start_loc[row : row + 2].tolist()
        start = end - (last - first)
        if start < 0:
            continue
        exact = _exact(k[first:last], v[first:last], cache, int(seats[row]), start)
        order = torch.arange(last - first, device=q.device)
        tree = None if ancestors is None or not ancestors[first] else ancestors[first:last]
        sees_new = order <= order[:, None] if tree is None else ((tree[:, None] >> order) & 1).bool()
        query_pos = start + sees_new.sum(1) - 1
        rounded = (end - 1 if tree is None else start + 1) // size * size  # up to here the cache says what is so
        oldest = 0 if window is None else max(0, start - window + 1)
        far = torch.arange(oldest, max(oldest, rounded), device=q.device)
        slots = context_slots(block_table[row], end, size)[far]
        at = slots // size, slots % size
        keys = [channels_from_four_bits(cache.keys[at], cache.key_scale[at[0]], q.dtype), exact[0]]
        values = [from_four_bits(cache.values[at], cache.value_scale[at], q.dtype), exact[1]]
        near = torch.cat((torch.arange(start - start % size, start, device=q.device), query_pos))
        key_pos = [far, near]
        sees_near = torch.cat((sees_new.new_ones(last - first, start % size), sees_new), 1)
        own = query_pos[:, None] // size
        sees = [far // size < own, sees_near & (near // size == own)]
        for guess in range(1, last - first) if tree is not None else ():
            if (query_pos[guess] + 1) % size == 0:  # its path has filled a block
                path = sees_near[guess].nonzero()[-size:, 0]
                keys.append(_rounded(exact[0][path], channels_to_four_bits, channels_from_four_bits))
                values.append(_rounded(exact[1][path], to_four_bits, from_four_bits))
                key_pos.append(near[path])
                sees.append((sees_new[:, guess] & (order != guess))[:, None].expand(-1, size))
        mask = torch.cat(sees, 1)
        if window is not None:
            mask = mask & (torch.cat(key_pos) > query_pos[:, None] - window)
        query, key, value = (torch.cat(each).transpose(0, 1)[None] for each in ([q[first:last]], keys, values))
        out[first:last] = masked_attention(query, key, value, mask, scale, softcap)[0].transpose(0, 1)
    return out


def decode_by_channel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: ByChannel,
    seats: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """One query per row; the rest as in `flash_by_channel`. max_seq_len: a bound of seq_lens on the host."""
    starts = torch.arange(len(q) + 1, dtype=torch.int32, device=q.device)
    return flash_by_channel(q, k, v, cache, seats, block_table, starts, seq_lens, scale, window=window, softcap=softcap)


def _exact(k: Tensor, v: Tensor, cache: ByChannel, seat: int, start: int) -> tuple[Tensor, Tensor]:
    """(keys, values) of a row from the block in which its new tokens, k and v, begin."""
    size = cache.keys.shape[1]
    ring = cache.open_blocks * size
    old = seat * ring + torch.arange(start - start % size, start, device=k.device) % ring
    return torch.cat((cache.open_keys[old], k)), torch.cat((cache.open_values[old], v))


def _rounded(
    x: Tensor,
    to_codes: Callable[[Tensor], tuple[Tensor, Tensor]],
    from_codes: Callable[[Tensor, Tensor, torch.dtype], Tensor],
) -> Tensor:
    return from_codes(*to_codes(x), x.dtype)
