"""Pages of keys and values beyond the device: what a store promises, and what the cache must provide to use one; what
the KV manager must, see `FetchesPages`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from reference_impl.interfaces.blocks import BlockId

if TYPE_CHECKING:
    from concurrent.futures import Future


@runtime_checkable
class HoldsPages(Protocol):
    """A KV cache whose blocks can be read and written as bytes, layer by layer."""

    @property
    def num_layers(self) -> int:
        """The number of layers in each block, all of the same size."""
        ...

    def read_pages(self, blocks: Sequence[BlockId], layer: int) -> list[bytes]:
        """The bytes of each block's keys, values and scales of a layer."""
        ...

    def write_page(self, block: BlockId, layer: int, content: memoryview) -> None:
        """Writes a block's part of a layer. ValueError if the content has another length."""
        ...


class _KeepsPages(Protocol):
    """Keeps pages beyond the device: in host memory, in files, on other machines. It never sees a tensor.

    The planner asks which pages exist; the worker, maybe in another process, saves and loads their contents. A
    load that is late, fails, or brings anything but what was saved costs time and changes no text: the request computes
    its tokens itself. Pages of different weights must not meet in one store.
    """

    timeout: float  # seconds on the engine's clock: a transfer of which nothing moves for longer is cancelled

    def num_stored(self, keys: Sequence[bytes]) -> int:
        """How many of the first keys the store has, with all layers, without a gap. Called before loads and saves,
        while a step is planned, so it should not block. An error counts as 0, with a warning."""
        ...


class PageStore(_KeepsPages, Protocol):
    """A store of whole pages."""

    def load(self, keys: Sequence[bytes]) -> Future[Sequence[bytes]]:
        """Starts to load; the future gives the content of each key's page, in order, as it was saved.

        Like `save` it is called in the worker's thread and must not block. The future may be cancelled; what is set
        afterwards is dropped. An error, raised or set, ends the transfer and nothing else.
        """
        ...

    def save(self, pages: Mapping[bytes, bytes]) -> Future[None]:
        """Starts to save pages, {key: content}. What is stored under a key already may stay."""
        ...


@runtime_checkable
class LayeredPageStore(_KeepsPages, Protocol):
    """A store that moves pages layer by layer, such as one over a network: a transfer is one call for each layer, in
    order, each with a future of its own. The worker writes a loaded layer as soon as it arrives; the pages are used
    when all layers have arrived. If one layer fails, the transfer does."""

    def load_layer(self, keys: Sequence[bytes], layer: int) -> Future[Sequence[bytes]]:
        """Like `PageStore.load`, for one layer, numbered from 0."""
        ...

    def save_layer(self, pages: Mapping[bytes, bytes], layer: int) -> Future[None]:
        """Like `PageStore.save`, for one layer. A page of which some layers were never saved is not stored."""
        ...


def text_of(error: BaseException) -> str:
    """The text of a foreign error, whose __str__ may itself raise."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__
