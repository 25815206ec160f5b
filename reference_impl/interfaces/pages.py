"""Pages of keys and values beyond the device: what a store promises, and what the cache must provide to use one; what
the KV manager must, see `FetchesPages`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from reference_impl.interfaces.blocks import Page

if TYPE_CHECKING:
    from concurrent.futures import Future

PAGE_TOKENS = 16


def page_tokens_of(block_size: int) -> int:
    """The tokens of a page, for a cache with blocks of so many. 16, also where a block has several pages; where 16 does
    not divide a block, a page is a block. Keys differ by it: such engines share pages only with their like."""
    return PAGE_TOKENS if block_size % PAGE_TOKENS == 0 else block_size


@runtime_checkable
class HoldsPages(Protocol):
    """A KV cache whose pages can be copied into buffers and back, some layers of several pages at a time.

    A page's bytes do not depend on blocks or ranks: layer by layer, KV head by KV head, and of each head its keys, its
    values, then their scales, token by token. See features/transfer/format.py.
    """

    @property
    def num_layers(self) -> int:
        """The number of layers in each page, all of the same size."""
        ...

    @property
    def layer_bytes(self) -> int:
        """The bytes of a layer of a page."""
        ...

    def gather_pages(self, pages: Sequence[Page], layers: range, buffers: Iterable[memoryview]) -> Iterator[memoryview]:
        """Copies these layers of each page into the page's buffer, of layer_bytes x layers bytes; yields each buffer
        when it is full, to be sealed while a CPU still has it at hand. Waits for the device."""
        ...

    def scatter_pages(self, pages: Sequence[Page], layers: range, buffers: Iterable[memoryview]) -> None:
        """Copies each page's buffer, as `gather_pages` fills it, into these layers of the page. Takes one buffer after
        another, each when it has written those before: taking one may check it, and raise an error."""
        ...


class _KeepsPages(Protocol):
    """Keeps pages beyond the device: in host memory, in files, on other machines. It never sees a tensor.

    The planner asks which pages exist; the worker, maybe in another process, saves and loads their contents. A
    load that is late, fails, or brings anything but what was saved costs time and changes no text: the request computes
    its tokens itself. Damage is found, lies are not: whoever can write to a store is trusted.
    """

    timeout: float  # seconds on the engine's clock: a transfer of which nothing moves for longer is cancelled

    def num_stored(self, keys: Sequence[bytes]) -> int:
        """How many of the first keys the store has, with all layers, without a gap. Called before loads and saves,
        while a step is planned, so it should not block. An error counts as 0, with a warning."""
        ...


class PageStore(_KeepsPages, Protocol):
    """A store of whole pages."""

    def load(self, keys: Sequence[bytes]) -> Future[Sequence[Any]]:
        """Starts to load; the future gives the content of each key's page, in order, as it was saved: bytes, or
        anything that a memoryview can show.

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

    def load_layer(self, keys: Sequence[bytes], layer: int) -> Future[Sequence[Any]]:
        """Like `PageStore.load`, for one layer, numbered from 0."""
        ...

    def save_layer(self, pages: Mapping[bytes, bytes], layer: int) -> Future[None]:
        """Like `PageStore.save`, for one layer. A page of which some layers were never saved is not stored."""
        ...


@runtime_checkable
class OwnsBuffers(Protocol):
    """A page store, of either kind, with memory of its own, such as a transport's: pages are gathered into it, and
    scattered from what its loads give, without a copy in between. Contents of its saves are these buffers, not bytes.
    """

    def page_buffers(self, keys: Sequence[bytes], layers: range, num_bytes: int) -> Sequence[memoryview]:
        """Writable memory of num_bytes for each page, for the `save` of these keys and layers, which follows at once.
        It is the store's again when that save's future is done. Must not block; an error ends the transfer."""
        ...

    def release(self, keys: Sequence[bytes]) -> None:
        """What a load of these keys gave, or would have, is not read any more. Called once for each transfer that
        loads, when it has ended, however it did."""
        ...


@runtime_checkable
class WantsPages(Protocol):
    """A page store that says itself which pages it takes, and when: it may want one again, and most never. Asked while
    steps are planned and updated, so neither may block or raise."""

    @property
    def wants_any(self) -> bool: ...

    def wanted(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        """Those of these keys whose pages it wants now; from then on it waits for their save."""
        ...


def text_of(error: BaseException) -> str:
    """The text of a foreign error, whose __str__ may itself raise."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__
