"""The tensors in which keys and values live, cut into blocks (PagedAttention, Kwon et al. 2023)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from reference_impl.interfaces import Batch, BlockId, BlockPair, KVSpec, Transfers
from reference_impl.kernels.reference import to_eight_bits

TRANSFERRED = 32 << 20  # bytes that are gathered on the device at a time, on their way to the host or back


class PagedKVCache:
    """Keys and values: data [layers of a group, 2, num_blocks, block_size, num_kv_heads, head_dim].

    Each block belongs to one KV group at a time, and holds its tokens for all layers of that group.
    Positions come before heads (the layout called NHD): one token's keys of all heads lie side by side,
    so writing a token is one contiguous copy.

    A dtype of 8 bits has a scale for each head of a slot besides: scale [layers of a group, 2, num_blocks,
    num_kv_heads, block_size] float32. Slots come last: the scales of one head of a block lie side by side.

    num_host_blocks: room in host memory for blocks that are swapped out: host and host_scale, with blocks first,
    so that each is one copy.

    ValueError for a spec of anything else: a latent, a state, values of 4 bits, scales of smaller groups.
    """

    def __init__(
        self,
        specs: Sequence[KVSpec],
        num_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
        num_host_blocks: int = 0,
    ):
        self.specs, self.num_blocks = tuple(specs), num_blocks
        for each in self.specs:
            _check(each, dtype)
        spec = self.specs[0]

        def make(dtype: torch.dtype, *block: int) -> tuple[Tensor, Tensor]:
            # Zeros, not empty: the pages are touched now, so a machine without the memory fails here.
            data = torch.zeros((spec.num_layers, 2, num_blocks, *block), dtype=dtype, device=device)
            pinned = device.type == "cuda" and num_host_blocks > 0
            host = torch.zeros((num_host_blocks, spec.num_layers, 2, *block), dtype=dtype, pin_memory=pinned)
            self._moved.append((_as_bytes(data).movedim(2, 0), _as_bytes(host)))
            return data, host

        self._moved: list[tuple[Tensor, Tensor]] = []  # on the device and on the host, each [blocks, layers, 2, ...]
        self.data, self.host = make(dtype, spec.block_size, spec.num_kv_heads, spec.head_dim)
        self._scales: list[tuple[Tensor, Tensor]] = []
        if dtype.itemsize == 1:
            self.scale, self.host_scale = make(torch.float32, spec.num_kv_heads, spec.block_size)
            self._scales = [(keys.mT, values.mT) for keys, values in self.scale]
        self._place = {layer: place for s in specs for place, layer in enumerate(s.layers or range(s.num_layers))}
        self._pages = [(keys, values) for keys, values in self.data]
        self._slots = [(keys.flatten(0, 1), values.flatten(0, 1)) for keys, values in _as_bytes(self.data)]

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """(keys, values), each [num_blocks, block_size, num_kv_heads, head_dim]."""
        return self._pages[self._place[layer]]

    def scales(self, layer: int) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """(of keys, of values), each [num_blocks, block_size, num_kv_heads] float32; None unless of 8 bits."""
        return self._scales[self._place[layer]] if self._scales else (None, None)

    def write(self, layer: int, key: Tensor, value: Tensor, batch: Batch) -> None:
        """Stores new keys and values, each [num_tokens, num_kv_heads, head_dim], in the slots of the layer's group."""
        slots, size = batch.groups[batch.group_of_layer[layer]].slot_mapping, batch.block_size
        for cache, scale, fresh in zip(self._slots[self._place[layer]], self.scales(layer), (key, value), strict=True):
            if scale is not None:
                fresh, scale[slots // size, slots % size] = to_eight_bits(fresh, self.data.dtype)
            cache.index_copy_(0, slots, _as_bytes(fresh))

    def transfer(self, transfers: Transfers) -> None:
        """To the host first, then copies, then back: a block given up may be written anew in the same step.

        Scales go where their blocks go. On a GPU nothing waits here: all takes its place in the stream.
        """
        for blocks, host in self._moved:
            at_once = max(1, TRANSFERRED // host[:1].nbytes) if len(host) else 1
            for pairs in _pieces(transfers.swap_out, at_once):
                found = blocks.index_select(0, _ids((pair.src for pair in pairs), blocks.device))
                for pair, block in zip(pairs, found, strict=True):
                    host[pair.dst].copy_(block, non_blocking=True)
            if pairs := transfers.copies:
                # All sources are read before any target is written, so a block may be both.
                found = blocks.index_select(0, _ids((pair.src for pair in pairs), blocks.device))
                blocks.index_copy_(0, _ids((pair.dst for pair in pairs), blocks.device), found)
            for pairs in _pieces(transfers.swap_in, at_once):
                found = torch.empty((len(pairs), *host.shape[1:]), dtype=host.dtype, device=blocks.device)
                for pair, block in zip(pairs, found, strict=True):
                    block.copy_(host[pair.src], non_blocking=True)
                blocks.index_copy_(0, _ids((pair.dst for pair in pairs), blocks.device), found)

    # --- pages: blocks as bytes, for a store beyond the device ------------------------------------------------------

    @property
    def num_layers(self) -> int:
        return self.specs[0].num_layers

    def read_pages(self, blocks: Sequence[BlockId], layer: int) -> list[bytes]:
        """Of each block a layer's values and scales. Waits for the device."""
        ids, place = _ids(blocks, self.data.device), self._place[layer]
        found = (of_blocks[:, place].index_select(0, ids).cpu() for of_blocks, _ in self._moved)
        parts = [part.contiguous().view(torch.uint8) for part in found]
        return [b"".join(part[i].numpy().tobytes() for part in parts) for i in range(len(blocks))]

    def write_page(self, block: BlockId, layer: int, content: memoryview) -> None:
        """ValueError if the content is not as long as a block's part of a layer."""
        parts = [of_blocks[block, self._place[layer]] for of_blocks, _ in self._moved]
        if len(content) != (expected := sum(part.nbytes for part in parts)):
            raise ValueError(
                f"expected {expected} bytes for layer {layer} of a page, got {len(content)}: it is of another model or "
                "cache"
            )
        start = 0
        for part in parts:
            found = torch.frombuffer(bytearray(content[start : start + part.nbytes]), dtype=part.dtype)
            part.copy_(found.view(part.shape))
            start += part.nbytes


def _check(spec: KVSpec, dtype: torch.dtype) -> None:
    scale = 32 if dtype.itemsize == 1 else 0
    expected = {"kind": "kv", "bits_per_value": 8 * dtype.itemsize, "bits_per_scale": scale, "bits_per_zero_point": 0}
    if spec.group_size not in (None, spec.head_dim):
        expected["group_size"] = None
    for name, value in expected.items():
        if (found := getattr(spec, name)) != value:
            raise ValueError(
                f"PagedKVCache in {dtype}: expected a KVSpec with {name}={value!r}, got {name}={found!r}: such a cache "
                "is one of your own, see Parts.kv_cache"
            )


def _pieces(pairs: Sequence[BlockPair], size: int) -> Iterator[Sequence[BlockPair]]:
    return (pairs[start : start + size] for start in range(0, len(pairs), size))


def _as_bytes(x: Tensor) -> Tensor:
    """Numbers of 8 bits as bytes, anything else as it is: torch cannot index float8 on the left."""
    return x.view(torch.uint8) if x.element_size() == 1 else x


def _ids(blocks: Iterable[BlockId], device: torch.device) -> Tensor:
    ids = torch.tensor(list(blocks))
    return ids.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else ids.to(device)
