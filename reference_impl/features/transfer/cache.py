"""Pages of a `PagedKVCache`, copied into buffers and back.

    the cache    keys and values [layer, 2, block, token of the block, head, head_dim], a token's heads side by side
    a page       [layer, head, 2, token of the page, head_dim], behind a head's keys and values their scales

Only the order of tokens and heads differs, so a page is one strided copy, of whole heads of tokens. On a CPU it goes
straight from the cache into the buffer, and back. With another device the blocks of all pages cross in one copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reference_impl.core.kv_cache import PagedKVCache, block_ids
from reference_impl.interfaces import BlockId, MovesScales, Page
from reference_impl.interfaces.pages import page_tokens_of

_Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class _HostBlocks:
    """Blocks in host memory: those of a cache on a CPU, or copies. place: of each block. views: data and scales, each
    [places, pages of a block, layers, heads, 2, tokens of a page, ...]."""

    tensors: Sequence[Tensor]  # [layers, 2, places, tokens of a block, heads, ...]
    views: Sequence[_Array]
    place: range | dict[BlockId, int]

    def of(self, page: Page, layers: slice) -> list[_Array]:
        return [view[self.place[page.block], page.part, layers] for view in self.views]


class CachePages:
    """A `PagedKVCache` as a cache that `HoldsPages`. via_host: its device's blocks are copied to the host first; None:
    where the device is not a CPU. ValueError for a cache whose blocks hold more than keys, values and their scales."""

    def __init__(self, cache: PagedKVCache, via_host: bool | None = None):
        spec = cache.specs[0]
        self.num_layers, self._page_tokens = spec.num_layers, page_tokens_of(spec.block_size)
        self.layer_bytes = replace(spec, num_layers=1, layers=(), block_size=self._page_tokens).bytes_per_block
        self._parts, self._head_bytes = spec.block_size // self._page_tokens, self.layer_bytes // spec.num_kv_heads
        self._tensors = [cache.data.view(torch.uint8)]  # torch cannot index float8
        if isinstance(cache, MovesScales):
            self._tensors.append(cache.scale_of_slots)
        own, found = self._parts * self.layer_bytes, sum(tensor[0, 0].nbytes for tensor in cache.blocks)
        if own != found:
            raise ValueError(
                f"a page store: expected blocks of {own} bytes a layer, keys, values and scale_of_slots, "
                f"got {found} in {type(cache).__name__}: one that holds more needs gather_pages, scatter_pages, "
                "num_layers and layer_bytes of its own"
            )
        on_device = cache.data.device.type != "cpu" if via_host is None else via_host
        place = range(cache.num_blocks)
        self._all = None if on_device else _HostBlocks(self._tensors, self._views(self._tensors), place)

    def gather_pages(self, pages: Sequence[Page], layers: range, buffers: Iterable[memoryview]) -> Iterator[memoryview]:
        """Copies these layers of each page into its buffer, and yields each when it is full. Waits for the device."""
        host, chosen = self._on_host(pages, layers, read=True)
        for page, buffer in zip(pages, buffers, strict=True):
            of_page = host.of(page, chosen)
            for row, part in zip(self._rows(buffer, of_page), of_page, strict=True):
                row[...] = part
            yield buffer

    def scatter_pages(self, pages: Sequence[Page], layers: range, buffers: Iterable[memoryview]) -> None:
        """Copies each page's buffer into these layers of the page. Takes one buffer after another."""
        whole = len(pages) == self._parts * len({page.block for page in pages})
        host, chosen = self._on_host(pages, layers, read=not whole)
        for page, buffer in zip(pages, buffers, strict=True):
            of_page = host.of(page, chosen)
            for row, part in zip(self._rows(buffer, of_page), of_page, strict=True):
                part[...] = row
        if isinstance(host.place, dict):
            for tensor, copy in zip(self._tensors, host.tensors, strict=True):
                ids = block_ids(host.place, tensor.device)
                tensor[layers.start : layers.stop].index_copy_(2, ids, copy.to(tensor.device))

    def _on_host(self, pages: Sequence[Page], layers: range, read: bool) -> tuple[_HostBlocks, slice]:
        """The blocks of pages in host memory, and where in them these layers are. read: with what is in them."""
        if self._all is not None:
            return self._all, slice(layers.start, layers.stop)
        place = {block: at for at, block in enumerate(dict.fromkeys(page.block for page in pages))}
        tensors = []
        for tensor in self._tensors:
            chosen = tensor[layers.start : layers.stop]
            if read:
                tensors.append(chosen.index_select(2, block_ids(place, tensor.device)).cpu())
            else:
                tensors.append(torch.empty((*chosen.shape[:2], len(place), *chosen.shape[3:]), dtype=tensor.dtype))
        return _HostBlocks(tensors, self._views(tensors), place), slice(None)

    def _views(self, tensors: Sequence[Tensor]) -> list[_Array]:
        """Tensors in host memory, seen as pages. The bytes of a head's key or value are one item, so that it is copied
        at once."""
        views = []
        for at, tensor in enumerate(tensors):
            paged = tensor.unflatten(3, (self._parts, self._page_tokens))
            view = paged.permute(2, 3, 0, 5, 1, 4, *range(6, paged.dim())).numpy()
            views.append(view.view(f"V{view.shape[-1]}")[..., 0] if at == 0 else view)
        return views

    def _rows(self, buffer: memoryview, of_page: Sequence[_Array]) -> list[_Array]:
        """A buffer, seen as the data and the scales of a page, each as they are in the cache."""
        num_layers, num_heads = of_page[0].shape[:2]
        if (expected := num_layers * self.layer_bytes) != buffer.nbytes:
            raise ValueError(f"expected a buffer of {expected} bytes for {num_layers} layers, got {buffer.nbytes}")
        rows, start = [], 0
        for part in of_page:
            strides = [part.dtype.itemsize]
            for length in reversed(part.shape[2:]):
                strides.insert(0, strides[0] * length)
            of_head, *within = strides
            steps = (num_heads * self._head_bytes, self._head_bytes, *within)
            rows.append(np.ndarray(part.shape, part.dtype, buffer, start, steps))
            start += of_head
        return rows
