"""Attention from one request at a time, or from block tables.

Both ask the engine's own backend first, which also stores the new keys and values, and hand its answer over beside the
question. Tensors that a lab's function is given are copies: writing into them changes nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from reference_impl.interfaces import AttentionBackend, Batch, KVCache


@dataclass(frozen=True)
class RequestQueries:
    """What one request asks of attention in one layer of one step."""

    request_id: str
    layer: int
    q: Tensor  # [n, num_heads, head_dim], of its new tokens
    k: Tensor  # [n, num_kv_heads, head_dim]
    v: Tensor
    keys: Tensor  # [num_tokens, num_kv_heads, head_dim], of all its tokens in order, the new ones included
    values: Tensor
    longest: int  # num_tokens of the longest request in this step
    expected: Tensor  # like q: what the engine's own backend answers

    @property
    def num_tokens(self) -> int:
        return len(self.keys)

    @property
    def num_before(self) -> int:
        """The number of its tokens before the new ones; each new one may see the tokens up to itself."""
        return len(self.keys) - len(self.q)


class AttentionByRequest:
    """An AttentionBackend that asks a lab's function, request by request. answer: attention of a request's queries,
    like q, which the model goes on with.

    own: an engine's backend. For models whose layers all see the whole context.
    """

    def __init__(self, own: AttentionBackend, answer: Callable[[RequestQueries], Tensor]):
        self.own, self.answer = own, answer

    def plan(self, batch: Batch) -> None:
        self.own.plan(batch)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer: int, kv_cache: KVCache, batch: Batch) -> Tensor:
        expected = self.own.forward(q, k, v, layer, kv_cache, batch)
        keys, values = (cache.flatten(0, 1) for cache in kv_cache.layer(layer))  # by slots
        out, first = torch.empty_like(q), 0
        for row, (request_id, n) in enumerate(zip(batch.request_ids, batch.query_lens, strict=True)):
            new, slots = slice(first, first + n), _slots(batch, row)
            asked = RequestQueries(
                request_id, layer, q[new].clone(), k[new].clone(), v[new].clone(), keys[slots], values[slots],
                max(batch.context_lens), expected[new].clone(),
            )  # fmt: skip
            out[new] = self.answer(asked)
            first += n
        return out


def _slots(batch: Batch, row: int) -> Tensor:
    """The slots of the keys and values of a row's tokens, in order: block id x block_size + offset in the block."""
    position = torch.arange(batch.context_lens[row])
    return batch.block_table[row].long()[position // batch.block_size] * batch.block_size + position % batch.block_size


@dataclass(frozen=True)
class PagedQueries:
    """What a step asks of attention in one layer: a row for each token."""

    layer: int
    q: Tensor  # [tokens, num_heads, head_dim]
    key_cache: Tensor  # [num_blocks, block_size, num_kv_heads, head_dim], of all requests
    value_cache: Tensor
    block_tables: Tensor  # [tokens, max_blocks] int32
    seq_lens: Tensor  # [tokens] int32, how many positions each token sees, itself included
    context_lens: tuple[int, ...]  # of the requests, for messages
    expected: Tensor  # like q: what the engine's own backend answers


class AttentionByTable:
    """An AttentionBackend that asks a lab's function, step by step. answer: attention of a step's queries, like q,
    which the model goes on with.

    check_slots(block_table, positions, block_size, expected): called with each request's block_table [max_blocks] int32
    and the positions [n] int64 of its new tokens, and with the slots [n] int64 to which the engine writes them.
    own: an engine's backend. For models whose layers all see the whole context.
    """

    def __init__(
        self,
        own: AttentionBackend,
        check_slots: Callable[[Tensor, Tensor, int, Tensor], None],
        answer: Callable[[PagedQueries], Tensor],
    ):
        self.own, self.check_slots, self.answer = own, check_slots, answer

    def plan(self, batch: Batch) -> None:
        self.own.plan(batch)
        first = 0
        for row, n in enumerate(batch.query_lens):
            table, positions = batch.block_table[row].clone(), batch.positions[first : first + n].clone()
            self.check_slots(table, positions, batch.block_size, batch.slot_mapping[first : first + n].clone())
            first += n

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer: int, kv_cache: KVCache, batch: Batch) -> Tensor:
        expected = self.own.forward(q, k, v, layer, kv_cache, batch)
        keys, values = kv_cache.layer(layer)
        tables = batch.block_table.repeat_interleave(torch.tensor(batch.query_lens), dim=0)
        seq_lens = (batch.positions + 1).int()
        return self.answer(
            PagedQueries(layer, q.clone(), keys.clone(), values.clone(), tables, seq_lens, batch.context_lens, expected)
        )
