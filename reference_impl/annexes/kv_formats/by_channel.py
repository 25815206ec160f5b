"""A KV cache of 4 bits as KIVI has it (Liu et al. 2024): keys rounded by channel over a block, values by token.

Which a block's scales are is known when it is full. Until then its tokens lie in `open`, see `open_blocks.py`; the step
that writes a block's last token rounds it. Where that token was a wrong guess, the block is still open, and is rounded
anew when its last token is written again: until then no query reads it rounded, since only later positions do.

Guesses of a tree all lie in `open`, one behind the other, until a path is kept: then its tokens move to their
positions, and the blocks that they fill are rounded (`move_open`, `round_open`).

Extends `PagedKVCache.write`; adds `write_open` and `read_rounded`, see `OpenBlockAttention`, for kernels `by_channel`
and `seats`, see `TritonOpenBlockAttention`, and for trees the two, see `TreeRun.verify`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from reference_impl.annexes.kv_formats.open_blocks import Moves, SeatedBatch, extended, moves
from reference_impl.annexes.kv_formats.spec import ByChannelSpec
from reference_impl.core.kv_cache import PagedKVCache
from reference_impl.core.staging import to_device
from reference_impl.interfaces import Batch, KVSpec, Opened, Step
from reference_impl.kernels import reference

SCALE_BITS = 16  # of each of the two
MOST_NUMBERS = 1 << 24  # that `round_open` gathers at a time


class ByChannelKVCache(PagedKVCache):
    """data [layers of a group, 2, num_blocks, block_size, num_kv_heads, head_dim / 2] uint8, two codes in a byte.

    key_scale [layers of a group, num_blocks, num_kv_heads, head_dim, 2 (scale, lowest)] float16; value_scale [layers of
    a group, num_blocks, block_size, num_kv_heads, 2] float16. In memory channels and slots come last. open [layers of
    the model, 2, num_seqs x open_blocks x block_size, num_kv_heads, head_dim], of open_dtype. num_seqs: requests that
    may have a slot. dtype: uint8. ValueError for a head_dim that is odd, and for a spec of anything else.
    """

    keeps_open_blocks = True

    def __init__(
        self, specs: Sequence[ByChannelSpec], num_blocks: int, dtype: torch.dtype, device: torch.device,
        open_dtype: torch.dtype, num_seqs: int,
    ):  # fmt: skip
        for spec in specs:
            _check(spec, dtype, open_dtype)
        bytes_of = [
            KVSpec(s.num_layers, s.num_kv_heads, s.head_dim // 2, s.block_size, bits_per_value=8, layers=s.layers,
                   window=s.window)
            for s in specs
        ]  # fmt: skip
        super().__init__(bytes_of, num_blocks, dtype, device)
        spec = specs[0]
        self.specs = tuple[KVSpec, ...](specs)
        self.block_size, self.open_blocks = spec.block_size, spec.open_blocks
        heads, layers = spec.num_kv_heads, sum(s.num_layers for s in specs)

        def zeros(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        of_keys = zeros(spec.num_layers, num_blocks, heads, 2, spec.head_dim)
        of_values = zeros(spec.num_layers, num_blocks, 2, heads, spec.block_size)
        self.key_scale, self.value_scale = of_keys.mT, of_values.permute(0, 1, 4, 3, 2)
        room = num_seqs * spec.open_blocks * spec.block_size
        self.open = zeros(layers, 2, room, heads, spec.head_dim, dtype=open_dtype)
        self.blocks = [self.data.movedim(2, 0), of_keys.movedim(1, 0), of_values.movedim(1, 0)]
        self._layers: dict[KVSpec, Tensor] = {
            s: torch.tensor(list(s.layers or range(s.num_layers)), device=device) for s in specs
        }
        self._seats: dict[str, int] = {}  # by request id, its slot in the worker
        self._names: dict[int, str] = {}  # by slot
        self._moves: tuple[Batch, dict[str, Tensor]] | None = None  # of the batch that was written last
        self._seats_of: tuple[Batch, Tensor] | None = None

    def follow(self, step: Step, opened: Sequence[Opened]) -> None:
        """A worker's slots tell which request has which: see `FollowsSlots`."""
        for slot in step.closed:
            if (name := self._names.pop(slot, None)) is not None and self._seats.get(name) == slot:
                del self._seats[name]
        for new in opened:
            self._names[new.slot], self._seats[new.request_id] = new.request_id, new.slot

    def write(self, layer: int, key: Tensor, value: Tensor, batch: Batch) -> None:
        self.write_open(layer, key, value, batch)

    def write_open(self, layer: int, key: Tensor, value: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """As `write`. Returns keys and values of the `extended` rows as they are, [extended, num_kv_heads, head_dim]
        each."""
        at, place = self._moves_of(batch), self._place[layer]
        whole = []
        for stays, new in zip(self.open[layer], (key, value), strict=True):
            old = stays.index_select(0, at["old"])
            whole.append(torch.cat((old, new)).index_select(0, at["source"]))
            stays.index_copy_(0, at["kept_at"], new.index_select(0, at["kept"]))
        if len(at["last"]):
            slots = batch.groups[batch.group_of_layer[layer]].slot_mapping.index_select(0, at["last"])
            keys, values = (x[at["full"]] for x in whole)  # [blocks, block_size, num_kv_heads, head_dim]
            blocks = slots // self.block_size
            codes, scale = reference.channels_to_four_bits(keys)
            self.data[place, 0].index_copy_(0, blocks, codes)
            self.key_scale[place].index_copy_(0, blocks, scale)
            codes, scale = reference.to_four_bits(values)
            self.data[place, 1].index_copy_(0, blocks, codes)
            self.value_scale[place].index_copy_(0, blocks, scale)
        return whole[0], whole[1]

    def read_rounded(self, layer: int, slots: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(keys, values) of tokens in full blocks, [*slots.shape, num_kv_heads, head_dim] each."""
        place = self._place[layer]
        keys, values = (of_all[slots] for of_all in self._slots[place])
        by_channel = self.key_scale[place][slots // self.block_size]
        by_token = self.value_scale[place][slots // self.block_size, slots % self.block_size]
        return (
            reference.channels_from_four_bits(keys, by_channel, dtype),
            reference.from_four_bits(values, by_token, dtype),
        )

    def by_channel(self, layer: int) -> reference.ByChannel:
        """Of one layer what kernels read and write."""
        place = self._place[layer]
        codes, opens = self.data[place], self.open[layer]
        return reference.ByChannel(
            codes[0], codes[1], self.key_scale[place], self.value_scale[place], opens[0], opens[1], self.open_blocks
        )

    def seats(self, batch: Batch) -> Tensor:
        """[rows] int64: where each row's open blocks lie."""
        if isinstance(batch, SeatedBatch):
            return batch.seats
        if self._seats_of is None or self._seats_of[0] is not batch:
            seats = {"seats": np.array([self._seats[name] for name in batch.request_ids])}
            self._seats_of = batch, to_device(seats, self.data.device)["seats"]
        return self._seats_of[1]

    def move_open(self, seats: Tensor, sources: Tensor, targets: Tensor) -> None:
        """Copies open tokens of requests, in all layers. All sources are read before any target is written. [tokens]
        int64 each: sources and targets are positions, within the request's last open_blocks blocks; no target twice."""
        at, to = (self._in_open(seats, positions) for positions in (sources, targets))
        self.open.index_copy_(2, to, self.open.index_select(2, at))

    def round_open(self, spec: KVSpec, seats: Tensor, begins: Tensor, blocks: Tensor) -> None:
        """Rounds blocks of requests, in all layers of the spec, from what is open. [blocks] int64 each: begins are
        positions; blocks say which of the pool, none twice."""
        positions = begins[:, None] + torch.arange(self.block_size, device=begins.device)
        at = self._in_open(seats[:, None], positions)  # [blocks, block_size]
        layers, most = self._layers[spec], max(1, MOST_NUMBERS // (at.numel() * self.open[0, 0, 0].numel()))
        ways = (reference.channels_to_four_bits, self.key_scale), (reference.to_four_bits, self.value_scale)
        for place in range(0, len(layers), most):
            some = layers[place : place + most, None, None]
            places = slice(place, place + len(some))
            for which, (to_codes, scales) in enumerate(ways):
                codes, scale = to_codes(self.open[some, which, at])  # [layers, blocks, block_size, num_kv_heads, ...]
                self.data[places, which].index_copy_(1, blocks, codes)
                scales[places].index_copy_(1, blocks, scale)

    def _in_open(self, seats: Tensor, positions: Tensor) -> Tensor:
        ring = self.open_blocks * self.block_size
        return seats * ring + positions % ring

    def _moves_of(self, batch: Batch) -> dict[str, Tensor]:
        if self._moves is None or self._moves[0] is not batch:
            seats = np.array([self._seats[name] for name in batch.request_ids])
            found: Moves = moves(extended(batch), seats, self.block_size, self.open_blocks)
            self._moves = batch, to_device(vars(found), self.data.device)
        return self._moves[1]


def _check(spec: KVSpec, dtype: torch.dtype, open_dtype: torch.dtype) -> None:
    expected = {
        "kind": "kv", "bits_per_value": 4, "bits_per_scale": SCALE_BITS, "bits_per_zero_point": SCALE_BITS,
        "open_bits_per_value": 8 * open_dtype.itemsize,
    }  # fmt: skip
    for name, value in expected.items():
        if (found := getattr(spec, name, None)) != value:
            raise ValueError(f"ByChannelKVCache: expected a ByChannelSpec with {name}={value!r}, got {name}={found!r}")
    if spec.group_size not in (None, spec.head_dim):
        raise ValueError(f"ByChannelKVCache: expected group_size=None, got {spec.group_size}: one scale for each head")
    if spec.head_dim % 2:
        raise ValueError(f"kv_dtype kivi: expected an even head_dim, two numbers in a byte, got {spec.head_dim}")
    if dtype is not torch.uint8:
        raise ValueError(f"ByChannelKVCache: expected dtype torch.uint8, two codes in a byte, got {dtype}")
