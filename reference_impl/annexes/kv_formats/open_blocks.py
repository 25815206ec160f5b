"""Where tokens lie while their block is open: in 16 bits (or what the model has), beside the pool of rounded blocks.

A query at position p reads positions of its own block as they are, and those of earlier blocks rounded. That depends on
positions alone, not on when a block was rounded, so a prompt's chunks, decoding and guesses agree. It takes

    open      of each request that runs its last open_blocks blocks, in a ring: position p at p % (open_blocks x
              block_size). One block is enough without guesses; with k of them as many more as k tokens can begin, so
              that where guesses were wrong the block that they began in is still there. Guesses of a tree lie there
              one behind the other, as if they were a chain
    extended  of each row of a step its new tokens, and before them those of the block that they begin in: from these
              its blocks are rounded when the row fills them, and its queries read their own blocks
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from reference_impl.interfaces import Batch

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Extended:
    """Rows of a step with what lies before them in their first block: [rows] each. start, end: positions of the new
    tokens. first: where the block of `start` begins. token, place: where the row begins among the step's tokens, and
    among the extended ones."""

    start: Ints
    end: Ints
    first: Ints
    token: Ints
    place: Ints


@dataclass
class SeatedBatch(Batch):
    """Whose rows' slots in the worker are on the device alone: a captured graph serves other requests each time."""

    seats: Tensor = field(kw_only=True)  # [rows] int64


def keeps_open_blocks(kv_cache: object) -> bool:
    """Whether it is a cache that follows a worker's slots, as `ByChannelKVCache` does, and says so."""
    return bool(getattr(kv_cache, "keeps_open_blocks", False))


def extended(batch: Batch) -> Extended:
    """Of a batch with exact lengths on the host."""
    new, end = np.array(batch.query_lens), np.array(batch.context_lens)
    start = end - new
    first = start - start % batch.block_size
    return Extended(start, end, first, np.cumsum(new) - new, np.cumsum(end - first) - (end - first))


@dataclass(frozen=True)
class Moves:
    """What writing the tokens of a step does, by index; the same in all layers.

    old: in `open`, what lies before the rows' new tokens. source [extended]: among these and then the new tokens.
    full [blocks, block_size], among the extended: blocks that the step fills; last [blocks]: the last token of each, of
    the step's. kept, kept_at: which of the step's tokens stay open, and where in `open`.
    """

    old: Ints
    source: Ints
    full: Ints
    last: Ints
    kept: Ints
    kept_at: Ints


def moves(rows: Extended, seats: Ints, block_size: int, open_blocks: int) -> Moves:
    """seats [rows]: which room of `open` each row's request has."""
    ring = open_blocks * block_size

    def in_open(row: Ints, position: Ints) -> Ints:
        return np.asarray(seats[row] * ring + position % ring)

    row, position = ranges(rows.first, rows.end)
    is_old = position < rows.start[row]
    new = position - rows.start[row] + rows.token[row] + is_old.sum()
    source = np.where(is_old, np.cumsum(is_old) - 1, new)

    of_full, block = ranges(rows.first // block_size, rows.end // block_size)
    begins = block * block_size
    full = (begins - rows.first[of_full] + rows.place[of_full])[:, None] + np.arange(block_size)
    last = begins + block_size - 1 - rows.start[of_full] + rows.token[of_full]

    oldest = ((rows.end - 1) // block_size - open_blocks + 1) * block_size
    of_kept, at = ranges(np.maximum(rows.start, oldest), rows.end)
    kept = at - rows.start[of_kept] + rows.token[of_kept]
    return Moves(in_open(row, position)[is_old], source, full, last, kept, in_open(of_kept, at))


def ranges(starts: Ints, ends: Ints) -> tuple[Ints, Ints]:
    """(which, number): of each range, one after another, its number in the list and the integers in it."""
    lengths = np.maximum(ends - starts, 0)
    which = np.repeat(np.arange(len(lengths)), lengths)
    return which, np.arange(len(which)) - (np.cumsum(lengths) - lengths)[which] + starts[which]
