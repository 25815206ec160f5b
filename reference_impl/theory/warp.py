"""What 32 threads in step cost: bank conflicts, sectors of memory, divergence (CUDA C++ Programming Guide).

A warp of 32 threads executes one instruction at a time. A request to shared memory takes as many passes as the busiest
of its 32 banks has different words to give; a request to device memory moves whole sectors of 32 bytes; a branch that
some threads take and others do not is executed once for each side.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

WARP, BANKS, BANK_BYTES, SECTOR_BYTES = 32, 32, 4, 32


def bank_passes(words: Iterable[int]) -> int:
    """Passes of one request to shared memory; words: index of the 4-byte word that each thread reads.

    The same word for many threads is one word: it is broadcast.
    """
    asked = defaultdict(set)
    for word in words:
        asked[word % BANKS].add(word)
    return max((len(different) for different in asked.values()), default=0)


def strided_bank_passes(stride: int) -> int:
    """Passes of a request in which thread i reads word i * stride, as in a column of a tile that is `stride` words
    wide."""
    return bank_passes(i * stride for i in range(WARP))


def sectors(addresses: Iterable[int], size: int = 4) -> int:
    """Sectors of 32 bytes that one request to device memory moves. addresses: where each thread's `size` bytes
    begin."""
    return len({byte // SECTOR_BYTES for at in addresses for byte in range(at, at + size)})


def strided_sectors(stride: int, size: int = 4) -> int:
    """Sectors of a request in which thread i reads `size` bytes at i * stride values."""
    return sectors((i * stride * size for i in range(WARP)), size)


def useful_share(stride: int, size: int = 4) -> float:
    """Bytes requested over bytes moved, for such a request."""
    return WARP * size / (strided_sectors(stride, size) * SECTOR_BYTES)


def branch_passes(branches: Sequence[int]) -> int:
    """Sides executed, over all warps; branches[i]: the side that thread i takes."""
    return sum(len(set(branches[i : i + WARP])) for i in range(0, len(branches), WARP))
