"""A page store as the worker asks it: one that moves whole pages or layers, with memory of its own or without."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from reference_impl.interfaces.pages import LayeredPageStore, OwnsBuffers, PageStore, text_of


class AskedStore:
    """A store, asked for some layers of pages at a time. moves: the layers of each call that makes up a transfer."""

    def __init__(self, store: PageStore | LayeredPageStore, num_layers: int):
        self.store, layers = store, range(num_layers)
        self.moves = [layers[at : at + 1] for at in layers] if isinstance(store, LayeredPageStore) else [layers]
        self._memory = store if isinstance(store, OwnsBuffers) else None
        self._name = type(store).__name__

    def load(self, keys: Sequence[bytes], layers: range) -> Future[Any]:
        """Asks for a load; returns its future. TypeError if the store gives none."""
        if isinstance(self.store, LayeredPageStore):
            return self._future("load_layer", self.store.load_layer(keys, layers.start))
        return self._future("load", self.store.load(keys))

    def save(self, keys: Sequence[bytes], buffers: Sequence[memoryview], layers: range) -> Future[Any]:
        """Asks for a save of what was gathered into the buffers; returns its future. TypeError if the store gives
        none."""
        given: Sequence[Any] = [bytes(buffer) for buffer in buffers] if self._memory is None else buffers
        contents: Mapping[bytes, Any] = dict(zip(keys, given, strict=True))
        if isinstance(self.store, LayeredPageStore):
            return self._future("save_layer", self.store.save_layer(contents, layers.start))
        return self._future("save", self.store.save(contents))

    def buffers(self, keys: Sequence[bytes], layers: range, num_bytes: int) -> list[memoryview]:
        """Memory to gather pages into: the store's, if it has some. ValueError if that does not fit."""
        if self._memory is None:
            return [memoryview(bytearray(num_bytes)) for _ in keys]
        given = [memoryview(each) for each in self._memory.page_buffers(keys, layers, num_bytes)]
        right = [view.c_contiguous and not view.readonly and view.nbytes == num_bytes for view in given]
        if len(given) != len(keys) or not all(right):
            sizes = ", ".join(f"{view.nbytes}{' that cannot be written' * view.readonly}" for view in given)
            raise ValueError(
                f"{self._name}.page_buffers: expected {len(keys)} contiguous buffers of {num_bytes} bytes that can be "
                f"written, got {len(given)}: {sizes}"
            )
        return [view.cast("B") for view in given]

    def release(self, keys: Sequence[bytes]) -> None:
        """Tells the store that a load has ended. An error is a warning: what was loaded is right all the same."""
        if self._memory is not None:
            try:
                self._memory.release(keys)
            except Exception as error:
                warnings.warn(f"{self._name}.release: {text_of(error)}", RuntimeWarning, stacklevel=2)

    def _future(self, method: str, given: Any) -> Future[Any]:
        if not isinstance(given, Future):
            name = f"{self._name}.{method}"
            raise TypeError(f"{name}: expected a concurrent.futures.Future, got {type(given).__name__}")
        return given
