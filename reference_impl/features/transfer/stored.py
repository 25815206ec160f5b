"""A prefix cache with a page store behind it: pages that this engine, or another one, computed before are loaded
instead of computed, and what is new in the prefix cache is saved (as by vLLM's KV connectors, LMCache and Mooncake).

    fetch     the store has more of a request's prefix than the cache: allocate blocks, start the load, set it aside
    ended     the blocks go into the prefix cache, where the request, and any other, finds them
    commit    blocks that are new in the prefix cache begin to be saved

Blocks of a transfer are held until it ends, whatever happens to the request. A load that fails, or is late, frees
them, and the request computes its tokens: each request is fetched for once. Where a running request needs blocks, loads
are cancelled before another request is preempted. Loaded blocks are not kept for the request that they came for:
waiting requests could then hold all blocks between them, with room for none.

Pages have 16 tokens, whatever a block has (`page_tokens_of`), so that engines with other blocks find them. Only whole
blocks are loaded. Full pages of a block that is not full are saved, too.

Extends `KVManager.commit`, `free` and `take_transfers`; the rest is what `FetchesPages` asks for.
"""

from __future__ import annotations

import itertools
import operator
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from reference_impl.core.kv_manager import KVManager, cache_key, surely_computed
from reference_impl.features.prefix.hash_index import HashIndex
from reference_impl.interfaces import (
    BlockId,
    BlockPool,
    Page,
    PageTransfer,
    PrefixIndex,
    Request,
    TransferEnd,
    Transfers,
)
from reference_impl.interfaces.pages import LayeredPageStore, PageStore, WantsPages, page_tokens_of, text_of


def page_keys(tokens: Sequence[int], key: bytes, page_tokens: int) -> list[bytes]:
    """The key of each full page, 32 bytes: SHA-256 over `key`, all tokens before the page, and its own."""
    return list(HashIndex(page_tokens).digests(tokens, key))


@dataclass(eq=False)
class _Transfer:
    """A transfer that was started, or starts with the next step, and has not ended."""

    blocks: list[BlockId]  # each of them held
    moved_at: float | None = None  # seconds on the engine's clock; None: since the last `expire`, which sets it
    is_cancelled: bool = False


@dataclass(eq=False)
class _Load(_Transfer):
    tokens: list[int] = field(default_factory=list)  # up to the end of the last page
    prefix_key: bytes = b""
    keys: frozenset[bytes] = frozenset()
    waiting: set[str] = field(default_factory=set)  # requests that were set aside for it


class FetchingKVManager(KVManager):
    """A KV manager with a page store behind its prefix index. root: makes keys of this model and this format of the
    cache differ from others in the same store."""

    def __init__(
        self, pool: BlockPool, block_size: int, *, index: PrefixIndex, store: PageStore | LayeredPageStore, root: bytes,
        **rest: Any,
    ):  # fmt: skip
        super().__init__(pool, block_size, index=index, **rest)
        self.store, self.root, self.page_tokens = store, root, page_tokens_of(block_size)
        self.pages_per_block = block_size // self.page_tokens
        self._transfers: dict[int, _Transfer] = {}  # by id
        self._num_begun = 0
        self._fetched: WeakSet[Request] = WeakSet()  # requests that were fetched for
        self._kept: set[BlockId] = set()  # indexed blocks that need not be saved (again)
        self._num_saved: WeakKeyDictionary[Request, int] = WeakKeyDictionary()  # pages, those of an open block too
        self._loads: list[PageTransfer] = []  # for the next step, as the two that follow
        self._saves: list[PageTransfer] = []
        self._cancelled: list[int] = []

    @property
    def num_releasing(self) -> int:
        """The number of blocks to wait for, those of cancelled transfers among them."""
        return super().num_releasing + self.num_coming

    @property
    def num_unsent(self) -> int:
        return len(self._loads) + len(self._saves) + len(self._cancelled)

    @property
    def num_transfers(self) -> int:
        return len(self._transfers)

    # --- from the store -------------------------------------------------------------------------------------------

    def fetch(self, request: Request, now: float) -> bool:
        # One that waits with computed tokens has them elsewhere: it was swapped out.
        if request in self._fetched or request.num_computed_tokens or request.needs_whole_prompt:
            return False
        cached = self._match(request)
        start, whole = len(cached), (request.num_tokens - 1) // self.block_size  # blocks
        if self.blocks_for(request.num_tokens) - start > self.num_available - self._would_hold(cached):
            return False  # it could not be let in, either: asked again when it is next
        tokens = request.tokens[: whole * self.block_size]
        keys, each = page_keys(tokens, self.root + cache_key(request), self.page_tokens), self.pages_per_block
        if start < whole and (load := self._coming(keys[start * each])) is not None:
            load.waiting.add(request.id)
            self._fetched.add(request)
            return True
        num_stored = self._num_stored(keys) // each  # blocks, whole ones
        if num_stored <= start:
            self._fetched.add(request)
            return False
        blocks = self.references.take(num_stored - start, shared=cached)
        assert blocks is not None
        self._fetched.add(request)
        pages = self._pages(keys[start * each : num_stored * each], blocks)
        load = _Load(
            [*cached, *blocks], now, tokens=tokens[: num_stored * self.block_size], prefix_key=cache_key(request),
            keys=frozenset(page.key for page in pages), waiting={request.id},
        )  # fmt: skip
        self._loads.append(self._begin(load, pages))
        return True

    def _pages(self, keys: Sequence[bytes], blocks: Sequence[BlockId]) -> list[Page]:
        """The pages of blocks, from the first page of the first one on. keys: of each page; where there are no more,
        the rest of the last block is not full."""
        each = self.pages_per_block
        return [Page(key, blocks[at // each], at % each) for at, key in enumerate(keys)]

    def _coming(self, key: bytes) -> _Load | None:
        loads = (t for t in self._transfers.values() if isinstance(t, _Load) and not t.is_cancelled)
        return next((load for load in loads if key in load.keys), None)

    def _num_stored(self, keys: Sequence[bytes]) -> int:
        """How many of the first keys the store has. 0, with a warning, if it fails or its answer is not a possible
        number: it is asked while steps are planned and updated, which must go on."""
        most = len(keys)
        try:
            num = self.store.num_stored(tuple(keys))
            if not isinstance(num, bool) and 0 <= operator.index(num) <= most:
                return operator.index(num)
            problem = f"expected how many of the first {most} keys it has, 0 to {most}, got {num!r}"
        except Exception as error:
            problem = text_of(error)
        name = f"{type(self.store).__name__}.num_stored"
        warnings.warn(f"{name}: {problem}. Tokens are computed instead of loaded", RuntimeWarning, stacklevel=2)
        return 0

    def _would_hold(self, cached: Sequence[BlockId]) -> int:
        """How many of these blocks count as available now and would not once they are held."""
        return sum(self.pool.ref_count(block) == 1 for block in cached)

    def _begin(self, transfer: _Transfer, pages: Iterable[Page]) -> PageTransfer:
        number, self._num_begun = self._num_begun, self._num_begun + 1
        self._transfers[number] = transfer
        return PageTransfer(number, tuple(pages))

    def cancel_loads(self) -> None:
        for number, transfer in self._transfers.items():
            if isinstance(transfer, _Load):
                self._cancel(number, transfer)

    @property
    def num_coming(self) -> int:
        """The number of blocks of transfers that were cancelled and have not ended."""
        return sum(len(t.blocks) for t in self._transfers.values() if t.is_cancelled)

    def is_fetching(self, request: Request) -> bool:
        return any(request.id in t.waiting for t in self._transfers.values() if isinstance(t, _Load))

    def expire(self, now: float) -> None:
        for number, transfer in self._transfers.items():
            if transfer.moved_at is None:
                transfer.moved_at = now
            elif now - transfer.moved_at > self.store.timeout:
                self._cancel(number, transfer)

    def _cancel(self, number: int, transfer: _Transfer) -> None:
        """Cancels a transfer. Its blocks are free when a reply says that it ended; its requests go on now."""
        if isinstance(transfer, _Load):
            transfer.waiting.clear()
        if not transfer.is_cancelled:
            transfer.is_cancelled = True
            self._cancelled.append(number)

    def transfers_moved(self, layers: Mapping[int, int]) -> None:
        for number in layers:
            self._check_begun(number, "moved")
            if (transfer := self._transfers.get(number)) is not None:
                transfer.moved_at = None

    def _check_begun(self, number: int, what: str) -> None:
        if not 0 <= number < self._num_begun:
            raise ValueError(f"transfer {number} {what}, which was never begun: {self._num_begun} were, from 0")

    def transfers_ended(self, ends: Sequence[TransferEnd]) -> None:
        for end in ends:
            self._check_begun(end.id, "ended")
            transfer = self._transfers.pop(end.id, None)
            if transfer is None:  # ended while being cancelled
                continue
            if isinstance(transfer, _Load) and end.error is None:
                self._index_loaded(transfer)
            self.references.release(transfer.blocks)

    def _index_loaded(self, load: _Load) -> None:
        assert self.index is not None
        found = self.index.insert(load.tokens, load.prefix_key, load.blocks)
        self._kept.update(self.references.add_indexed(found))

    def free(self, request: Request) -> None:
        for number, transfer in self._transfers.items():
            if isinstance(transfer, _Load) and request.id in transfer.waiting:
                transfer.waiting.remove(request.id)
                if not transfer.waiting:
                    self._cancel(number, transfer)
        super().free(request)

    # --- to the store ---------------------------------------------------------------------------------------------

    def commit(self, request: Request) -> None:
        super().commit(request)
        if isinstance(self.store, WantsPages):
            self._save_wanted(request, self.store)
            return
        indexed = [*itertools.takewhile(lambda block: block in self.references.indexed, request.block_table)]
        most = (len(indexed) + 1) * self.pages_per_block - 1  # of indexed blocks, and of one behind that is not full
        num_pages = min(self._num_pages(request), most)
        behind = num_pages > max(len(indexed) * self.pages_per_block, self._num_saved.get(request, 0))
        if not behind and all(block in self._kept for block in indexed):
            return
        self._num_saved[request] = num_pages
        tokens, table = request.tokens[: num_pages * self.page_tokens], self._blocks_of(request, num_pages)
        keys = page_keys(tokens, self.root + cache_key(request), self.page_tokens)
        pages = self._pages(keys, table)[self._num_stored(keys) :]
        new = [page for page in pages if page.block not in self._kept]
        self._kept.update(indexed)
        if new:
            self.references.hold(table)  # with the blocks before the new ones, so that leaf by leaf each can be evicted
            self._saves.append(self._begin(_Transfer(table), new))

    def _save_wanted(self, request: Request, store: WantsPages) -> None:
        if not store.wants_any:
            return
        num_pages = self._num_pages(request)
        tokens, table = request.tokens[: num_pages * self.page_tokens], self._blocks_of(request, num_pages)
        keys = page_keys(tokens, self.root + cache_key(request), self.page_tokens)
        wanted = set(store.wanted(keys))
        if new := [page for page in self._pages(keys, table) if page.key in wanted]:
            self.references.hold(table)
            self._saves.append(self._begin(_Transfer(table), new))

    def _num_pages(self, request: Request) -> int:
        """How many full pages of a request are computed."""
        return min(surely_computed(request) // self.page_tokens, len(request.block_table) * self.pages_per_block)

    def _blocks_of(self, request: Request, num_pages: int) -> list[BlockId]:
        """The blocks in which a request's first pages are."""
        return request.block_table[: -(-num_pages // self.pages_per_block)]

    def take_transfers(self) -> Transfers:
        within = super().take_transfers()
        self._kept.difference_update(within.evicted)  # none of them was computed anew since, so none is indexed again
        if not self.num_unsent:
            return within
        loads, saves, cancelled = tuple(self._loads), tuple(self._saves), tuple(self._cancelled)
        self._loads, self._saves, self._cancelled = [], [], []
        return replace(within, loads=loads, saves=saves, cancelled=cancelled)
