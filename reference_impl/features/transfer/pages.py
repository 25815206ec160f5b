"""A worker's loads and saves, between the blocks of its cache and a page store's bytes.

Only the worker touches the cache, and only at the beginning of a step. So a load that was cancelled can be late without
harm, and pages are written and read between two steps, never during one. A page's bytes are those of its layers, one
after the other, each followed by the CRC-32 of key, layer and bytes: a layer that comes back damaged, or in place of
another, is an error of that transfer.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import Any

from reference_impl.core.kv_cache import PagedKVCache
from reference_impl.features.transfer.cache import CachePages
from reference_impl.interfaces import KVCache, Page, PageTransfer, TransferEnd, Transfers
from reference_impl.interfaces.pages import HoldsPages, LayeredPageStore, PageStore, text_of

LONGEST_WAIT = 0.005  # seconds in which a step without rows waits for a transfer to move; the next step waits again
_CHECKSUM_BYTES = 4


@dataclass
class _Running:
    """A transfer that has begun. under_way: (future, layers that it moves) for what the store has not finished."""

    transfer: PageTransfer
    is_load: bool
    under_way: list[tuple[Future[Any], range]] = field(default_factory=list)


class Pages:
    """The transfers of a worker. store: holds contents by key. cache: the worker's. TypeError if the cache cannot give
    its blocks as bytes."""

    def __init__(self, store: PageStore | LayeredPageStore, cache: KVCache):
        held: object = CachePages(cache) if isinstance(cache, PagedKVCache) else cache
        if not isinstance(held, HoldsPages):
            raise TypeError(
                f"a page store needs a cache with read_pages, write_page and num_layers, as PagedKVCache has; "
                f"{type(cache).__name__} has not: add them, or leave Parts.page_store out"
            )
        self.store, self.cache = store, held
        layers = range(held.num_layers)
        by_layer = isinstance(store, LayeredPageStore)
        self._moves = [layers[at : at + 1] for at in layers] if by_layer else [layers]
        self._running: dict[int, _Running] = {}  # by transfer id
        self._ended: list[TransferEnd] = []  # not reported yet, like the next
        self._moved: dict[int, int] = {}  # {transfer: layers}

    def begin(self, transfers: Transfers) -> None:
        for save in transfers.saves:
            self._start(_Running(save, is_load=False))
        for load in transfers.loads:
            self._start(_Running(load, is_load=True))
        for number in transfers.cancelled:
            running = self._running.get(number)
            if running is not None:
                self._end(running, "it was cancelled")
            # Also one that is not running: of a step that failed before it was begun, or one whose end was reported.
            elif number not in (end.id for end in self._ended):
                self._ended.append(TransferEnd(number, "it was cancelled"))

    def _start(self, running: _Running) -> None:
        """Begins a transfer. An error that the store raises ends this transfer and nothing else."""
        pages = running.transfer.pages
        for layers in self._moves:
            content = None if running.is_load else self._read(pages, layers)
            try:
                running.under_way.append((self._asked(pages, content, layers), layers))
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                return self._end(running, text_of(error))
        self._running[running.transfer.id] = running

    def _asked(self, pages: Sequence[Page], content: Mapping[bytes, bytes] | None, layers: range) -> Future[Any]:
        """Asks the store for a load or, with content, a save; returns its future. TypeError if it gives none."""
        what = [page.key for page in pages] if content is None else content
        method = "load" if content is None else "save"
        if isinstance(self.store, LayeredPageStore):
            method += "_layer"
            future = getattr(self.store, method)(what, layers.start)
        else:
            future = getattr(self.store, method)(what)
        if not isinstance(future, Future):
            name = f"{type(self.store).__name__}.{method}"
            raise TypeError(f"{name}: expected a concurrent.futures.Future, got {type(future).__name__}")
        return future

    def _read(self, pages: Sequence[Page], layers: range) -> dict[bytes, bytes]:
        blocks = [page.block for page in pages]
        contents = [self.cache.read_pages(blocks, layer) for layer in layers]
        return {
            page.key: b"".join(
                sealed(page.key, layer, content[at]) for layer, content in zip(layers, contents, strict=True)
            )
            for at, page in enumerate(pages)
        }

    def _end(self, running: _Running, error: str | None) -> None:
        """Ends a transfer. What is still under way is cancelled."""
        for future, _ in running.under_way:
            future.cancel()
        number = running.transfer.id
        self._running.pop(number, None)
        self._moved.pop(number, None)
        self._ended.append(TransferEnd(number, error))

    def take_in(self, seconds: float) -> None:
        """Writes what has come into the cache. If nothing has moved, it first waits at most so many seconds."""
        under_way = [future for running in self._running.values() for future, _ in running.under_way]
        if under_way and not self._ended and not self._moved and seconds:
            wait(under_way, seconds, FIRST_COMPLETED)
        for running in list(self._running.values()):
            self._take_in(running)

    def _take_in(self, running: _Running) -> None:
        number, waiting = running.transfer.id, []
        for future, layers in running.under_way:
            if not future.done():
                waiting.append((future, layers))
            elif (error := self._error_of(running, future, layers)) is not None:
                return self._end(running, error)
            else:
                self._moved[number] = self._moved.get(number, 0) + len(layers)
        running.under_way = waiting
        if not waiting:
            self._end(running, None)

    def _error_of(self, running: _Running, future: Future[Any], layers: range) -> str | None:
        """Why moving these layers failed; None: it went well, and loaded layers are in the cache."""
        try:
            error = future.exception()  # any of the store's: an exit of its thread does not end ours
            if error is None and running.is_load:
                self._write(running.transfer.pages, layers, future.result())
        except Exception as problem:  # it was cancelled, or what came is no page
            error = problem
        return None if error is None else text_of(error)

    def _write(self, pages: Sequence[Page], layers: range, contents: Any) -> None:
        if len(contents) != len(pages):
            raise ValueError(f"expected {len(pages)} pages, got {len(contents)}")
        for page, content in zip(pages, contents, strict=True):
            for layer, piece in zip(layers, _pieces(content, len(layers)), strict=True):
                self.cache.write_page(page.block, layer, opened(page.key, layer, piece))

    def take_ended(self) -> tuple[TransferEnd, ...]:
        """The transfers that ended since the last call."""
        ended, self._ended = self._ended, []
        return tuple(ended)

    def take_moved(self) -> dict[int, int]:
        """The transfers that have not ended: {transfer: number of layers that have moved since the last call}."""
        moved, self._moved = self._moved, {}
        return moved


def sealed(key: bytes, layer: int, content: bytes) -> bytes:
    return content + _checksum(key, layer, content)


def opened(key: bytes, layer: int, sealed_content: bytes | memoryview) -> memoryview:
    """The content without its checksum. ValueError if it is not what `sealed` gave for this key and layer."""
    view = memoryview(sealed_content)
    content, checksum = view[:-_CHECKSUM_BYTES], view[-_CHECKSUM_BYTES:]
    if _checksum(key, layer, content) != checksum:
        raise ValueError(
            f"layer {layer} of a page, {len(view)} bytes, is damaged, or is another one: its checksum is wrong"
        )
    return content


def _checksum(key: bytes, layer: int, content: bytes | memoryview) -> bytes:
    named = zlib.crc32(layer.to_bytes(4, "little"), zlib.crc32(key))
    return zlib.crc32(content, named).to_bytes(_CHECKSUM_BYTES, "little")


def _pieces(content: bytes, num: int) -> Iterator[memoryview]:
    """The content in `num` pieces of equal length, since all layers of a page are alike. ValueError if it cannot be cut
    so."""
    view = memoryview(content)
    if len(view) % num:
        raise ValueError(f"expected a page of {num} layers of equal length, got {len(view)} bytes: it is damaged")
    size = len(view) // num
    return (view[at * size : (at + 1) * size] for at in range(num))
