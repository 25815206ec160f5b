"""A worker's loads and saves, between the pages of its cache and a page store's buffers.

Only the worker touches the cache, and only at the beginning of a step. So a load that was cancelled can be late without
harm, and pages are written and read between two steps, never during one. A page crosses in one copy: it is gathered
into a buffer, and scattered from the one in which it came, once its seal (`seals.py`) was found right. One that comes
back damaged, or in place of another, is an error of that transfer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import Any, TypeVar

from reference_impl.core.kv_cache import PagedKVCache
from reference_impl.features.transfer.asking import AskedStore
from reference_impl.features.transfer.cache import CachePages
from reference_impl.features.transfer.seals import SEAL_BYTES, seal, unsealed
from reference_impl.interfaces import KVCache, Page, PageTransfer, TransferEnd, Transfers
from reference_impl.interfaces.pages import HoldsPages, LayeredPageStore, PageStore, text_of

LONGEST_WAIT = 0.005  # seconds in which a step without rows waits for a transfer to move; the next step waits again
_Answer = TypeVar("_Answer")


@dataclass
class _Running:
    """A transfer that has begun. under_way: (future, layers that it moves) for what the store has not finished."""

    transfer: PageTransfer
    is_load: bool
    under_way: list[tuple[Future[Any], range]] = field(default_factory=list)

    @property
    def keys(self) -> list[bytes]:
        return [page.key for page in self.transfer.pages]


class Pages:
    """The transfers of a worker. store: holds contents by key. cache: the worker's. TypeError if pages of the cache
    cannot be copied."""

    def __init__(self, store: PageStore | LayeredPageStore, cache: KVCache):
        held: object = cache
        if isinstance(cache, PagedKVCache) and not isinstance(cache, HoldsPages):
            held = CachePages(cache)
        if not isinstance(held, HoldsPages):
            raise TypeError(
                "a page store needs a cache with gather_pages, scatter_pages, num_layers and layer_bytes, as "
                f"PagedKVCache has; {type(cache).__name__} has not: add them, or leave Parts.page_store out"
            )
        self.store, self.cache = AskedStore(store, held.num_layers), held
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
        for layers in self.store.moves:
            ask = self._load if running.is_load else self._save
            future = ask(running, layers)
            if future is None:
                return
            running.under_way.append((future, layers))
        self._running[running.transfer.id] = running

    def _load(self, running: _Running, layers: range) -> Future[Any] | None:
        return self._asked(running, lambda: self.store.load(running.keys, layers))

    def _save(self, running: _Running, layers: range) -> Future[Any] | None:
        """Gathers some layers into buffers, seals them and asks the store to save them."""
        pages, num_bytes = running.transfer.pages, len(layers) * self.cache.layer_bytes
        buffers = self._asked(running, lambda: self.store.buffers(running.keys, layers, num_bytes + SEAL_BYTES))
        if buffers is None:
            return None
        gathered = self.cache.gather_pages(pages, layers, [buffer[:num_bytes] for buffer in buffers])
        for page, buffer, _ in zip(pages, buffers, gathered, strict=True):
            seal(buffer, page.key, layers.start)
        return self._asked(running, lambda: self.store.save(running.keys, buffers, layers))

    def _asked(self, running: _Running, ask: Callable[[], _Answer]) -> _Answer | None:
        """What the store answers; None if it raised an error, which has ended the transfer."""
        try:
            return ask()
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self._end(running, text_of(error))
            return None

    def _end(self, running: _Running, error: str | None) -> None:
        """Ends a transfer. What is still under way is cancelled."""
        for future, _ in running.under_way:
            future.cancel()
        number = running.transfer.id
        self._running.pop(number, None)
        self._moved.pop(number, None)
        if running.is_load:
            self.store.release(running.keys)
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
        """Writes what came for these layers into the cache, each page when it was found right: what is written of a
        transfer that fails is never used."""
        if len(contents) != len(pages):
            raise ValueError(f"expected {len(pages)} pages, got {len(contents)}")
        num_bytes = len(layers) * self.cache.layer_bytes
        found = (
            unsealed(memoryview(content).cast("B"), page.key, layers.start, num_bytes)
            for page, content in zip(pages, contents, strict=True)
        )
        self.cache.scatter_pages(pages, layers, found)

    def take_ended(self) -> tuple[TransferEnd, ...]:
        """The transfers that ended since the last call."""
        ended, self._ended = self._ended, []
        return tuple(ended)

    def take_moved(self) -> dict[int, int]:
        """The transfers that have not ended: {transfer: number of layers that have moved since the last call}."""
        moved, self._moved = self._moved, {}
        return moved
