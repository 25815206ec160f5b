"""Pages between a cache and a store's buffers: every byte in its place, and memory that goes back to its owner."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reference_impl.assembly.kv_cache import kv_cache, widths
from reference_impl.core.kv_cache import PagedKVCache
from reference_impl.features.transfer.cache import CachePages
from reference_impl.features.transfer.pages import Pages
from reference_impl.features.transfer.seals import SEAL_BYTES, seal, unsealed
from reference_impl.interfaces import KVSpec, MovesScales, Page, PageTransfer, TransferEnd, Transfers
from reference_impl.interfaces.pages import HoldsPages, LayeredPageStore, OwnsBuffers, page_tokens_of

LAYERS, HEADS, HEAD_DIM, BLOCKS = 3, 3, 6, 5
CPU = torch.device("cpu")
FORMATS = ["auto", "int8", "fp8", "int4"]


def cache_of(kv_dtype: str = "auto", block_size: int = 16, dtype: torch.dtype = torch.float64) -> PagedKVCache:
    """A cache in which every byte is drawn."""
    spec = KVSpec(LAYERS, HEADS, HEAD_DIM, block_size, **widths(kv_dtype, dtype))
    cache = kv_cache([spec], BLOCKS, dtype, CPU, kv_dtype=kv_dtype)
    draw = torch.Generator().manual_seed(block_size)
    for tensor in cache.blocks:
        codes = torch.randint(0, 256, (tensor.numel() * tensor.itemsize,), dtype=torch.uint8, generator=draw)
        tensor.copy_(codes.view(tensor.dtype).view(tensor.shape))
    return cache


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def page_by_hand(cache: PagedKVCache, block: int, part: int) -> bytes:
    """Layer by layer, head by head; of a head its keys, its values, their scales, token by token."""
    size = page_tokens_of(cache.specs[0].block_size)
    tokens, found = slice(part * size, (part + 1) * size), b""
    for layer, head in itertools.product(range(LAYERS), range(HEADS)):
        found += b"".join(bytes_of(cache.data[layer, kind, block, tokens, head]) for kind in range(2))
        if isinstance(cache, MovesScales):
            scales = cache.scale_of_slots
            found += b"".join(bytes_of(scales[layer, kind, block, tokens, head]) for kind in range(2))
    return found


def state(cache: PagedKVCache) -> list[bytes]:
    return [bytes_of(tensor) for tensor in cache.blocks]


@pytest.mark.parametrize("via_host", [False, True])
@pytest.mark.parametrize(("block_size", "num_parts"), [(16, 1), (48, 3), (6, 1)])
@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_a_page_is_its_layers_and_heads_one_after_another(
    kv_dtype: str, block_size: int, num_parts: int, via_host: bool
) -> None:
    cache = cache_of(kv_dtype, block_size)
    held = CachePages(cache, via_host)
    pages = [Page(b"", block, part) for block, part in ((3, num_parts - 1), (0, 0), (3, 0))]
    memory = bytearray(1000 + LAYERS * held.layer_bytes)  # and buffers that begin anywhere
    for layers in (range(LAYERS), range(1, 2), range(1, 3)):
        num_bytes = len(layers) * held.layer_bytes
        buffers = [memoryview(memory)[3 : 3 + num_bytes], *(memoryview(bytearray(num_bytes)) for _ in pages[1:])]
        list(held.gather_pages(pages, layers, buffers))
        for page, buffer in zip(pages, buffers, strict=True):
            whole = page_by_hand(cache, page.block, page.part)
            assert len(whole) == LAYERS * held.layer_bytes
            assert bytes(buffer) == whole[layers.start * held.layer_bytes : layers.stop * held.layer_bytes]


@pytest.mark.parametrize("via_host", [False, True])
@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_a_page_goes_where_it_belongs_and_nowhere_else(kv_dtype: str, block_size: int, via_host: bool) -> None:
    source, target = cache_of(kv_dtype, 48), cache_of(kv_dtype, block_size)
    before = cache_of(kv_dtype, block_size)
    moved = [(Page(b"", 1, 2), Page(b"", 4, block_size // 16 - 1)), (Page(b"", 3, 0), Page(b"", 0, 0))]
    layers = range(1, LAYERS)
    read, written = CachePages(source), CachePages(target, via_host)
    buffers = [memoryview(bytearray(2 * read.layer_bytes)) for _ in moved]
    list(read.gather_pages([page for page, _ in moved], layers, buffers))
    written.scatter_pages([page for _, page in moved], layers, [memoryview(bytes(each)) for each in buffers])
    came = {page[1:]: origin for origin, page in moved}
    for place in itertools.product(range(BLOCKS), range(block_size // 16)):
        found, first = page_by_hand(target, *place), read.layer_bytes
        assert found[:first] == page_by_hand(before, *place)[:first]
        whole = page_by_hand(source, *came[place][1:]) if place in came else page_by_hand(before, *place)
        assert found[first:] == whole[first:]


def test_a_buffer_of_another_size_is_refused() -> None:
    held = CachePages(cache_of())
    size = held.layer_bytes
    with pytest.raises(ValueError, match=f"expected a buffer of {size} bytes for 1 layers, got {size - 1}"):
        list(held.gather_pages([Page(b"", 0)], range(1), [memoryview(bytearray(size - 1))]))
    assert isinstance(held, HoldsPages)


def test_a_cache_whose_blocks_hold_more_copies_its_own_pages() -> None:
    class More(PagedKVCache):
        def __init__(self) -> None:
            super().__init__(cache_of().specs, BLOCKS, torch.float64, CPU)
            self.blocks.append(torch.zeros(BLOCKS, LAYERS, 3))

    with pytest.raises(ValueError, match="expected blocks of 4608 bytes a layer, .* got 4620 in More: one that holds"):
        Pages(WholePages(), More())

    class Own(More):
        num_layers, layer_bytes = LAYERS, 1

        def gather_pages(self, pages: Any, layers: range, buffers: Any) -> Any:
            for buffer in buffers:
                buffer[:] = b"x" * len(layers)
                yield buffer

        def scatter_pages(self, pages: Any, layers: range, buffers: Any) -> None:
            raise AssertionError("nothing is loaded")

    store = WholePages()
    Pages(store, Own()).begin(Transfers(saves=(transfer(0, (0, 1, 2)),)))
    assert [bytes(content[:-SEAL_BYTES]) for content in store.slots.values()] == [b"xxx"] * 3


@given(
    content=st.binary(min_size=1, max_size=300), key=st.binary(min_size=32, max_size=32), layer=st.integers(0, 300),
    bit=st.integers(0, 2**16), other=st.integers(1, 300), cut=st.integers(1, 9),
)  # fmt: skip
def test_a_seal_is_of_these_bytes_this_key_and_this_layer(
    content: bytes, key: bytes, layer: int, bit: int, other: int, cut: int
) -> None:
    num_bytes = len(content)
    buffer = memoryview(bytearray(content + bytes(SEAL_BYTES)))
    seal(buffer, key, layer)
    assert bytes(unsealed(buffer, key, layer, num_bytes)) == content
    wrong_key = bytes([key[0] ^ 1]) + key[1:]
    for wrong in ((wrong_key, layer), (key, layer + other)):
        with pytest.raises(ValueError, match="its seal is wrong"):
            unsealed(buffer, *wrong, num_bytes)
    with pytest.raises(ValueError, match=f"expected a page of {num_bytes} bytes"):
        unsealed(buffer[: max(0, len(buffer) - cut)], key, layer, num_bytes)
    bit %= 8 * len(buffer)
    buffer[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ValueError, match="is damaged"):
        unsealed(buffer, key, layer, num_bytes)


class Memory:
    """A store with memory of its own: slots, and which pages lie in them. kind: what its loads do."""

    timeout = 5.0
    refuses = short = False

    def __init__(self, kind: str = "now"):
        self.kind, self.slots = kind, dict[tuple[bytes, int], memoryview]()
        self.handed: list[memoryview] = []
        self.released: list[list[bytes]] = []

    def num_stored(self, keys: Sequence[bytes]) -> int:
        return 0

    def page_buffers(self, keys: Sequence[bytes], layers: range, num_bytes: int) -> Sequence[memoryview]:
        if self.refuses:
            raise MemoryError("full")
        memory = memoryview(bytearray(len(keys) * num_bytes))
        self.handed += [memory[at * num_bytes :][:num_bytes] for at in range(len(keys))]
        return self.handed[-len(keys) + self.short :]

    def release(self, keys: Sequence[bytes]) -> None:
        self.released.append(list(keys))
        if self.kind == "bad release":
            raise OSError("closed")

    def _save(self, pages: Mapping[bytes, Any], layer: int) -> Future[None]:
        own = {id(buffer.obj) for buffer in self.handed}
        assert all(isinstance(content, memoryview) and id(content.obj) in own for content in pages.values())
        self.slots |= {(key, layer): content for key, content in pages.items()}
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _load(self, keys: Sequence[bytes], layer: int) -> Future[Sequence[memoryview]]:
        future: Future[Sequence[memoryview]] = Future()
        if self.kind == "raises":
            raise ConnectionError("closed")
        if self.kind == "fails":
            future.set_exception(TimeoutError("late"))
        elif self.kind == "damaged":
            future.set_result([memoryview(bytes(self.slots[key, layer].nbytes)) for key in keys])
        elif self.kind != "never":
            future.set_result([self.slots[key, layer] for key in keys])
        return future


class WholePages(Memory):
    def save(self, pages: Mapping[bytes, Any]) -> Future[None]:
        return self._save(pages, 0)

    def load(self, keys: Sequence[bytes]) -> Future[Sequence[memoryview]]:
        return self._load(keys, 0)


class Layers(Memory):
    save_layer, load_layer = Memory._save, Memory._load


KEYS = [bytes([at]) * 32 for at in range(3)]


def transfer(number: int, blocks: Sequence[int]) -> PageTransfer:
    return PageTransfer(number, tuple(Page(key, block) for key, block in zip(KEYS, blocks, strict=True)))


@pytest.mark.parametrize("make", [WholePages, Layers])
def test_pages_are_gathered_into_the_memory_of_a_store_and_scattered_from_it(make: Callable[[], Any]) -> None:
    source, target, store = cache_of(), cache_of(block_size=32), make()
    assert isinstance(store, OwnsBuffers)
    assert isinstance(store, LayeredPageStore) == (make is Layers)
    saving, loading = Pages(store, source), Pages(store, target)
    saving.begin(Transfers(saves=(transfer(0, (4, 0, 2)),)))
    saving.take_in(0.0)
    assert saving.take_ended() == (TransferEnd(0),)
    assert len(store.handed) == len(KEYS) * (LAYERS if make is Layers else 1)
    places = tuple(Page(key, block, part) for key, (block, part) in zip(KEYS, ((1, 1), (1, 0), (3, 1)), strict=True))
    loading.begin(Transfers(loads=(PageTransfer(7, places),)))
    assert store.released == []
    loading.take_in(0.0)
    assert loading.take_ended() == (TransferEnd(7),)
    assert store.released == [KEYS]
    for page, block in zip(places, (4, 0, 2), strict=True):
        assert page_by_hand(target, page.block, page.part) == page_by_hand(source, block, 0)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, partial(np.frombuffer, dtype=np.uint16)])
def test_a_store_without_memory_is_given_bytes_and_may_give_whatever_shows_them(kind: Callable[[bytes], Any]) -> None:
    class Plain:
        timeout = 5.0

        def __init__(self) -> None:
            self.contents: dict[bytes, Any] = {}

        def num_stored(self, keys: Sequence[bytes]) -> int:
            return 0

        def save(self, pages: Mapping[bytes, bytes]) -> Future[None]:
            assert all(type(content) is bytes for content in pages.values())
            self.contents.update(pages)
            return self.done(None)

        def load(self, keys: Sequence[bytes]) -> Future[Any]:
            return self.done([kind(self.contents[key]) for key in keys])

        def done(self, result: Any) -> Future[Any]:
            future: Future[Any] = Future()
            future.set_result(result)
            return future

    source, target, store = cache_of(), cache_of(block_size=32), Plain()
    assert not isinstance(store, OwnsBuffers)
    Pages(store, source).begin(Transfers(saves=(transfer(0, (4, 0, 2)),)))
    loading = Pages(store, target)
    loading.begin(Transfers(loads=(transfer(1, (1, 2, 3)),)))
    loading.take_in(0.0)
    assert loading.take_ended() == (TransferEnd(1),)
    for block, origin in ((1, 4), (2, 0), (3, 2)):
        assert page_by_hand(target, block, 0) == page_by_hand(source, origin, 0)


@pytest.mark.filterwarnings("ignore:.*release. OSError. closed")
@pytest.mark.parametrize("make", [WholePages, Layers])
@pytest.mark.parametrize("kind", ["raises", "fails", "damaged", "never", "bad release"])
def test_memory_of_a_load_is_released_once_however_it_ends(kind: str, make: Callable[..., Any]) -> None:
    cache, store = cache_of(), make()
    pages = Pages(store, cache)
    pages.begin(Transfers(saves=(transfer(0, (0, 1, 2)),)))
    pages.take_in(0.0)
    pages.take_ended()
    before = state(cache)
    store.kind = kind
    pages.begin(Transfers(loads=(transfer(1, (2, 3, 4)),)))
    pages.take_in(0.0)
    if kind == "never":
        assert store.released == []
        pages.begin(Transfers(cancelled=(1,)))
    [end] = pages.take_ended()
    assert (end.error is None) == (kind == "bad release")
    pages.begin(Transfers(cancelled=(1,)))  # again, when it has ended
    assert store.released == [KEYS]
    assert kind == "bad release" or state(cache) == before


def test_memory_that_does_not_fit_or_is_full_ends_a_save_and_nothing_else() -> None:
    store = WholePages()
    pages = Pages(store, cache_of())
    store.refuses = True
    pages.begin(Transfers(saves=(transfer(0, (0, 1, 2)),)))
    store.refuses, store.short = False, True
    pages.begin(Transfers(saves=(transfer(1, (0, 1, 2)),)))
    full, short = (end.error for end in pages.take_ended())
    assert full == "MemoryError: full"
    assert "WholePages.page_buffers: expected 3 contiguous buffers of" in str(short)
    assert "got 2" in str(short)


def test_a_page_of_another_key_is_not_taken_for_it() -> None:
    cache, store = cache_of(), WholePages()
    pages = Pages(store, cache)
    pages.begin(Transfers(saves=(transfer(0, (0, 1, 2)),)))
    first, second = ((key, 0) for key in KEYS[:2])
    store.slots[first], store.slots[second] = store.slots[second], store.slots[first]
    before = state(cache)
    pages.begin(Transfers(loads=(transfer(1, (2, 3, 4)),)))
    pages.take_in(0.0)
    assert "is another one" in str(pages.take_ended()[-1].error)
    assert state(cache) == before


def test_pages_have_16_tokens_where_16_divides_a_block() -> None:
    assert [page_tokens_of(size) for size in (1, 4, 8, 16, 24, 32, 48, 128)] == [1, 4, 8, 16, 24, 16, 16, 16]
    assert CachePages(cache_of(block_size=48)).layer_bytes == CachePages(cache_of(block_size=16)).layer_bytes
    spec = replace(cache_of().specs[0], num_layers=1)
    assert CachePages(cache_of()).layer_bytes == spec.bytes_per_block
