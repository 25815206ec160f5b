"""An engine's page store whose pages come from peers and go to them: see `endpoint.py`.

A load gives what has arrived, in the memory into which the peer wrote it; a save pushes what a peer waits for.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reference_impl.features.disaggregation.endpoint import MEMORY_BYTES, Endpoint


class PeerStore:
    """A `PageStore` that `OwnsBuffers` and `WantsPages`."""

    timeout = 30.0

    def __init__(self) -> None:
        self.endpoint: Endpoint | None = None  # none before the engine, which it needs to know, is made
        self._free: list[NDArray[np.uint8]] = []  # memory of pages that were pushed: new memory takes longer to get

    def num_stored(self, keys: Sequence[bytes]) -> int:
        endpoint = self._ready()
        return next((i for i, key in enumerate(keys) if endpoint.pages.page(key) is None), len(keys))

    @property
    def wants_any(self) -> bool:
        return self._ready().pages.wants_any

    def wanted(self, keys: Sequence[bytes]) -> list[bytes]:
        return self._ready().pages.wanted(keys)

    def load(self, keys: Sequence[bytes]) -> Future[Sequence[memoryview]]:
        endpoint, future = self._ready(), Future[Sequence[memoryview]]()
        pages = [page for key in keys if (page := endpoint.pages.page(key)) is not None]
        if len(pages) < len(keys):
            future.set_exception(KeyError(f"{len(keys) - len(pages)} of {len(keys)} pages are not here any more"))
        else:
            future.set_result(pages)
        return future

    def page_buffers(self, keys: Sequence[bytes], layers: range, num_bytes: int) -> Sequence[memoryview]:
        return [self._buffer(num_bytes) for _ in keys]

    def _buffer(self, num_bytes: int) -> memoryview:
        fits = self._free and self._free[-1].nbytes == num_bytes
        memory = self._free.pop() if fits else np.empty(num_bytes, np.uint8)
        lent = memory[:]  # kept alive by its readers: push, transport, a write that does not end
        weakref.finalize(lent, self._take_back, memory).atexit = False
        return lent.data

    def _take_back(self, memory: NDArray[np.uint8]) -> None:
        if (len(self._free) + 1) * memory.nbytes <= MEMORY_BYTES:
            self._free.append(memory)

    def save(self, pages: Mapping[bytes, Any]) -> Future[None]:
        self._ready().push(pages)
        future = Future[None]()
        future.set_result(None)
        return future

    def release(self, keys: Sequence[bytes]) -> None:
        """Nothing: a request lets go of its transfer's pages when it has begun to write."""

    def _ready(self) -> Endpoint:
        if self.endpoint is None:
            raise RuntimeError("a PeerStore needs an endpoint before its engine runs: set it")
        return self.endpoint
