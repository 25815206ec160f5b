"""Attention over a `ByChannelKVCache` with our Triton kernels: what is full is rounded, then queries read, then what
stays open is kept.

Where all rows decode, rounding and keeping are one launch, before attention: of a row's open block only the place of
its own token is written, which no query reads from there. Rows that pad a batch write nothing, so a step may be a CUDA
graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from reference_impl.annexes.fusion.attention import Plan, planned
from reference_impl.interfaces import Batch, KVCache
from reference_impl.kernels.decode_by_channel import decode_by_channel
from reference_impl.kernels.flash_by_channel import flash_by_channel
from reference_impl.kernels.write_by_channel import write_by_channel

if TYPE_CHECKING:
    from reference_impl.annexes.kv_formats.by_channel import ByChannelKVCache


class TritonOpenBlockAttention:
    """As `TritonAttention`, for keys by channel. softcap: as there."""

    name = "triton"
    reads_open_blocks = True
    takes_bounds = True  # of lengths
    takes_trees = True
    skips_padding = True  # rows of length 0 are not written

    def __init__(self, scale: float, softcap: float | None = None):
        self.scale, self.softcap = scale, softcap
        self.ran: set[str] = set()  # which kernels, in this step

    def plan(self, batch: Batch) -> None:
        self.ran, batch.attention_plan = set(), planned(batch)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer: int, kv_cache: KVCache, batch: Batch) -> Tensor:
        cache = cast("ByChannelKVCache", kv_cache)
        stored, seats = cache.by_channel(layer), cache.seats(batch)
        group, plan = batch.groups[batch.group_of_layer[layer]], cast("Plan", batch.attention_plan)
        n, found = plan.num_decode, list[Tensor]()
        written = (k, v, stored, seats, group.slot_mapping, batch.query_start_loc, batch.seq_lens)
        all_decode = n == batch.num_rows
        write_by_channel(*written, keeps=all_decode)
        if n:
            self.ran.add("decode_by_channel")
            found.append(
                decode_by_channel(
                    q[:n], k[:n], v[:n], stored, seats[:n], group.block_table[:n], batch.seq_lens[:n], plan.longest,
                    self.scale, window=group.window, softcap=self.softcap,
                )
            )  # fmt: skip
        if not all_decode:
            self.ran.add("flash_by_channel")
            found.append(
                flash_by_channel(
                    q[n:], k[n:], v[n:], stored, seats[n:], group.block_table[n:], plan.query_start_loc,
                    batch.seq_lens[n:], self.scale, window=group.window, softcap=self.softcap,
                    ancestors=None if batch.ancestors is None else batch.ancestors[n:],
                )
            )  # fmt: skip
            write_by_channel(*written, rounds=False)
        return found[0] if len(found) == 1 else torch.cat(found)
