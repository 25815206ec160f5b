"""Memory of pages that were pushed is used again, and never while somebody reads it."""

from __future__ import annotations

import numpy as np

from reference_impl.features.disaggregation.endpoint import MEMORY_BYTES
from reference_impl.features.disaggregation.store import PeerStore


def lent(store: PeerStore, num: int = 1, num_bytes: int = 72) -> list[memoryview]:
    return list(store.page_buffers([bytes([n]) for n in range(num)], range(1), num_bytes))


def address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


def test_a_buffer_is_lent_again_when_nobody_reads_it() -> None:
    store = PeerStore()
    [first] = lent(store)
    assert (first.nbytes, first.readonly, first.format, first.ndim) == (72, False, "B", 1)
    at = address(first)
    del first
    [second] = lent(store)
    assert address(second) == at


def test_a_slice_or_an_array_over_a_buffer_keeps_it_from_others() -> None:
    store = PeerStore()
    [first] = lent(store)
    first[:] = bytes([7]) * 72
    part, array = first[:8].cast("Q"), np.frombuffer(first, np.uint8)
    del first
    others = lent(store, 4)
    for other in others:
        other[:] = bytes(72)
    assert (part[0], int(array.sum())) == (0x0707070707070707, 7 * 72)
    del part
    assert not np.shares_memory(np.frombuffer(lent(store)[0], np.uint8), array)


def test_buffers_of_one_call_are_apart() -> None:
    store = PeerStore()
    for _ in range(2):
        assert len({address(view) for view in lent(store, 5)}) == 5


def test_another_size_gets_other_memory_and_what_is_kept_is_bounded() -> None:
    store = PeerStore()
    kept = lent(store, 3)
    del kept
    assert lent(store, num_bytes=80)[0].nbytes == 80
    big = lent(store, 3, MEMORY_BYTES // 2)
    del big
    assert sum(memory.nbytes for memory in store._free) <= MEMORY_BYTES
