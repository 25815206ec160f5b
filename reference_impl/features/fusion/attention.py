"""Attention over the paged cache with our Triton kernels: one launch for decoding rows, one for all others."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from reference_impl.interfaces import Batch, KVCache, scales_of
from reference_impl.kernels.flash_attention import flash_attention
from reference_impl.kernels.paged_decode import paged_decode


@dataclass
class Plan:
    """How a step's rows are split between the two kernels. Rows [0, num_decode) have one query each; so the queries of
    the others begin at num_decode, too."""

    num_decode: int
    longest: int  # context of a decoding row, known to the host
    query_start_loc: Tensor  # [num_rows - num_decode + 1] int32, of the others, counted from the first of them


def planned(batch: Batch) -> Plan:
    n = batch.num_decode_rows
    starts = batch.query_start_loc[n:]
    if n < batch.num_rows:  # else it is not used, and would be a launch
        starts = starts - n
    return Plan(n, max(batch.context_lens[:n], default=0), starts)


class TritonAttention:
    """Attention by two kernels. A decoding row reads its whole context for one query, so it gets the kernel that splits
    the context over the GPU; a row of several queries, which share what is read, gets the one that owns a tile of them.

    softcap: scores s become softcap x tanh(s / softcap) before the softmax.
    """

    name = "triton"

    reads_scales = reads_four_bits = True  # of a cache of 8 bits, and of 4
    takes_bounds = True  # of lengths
    takes_trees = True

    def __init__(self, scale: float, softcap: float | None = None):
        self.scale, self.softcap = scale, softcap
        self.ran: set[str] = set()  # which kernels, in this step

    def plan(self, batch: Batch) -> None:
        self.ran, batch.attention_plan = set(), planned(batch)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer: int, kv_cache: KVCache, batch: Batch) -> Tensor:
        kv_cache.write(layer, k, v, batch)
        return self.attend(q, layer, kv_cache, batch)

    def attend(self, q: Tensor, layer: int, kv_cache: KVCache, batch: Batch) -> Tensor:
        """Attention of q [num_tokens, num_heads, head_dim], whose keys and values are in the cache; returns like q."""
        keys, values = kv_cache.layer(layer)
        key_scale, value_scale = scales_of(kv_cache, layer)
        group, plan = batch.groups[batch.group_of_layer[layer]], batch.attention_plan
        n, found = plan.num_decode, []
        if n:
            self.ran.add("paged_decode")
            found.append(
                paged_decode(
                    q[:n], keys, values, group.block_table[:n], batch.seq_lens[:n], plan.longest, self.scale,
                    window=group.window, softcap=self.softcap, key_scale=key_scale, value_scale=value_scale,
                )
            )  # fmt: skip
        if n < batch.num_rows:
            self.ran.add("flash_attention")
            found.append(
                flash_attention(
                    q[n:], keys, values, group.block_table[n:], plan.query_start_loc, batch.seq_lens[n:], self.scale,
                    window=group.window, softcap=self.softcap, key_scale=key_scale, value_scale=value_scale,
                    ancestors=None if batch.ancestors is None else batch.ancestors[n:],
                )
            )  # fmt: skip
        return found[0] if len(found) == 1 else torch.cat(found)
