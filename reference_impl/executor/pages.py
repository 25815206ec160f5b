"""Loads and saves of a worker: between the blocks of its cache and a page store's bytes.

Only the worker touches the cache, and only at the beginning of a step. So a load that was cancelled can be late without
harm, and pages are written and read between two steps, never during one. Behind each page's bytes stands the CRC-32
of its key and them: what comes back damaged, or in place of another page, is an error of that transfer.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any

from reference_impl.interfaces import HoldsPages, KVCache, Page, PageStore, PageTransfer, TransferEnd, Transfers
from reference_impl.kv.stored import text_of

LONGEST_WAIT = 0.005  # seconds in which a step without rows waits for a transfer to end; the next step waits again
_CHECKSUM_BYTES = 4


@dataclass(frozen=True)
class _Running:
    future: Future[Any]
    loading: PageTransfer | None = None


class Pages:
    """store: contents by key. cache: the worker's. TypeError if its blocks cannot be had as bytes."""

    def __init__(self, store: PageStore, cache: KVCache):
        if not isinstance(cache, HoldsPages):
            raise TypeError(
                f"a page store needs a cache with read_pages and write_page, as PagedKVCache has; "
                f"{type(cache).__name__} has not: add them, or leave Parts.page_store out"
            )
        self.store, self.cache = store, cache
        self._running: dict[int, _Running] = {}  # by transfer id
        self._ended: list[TransferEnd] = []  # not reported yet

    def begin(self, transfers: Transfers) -> None:
        for save in transfers.saves:
            contents = self.cache.read_pages([page.block for page in save.pages])
            pages = {page.key: sealed(page.key, content) for page, content in zip(save.pages, contents, strict=True)}
            self._start(save.id, "save", pages)
        for load in transfers.loads:
            keys = [page.key for page in load.pages]
            self._start(load.id, "load", keys, load)
        for number in transfers.cancelled:
            running = self._running.pop(number, None)
            if running is not None:
                running.future.cancel()
            # Also one that is not running: of a step that failed before it was begun, or one whose end was reported.
            if number not in (end.id for end in self._ended):
                self._ended.append(TransferEnd(number, "it was cancelled"))

    def _start(self, number: int, method: str, content: Any, load: PageTransfer | None = None) -> None:
        """A store that raises counts as one that fails."""
        try:
            future = getattr(self.store, method)(content)
            if not isinstance(future, Future):
                name = f"{type(self.store).__name__}.{method}"
                raise TypeError(f"{name}: expected a concurrent.futures.Future, got {type(future).__name__}")
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self._ended.append(TransferEnd(number, text_of(error)))
        else:
            self._running[number] = _Running(future, load)

    def take_in(self, seconds: float) -> None:
        """Writes what has come into the cache. If nothing has, waits at most this long."""
        if self._running and not self._ended and seconds:
            wait([running.future for running in self._running.values()], seconds, FIRST_COMPLETED)
        for number, running in list(self._running.items()):
            if running.future.done():
                del self._running[number]
                self._ended.append(TransferEnd(number, self._error_of(running)))

    def _error_of(self, running: _Running) -> str | None:
        """None: it went well, and loaded pages are in the cache."""
        try:
            error = running.future.exception()  # any of the store's: an exit of its thread does not end ours
            if error is None and running.loading is not None:
                self._write(running.loading.pages, running.future.result())
        except Exception as problem:  # it was cancelled, or what came is no page
            error = problem
        return None if error is None else text_of(error)

    def _write(self, pages: Sequence[Page], contents: Any) -> None:
        if len(contents) != len(pages):
            raise ValueError(f"expected {len(pages)} pages, got {len(contents)}")
        for page, content in zip(pages, contents, strict=True):
            self.cache.write_page(page.block, opened(page.key, content))

    def take_ended(self) -> tuple[TransferEnd, ...]:
        """Since the last call."""
        ended, self._ended = self._ended, []
        return tuple(ended)


def sealed(key: bytes, content: bytes) -> bytes:
    return content + zlib.crc32(content, zlib.crc32(key)).to_bytes(_CHECKSUM_BYTES, "little")


def opened(key: bytes, sealed_content: bytes) -> memoryview:
    """ValueError if it is not what `sealed` gave for this key."""
    view = memoryview(sealed_content)
    content, checksum = view[:-_CHECKSUM_BYTES], view[-_CHECKSUM_BYTES:]
    if zlib.crc32(content, zlib.crc32(key)) != int.from_bytes(checksum, "little"):
        raise ValueError(f"a page of {len(view)} bytes is damaged, or another one: its checksum is wrong")
    return content
