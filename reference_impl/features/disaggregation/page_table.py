"""The pages of an endpoint that the engine's thread asks for: which keys are wanted, and which pages have come. Any
thread may call these methods; they do not wait."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Sequence


class PageTable:
    """wanted: keys of pages to push, until the engine is told; then they are coming, until it gives them. here: pages
    that have come."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wanted: dict[bytes, set[str]] = defaultdict(set)  # keys, and the transfers that push them
        self._coming: dict[bytes, set[str]] = defaultdict(set)
        self._here: dict[bytes, dict[str, memoryview]] = defaultdict(dict)  # by transfer

    @property
    def is_empty(self) -> bool:
        return not (self._wanted or self._coming or self._here)

    # --- pages to push ----------------------------------------------------------------------------------------------

    def want(self, transfer: str, keys: Iterable[bytes]) -> None:
        with self._lock:
            for key in keys:
                self._wanted[key].add(transfer)

    @property
    def wants_any(self) -> bool:
        return bool(self._wanted)

    def wanted(self, keys: Sequence[bytes]) -> list[bytes]:
        """Those of these keys whose pages are to be pushed. Each is said once for each transfer: the page follows."""
        with self._lock:
            found = [key for key in keys if key in self._wanted]
            for key in found:
                self._coming[key] |= self._wanted.pop(key)
        return found

    def takers(self, keys: Iterable[bytes]) -> dict[bytes, set[str]]:
        """The transfers that push each of these pages, which have come from the engine."""
        with self._lock:
            return {key: self._coming.pop(key, set()) for key in keys}

    def want_no_more(self, transfer: str, keys: Iterable[bytes]) -> None:
        with self._lock:
            for key in keys:
                for each in (self._wanted, self._coming):
                    if key in each:
                        each[key].discard(transfer)
                        if not each[key]:
                            del each[key]

    # --- pages that have come ---------------------------------------------------------------------------------------

    def put(self, transfer: str, key: bytes, content: memoryview) -> None:
        with self._lock:
            self._here[key][transfer] = content

    def page(self, key: bytes) -> memoryview | None:
        """The content of a page that has come; None if it has not."""
        with self._lock:
            found = self._here.get(key)
            return next(iter(found.values())) if found else None

    def copy(self, transfers: set[str]) -> None:
        """Keeps the pages of these transfers apart from the memory in which they came."""
        with self._lock:
            for found in self._here.values():
                for transfer in found.keys() & transfers:
                    found[transfer] = memoryview(bytes(found[transfer]))

    def forget(self, transfer: str) -> None:
        with self._lock:
            for key in [key for key, found in self._here.items() if transfer in found]:
                del self._here[key][transfer]
                if not self._here[key]:
                    del self._here[key]
