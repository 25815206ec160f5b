"""Blocks of the paged cache: what one holds, and what must be moved between them before a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

BlockId = int
NO_BLOCK: BlockId = -1  # in a block table: these positions have fallen out of the window and are never read again


@dataclass(frozen=True)
class KVSpec:
    """What one KV group's cache must hold for one token, and in what unit it is handed out.

    A group is a set of layers that keep the same positions. All groups of a model have as many layers, so that
    a block of one pool can serve any of them.
    """

    num_layers: int  # in this group
    num_kv_heads: int
    head_dim: int
    block_size: int  # tokens in a block
    bytes_per_value: int
    layers: tuple[int, ...] = ()  # which layers of the model; () is the first num_layers
    window: int | None = None  # a query at position p sees p - window + 1 ... p; None: everything before it
    bytes_per_scale: int = 0  # beside each head's values, in a cache of 8 bits

    @property
    def bytes_per_token(self) -> int:
        """2 (keys and values) x layers x KV heads x (head_dim x bytes per value + bytes per scale)."""
        return 2 * self.num_layers * self.num_kv_heads * (self.head_dim * self.bytes_per_value + self.bytes_per_scale)

    @property
    def bytes_per_block(self) -> int:
        return self.bytes_per_token * self.block_size


class BlockPair(NamedTuple):
    """Contents of block src go to block dst."""

    src: BlockId
    dst: BlockId


class Page(NamedTuple):
    """The keys and values of a full block, and the name a store has for them: see `page_keys` in kv/stored.py."""

    key: bytes
    block: BlockId


class PageTransfer(NamedTuple):
    """Pages on their way between the device and a page store. It begins with a step and ends when it ends: with the
    reply to that step or a later one. Until then nothing else may use its blocks."""

    id: int
    pages: tuple[Page, ...]


class TransferEnd(NamedTuple):
    """error: why the pages did not arrive; None if they did."""

    id: int
    error: str | None = None


@dataclass(frozen=True)
class Transfers:
    """What must be moved before a step writes anything, in this order: out to the host, within the device, in again.

    Loads and saves only begin before the step writes; `Reply.transfers` says when they ended.
    """

    swap_out: tuple[BlockPair, ...] = ()  # device -> host
    copies: tuple[BlockPair, ...] = ()  # device -> device (copy-on-write)
    swap_in: tuple[BlockPair, ...] = ()  # host -> device
    evicted: tuple[BlockId, ...] = ()  # nothing to move: blocks of the prefix cache that were given to other requests
    loads: tuple[PageTransfer, ...] = ()  # store -> device
    saves: tuple[PageTransfer, ...] = ()  # device -> store
    cancelled: tuple[int, ...] = ()  # transfers that are no longer wanted; each of them ends, too

    @property
    def is_work(self) -> bool:
        """Whether a step without rows has something to do for them."""
        return bool(self.swap_out or self.copies or self.swap_in or self.loads or self.saves or self.cancelled)
